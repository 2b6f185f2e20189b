"""Items and operations on their way to DynamoDB's API and back."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.store.dynamodb_items import (
    client_token,
    decode_item,
    decode_value,
    encode_value,
    fresh_version,
    transact_item,
)
from provisioner.store.port import Absent, Add, AttributeIn, AttributeIs, Check, Key, Put, Update, VersionIs
from provisioner.store.rules import decode, encode
from provisioner.store.sizes import is_native
from shoal.contract.states import SessionState
from tests.unit.provisioner.store.test_units import ITEMS

KEY = Key(pk="p", sk="s")


def put_and_read(item: dict[str, Any]) -> Any:
    put = transact_item("t", Put(key=KEY, item=item), fresh=7)["Put"]
    # As over the wire.
    return decode_item(json.loads(json.dumps(put["Item"])))


@settings(deadline=None)
@given(ITEMS)
def test_an_item_comes_back_as_from_sqlite(item: dict[str, Any]) -> None:
    """Whatever JSON and sets are put: the same values, of the same types, as the other adapter gives back."""
    stored = put_and_read(item)
    other = decode(encode(item))
    assert stored.item == other
    assert {name: repr(value) for name, value in stored.item.items() if not isinstance(value, frozenset)} == {
        name: repr(value) for name, value in other.items() if not isinstance(value, frozenset)
    }
    assert (stored.key, stored.version, stored.expires_at) == (KEY, 7, None)


@settings(deadline=None)
@given(ITEMS, st.randoms(use_true_random=False))
def test_the_same_operations_are_the_same_request(item: dict[str, Any], chance: random.Random) -> None:
    """The order in which attributes were named does not show: a token's repeat is compared byte for byte."""
    names = list(item)
    chance.shuffle(names)
    again = {name: item[name] for name in names}
    for first, second in (
        (Put(key=KEY, item=item), Put(key=KEY, item=again)),
        (Update(key=KEY, set=item), Update(key=KEY, set=again)),
    ):
        one, two = (json.dumps(transact_item("t", op, fresh=1)) for op in (first, second))
        assert one == two


def test_enumerations_are_their_text() -> None:
    """A str or int of a subclass is kept as the plain value."""
    assert encode_value(SessionState.RUNNING) == {"S": "running"}
    assert type(encode_value(SessionState.RUNNING)["S"]) is str


def test_numbers_as_dynamodb_gives_them_back() -> None:
    """Also with an exponent."""
    assert decode_value({"N": "-17"}) == -17
    assert decode_value({"N": "1E+3"}) == 1000
    with pytest.raises(ValueError):
        decode_value({"B": b""})
    assert not is_native(10**38)
    assert is_native(10**38 - 1)


def test_a_condition_names_only_what_it_uses() -> None:
    """DynamoDB refuses names and values that no expression uses, and an empty map of them."""
    ops = [
        Put(key=KEY, item={}),
        Put(key=KEY, item={}, conditions=(Absent(),)),
        Check(key=KEY, conditions=()),
        Check(key=KEY, conditions=(AttributeIn(name="a", values=()),)),
        Check(key=KEY, conditions=(VersionIs(version=1), AttributeIs(name="a", value=None))),
        Update(key=KEY),
        Update(
            key=KEY,
            set={"a": 1, "s": frozenset()},
            remove=("b",),
            add={"c": Add(delta=1, minimum=0, maximum=9), "d": Add(delta=0)},
            insert={"e": frozenset({"x"}), "f": frozenset()},
            discard={"g": frozenset({"x"})},
            conditions=(AttributeIn(name="a", values=tuple(range(150))),),
            expires_at=datetime(2026, 1, 1, tzinfo=UTC),
        ),
    ]
    for op in ops:
        ((_, request),) = transact_item("t", op, fresh=1).items()
        text = " ".join(request.get(name, "") for name in ("ConditionExpression", "UpdateExpression")) + " "
        for part in ("ExpressionAttributeNames", "ExpressionAttributeValues"):
            assert request.get(part) != {}
            for short in request.get(part, {}):
                assert any(short + end in text for end in " ,)"), (short, text)


def test_tokens_and_versions_are_derived() -> None:
    """A short token is itself; of a long one, and of an odd one, a digest; a version is the same for the same token."""
    assert client_token("tx_1") == "tx_1"
    for odd in ("x" * 37, "é", "", "a\n"):
        assert len(client_token(odd)) == 36
    assert fresh_version("t", 0) == fresh_version("t", 0)
    assert len({fresh_version("t", 0), fresh_version("t", 1), fresh_version("u", 0)}) == 3
    assert fresh_version("t", 0) > 1 << 40
