"""Sizes and request units are counted as DynamoDB counts them."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.store.fake import FakeStore
from provisioner.store.port import Absent, Add, Check, ConditionFailed, Delete, Key, Put, Update
from provisioner.store.rules import check_sizes, encode
from provisioner.store.sizes import MAX_ITEM_BYTES, item_bytes, value_bytes
from provisioner.store.steady import SteadyStore
from provisioner.store.units import Consumed, MeteredStore, query_units, read_units, write_units
from tests.contract.test_store_in_bad_times import Hasty

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
ITEMS = st.dictionaries(TEXT, JSON | st.frozensets(TEXT, max_size=4), max_size=8)


@pytest.mark.parametrize(
    ("value", "size"),
    [(None, 1), (True, 1), ("", 0), ("é", 2), (0, 1), (7, 2), (10, 2), (100, 2), (123, 3), (-1, 3),
     (2**60, 11), (frozenset({"a", "bc"}), 3), ([], 6), ({"a": 1}, 11), (0.5, 7)],
)  # fmt: skip
def test_a_value_has_its_size(value: object, size: int) -> None:
    """Text by its UTF-8, numbers by pairs of digits, sets by their members, all else as a list of its JSON text."""
    assert value_bytes(value) == size


@settings(deadline=None)
@given(ITEMS, TEXT.filter(bool), TEXT.filter(bool))
def test_an_item_is_never_larger_than_its_json_and_its_key(item: dict[str, object], pk: str, sk: str) -> None:
    """What lets most items pass uncounted holds for every item."""
    key_bytes = len(pk.encode()) + len(sk.encode())
    assert item_bytes(pk, sk, item, expires=True) <= len(encode(item).encode()) + key_bytes + 64


def test_sizes_are_refused_to_the_byte() -> None:
    """An item of exactly the limit passes, one byte more does not."""
    key = Key(pk="p", sk="s")
    room = MAX_ITEM_BYTES - item_bytes("p", "s", {"a": ""})
    for over in (0, 1):
        item = {"a": "x" * (room + over)}
        writes = [(key, item, json.dumps(item), False)]
        if over:
            with pytest.raises(Exception, match="limit"):
                check_sizes(writes)
        else:
            check_sizes(writes)


def test_units_round_up() -> None:
    """Reads count 4 KB, writes 1 KB, begun ones whole; a transaction twice; a page of a query is rounded once."""
    assert [read_units(size) for size in (0, 1, 4096, 4097)] == [1, 1, 1, 2]
    assert read_units(4097, consistent=False) == 1
    assert read_units(1, transactional=True) == 2
    assert query_units([100] * 40) == 1
    assert query_units([]) == 1
    assert [write_units(size, transactional=False) for size in (0, 1024, 1025)] == [1, 1, 2]
    assert write_units(1025) == 4


async def test_the_metered_store_counts_what_is_asked() -> None:
    """Every call is counted by its kind, in units and by partition; a refused transaction costs as much."""
    store = MeteredStore(FakeStore())
    big = Key(pk="big", sk="-")
    await store.transact(
        [Put(key=big, item={"t": "x" * 2000}), Check(key=Key(pk="n", sk="-"), conditions=(Absent(),))]
    )
    assert store.consumed.write == 4 + 2
    assert store.consumed.writes_by_partition == {"big": 4, "n": 2}
    with pytest.raises(ConditionFailed):
        await store.transact([Put(key=big, item={}, conditions=(Absent(),))])
    assert store.consumed.write == 6 + 4
    store.consumed = Consumed()
    await store.transact([Update(key=Key(pk="n", sk="-"), add={"n": Add(delta=1)}), Delete(key=big)])
    assert store.consumed.write == 2 + 4
    await store.get(big)
    await store.get_many([big, Key(pk="n", sk="-"), big])
    await store.query("n")
    assert store.consumed.read == 1 + 2 + 1
    assert store.consumed.calls == {"transact": 1, "get": 1, "get_many": 1, "query": 1}


async def test_what_is_repeated_is_counted() -> None:
    """The steady store counts its repeats beside what the store below counts."""
    inner = FakeStore()
    store = SteadyStore(inner, Hasty(), random.Random(1))
    inner.fail_call(1)
    inner.fail_call(2)
    await store.get(Key(pk="p", sk="s"))
    assert store.counts == {"repeated": 2}
