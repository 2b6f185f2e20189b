"""Request units as `units.py` computes them are those that the table reports."""

from __future__ import annotations

from typing import Any

import pytest

from provisioner.store.port import Absent, Add, Check, Delete, Key, Op, Put, Update
from provisioner.store.units import MeteredStore
from tests.contract.dynamo import dynamo_store
from tests.contract.test_store import tokens

ITEMS: dict[str, dict[str, Any]] = {
    "small": {"n": 1},
    "record": {
        "v": 1,
        "state": "running",
        "none": None,
        "at": 1.5,
        "list": [1, {"a": "é"}],
        "tags": frozenset("ab"),
    },
    "kilobyte": {"text": "x" * 1100, "n": -(2**40)},
    "large": {"text": "é" * 5000, "more": {"a": ["x" * 3000]}},
}


async def test_computed_units_are_the_reported_ones(ministack: str) -> None:
    """Puts, updates, checks and deletes of small and large items, and of what is missing.

    MiniStack reports every read as one unit, so that reads are not compared."""
    async with dynamo_store(ministack) as (inner, _):
        store = MeteredStore(inner)
        computed, reported = store.consumed, inner.counters

        async def writes(*ops: Op) -> None:
            before = computed.write, reported.write_units
            await store.transact(ops)
            assert computed.write - before[0] == reported.write_units - before[1], ops

        keys = {name: Key(pk=f"P#{name}", sk="-") for name in ITEMS}
        for name, item in ITEMS.items():
            await writes(Put(key=keys[name], item=item, conditions=(Absent(),)))
            await writes(Update(key=keys[name], add={"count": Add(delta=1)}, set={"text2": "y" * 700}))
            await writes(Check(key=keys[name], conditions=()), Put(key=Key(pk="q", sk=name), item=item))
        await writes(Check(key=Key(pk="none", sk="-"), conditions=(Absent(),)))

        for key in keys.values():
            await writes(Delete(key=key))
        await writes(Delete(key=keys["small"]))


async def test_a_repeat_is_billed_as_a_read(ministack: str) -> None:
    """Under a known token nothing is written, and no write unit is counted."""
    async with dynamo_store(ministack) as (store, _):
        (token,) = tokens(1)
        put = Put(key=Key(pk="p", sk="s"), item={"n": 1})
        await store.transact([put], token=token)
        assert (store.counters.read_units, store.counters.write_units) == (0, 2)
        await store.transact([put], token=token)
        assert (store.counters.read_units, store.counters.write_units) == (pytest.approx(2), 2)
        assert store.counts["transact_write_items"] == 2
