"""The store suite on DynamoDB as it may be, not as emulators are: see `hostile.py`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from provisioner.store.dynamodb_pace import Gate, Pace
from provisioner.store.port import (
    Absent,
    ConditionFailed,
    Conflict,
    Exists,
    Key,
    Put,
    Store,
    StoreUnavailable,
    Throttled,
    TooLarge,
)
from provisioner.store.steady import SteadyStore
from tests.contract.dynamo import dynamo_store
from tests.contract.hostile import HostileClient, cancelled, client_error
from tests.contract.test_store import PROMISES, closed_is_unavailable, refuses_what_is_too_much
from tests.contract.test_store_in_bad_times import OTHERWISE, Hasty

Promise = Callable[[Store], Awaitable[None]]


def named(promise: Promise) -> str:
    return promise.__name__


@pytest.mark.parametrize("promise", [each for each in PROMISES if each not in OTHERWISE], ids=named)
async def test_the_promises_hold_when_calls_fail(ministack: str, promise: Promise) -> None:
    """Throttles, conflicts, lost answers, unprocessed keys and short pages change no outcome for who repeats."""
    clients: list[HostileClient] = []

    def wrap(client: Any) -> Any:
        clients.append(HostileClient(client, share=0.35))
        return clients[-1]

    async with dynamo_store(ministack, wrap=wrap, clock=Hasty()) as (store, _):
        await promise(SteadyStore(store, Hasty(), random.Random(1)))
        injected = clients[0].injected
        failed = sum(count for kind, count in injected.items() if kind != "unprocessed")
        counters = store.counters
        assert failed <= counters.throttled + counters.conflicts + counters.unavailable + counters.refused
        assert store.gate.running == 0


@pytest.mark.parametrize("promise", PROMISES, ids=named)
async def test_the_promises_hold_when_transactions_meet(ministack: str, promise: Promise) -> None:
    """Transactions that meet at an item conflict, as they do on DynamoDB; the adapter says so, and nothing is lost."""
    async with dynamo_store(ministack, wrap=lambda client: HostileClient(client, conflicts=True)) as (
        store,
        _,
    ):
        await promise(store)


async def test_racing_transactions_do_conflict(ministack: str) -> None:
    """The layer does what it is for: of transactions on one item at once, some are told `Conflict`."""
    async with dynamo_store(ministack, wrap=lambda client: HostileClient(client, conflicts=True)) as (
        store,
        _,
    ):
        put = Put(key=Key(pk="p", sk="a"), item={})
        outcomes = await asyncio.gather(*(store.transact([put]) for _ in range(8)), return_exceptions=True)
        assert any(isinstance(outcome, Conflict) for outcome in outcomes)
        assert store.counters.conflicts == sum(isinstance(outcome, Conflict) for outcome in outcomes)


class Answers:
    """A client whose next transaction fails as told."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def transact_write_items(self, **request: Any) -> Any:
        raise self._error


NONE = {"Code": "None"}
CONFLICT = {"Code": "TransactionConflict", "Message": "Transaction is ongoing for the item"}
THROTTLE = {"Code": "ThrottlingError", "Message": "Throughput exceeds the current capacity"}
FULL = {"Code": "ProvisionedThroughputExceeded", "Message": "The level of configured throughput was exceeded"}
LARGE = {"Code": "ValidationError", "Message": "Item size to update has exceeded the maximum allowed size"}
OLD = {"pk": {"S": "p"}, "sk": {"S": "a"}, "v": {"N": "3"}, "n": {"N": "1"}}
FAILED = {"Code": "ConditionalCheckFailed", "Message": "The conditional request failed", "Item": OLD}
GONE = {"Code": "ConditionalCheckFailed", "Message": "The conditional request failed"}


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([NONE, FAILED], ConditionFailed),
        ([FAILED, CONFLICT], ConditionFailed),
        ([CONFLICT, FAILED], Conflict),
        ([THROTTLE, FAILED], Throttled),
        ([NONE, FULL], Throttled),
        ([NONE, LARGE], TooLarge),
        ([NONE, NONE], StoreUnavailable),
        ([], StoreUnavailable),
    ],
)
async def test_the_first_reason_of_a_cancelled_transaction_counts(
    ministack: str, reasons: list[dict[str, Any]], expected: type[Exception]
) -> None:
    """A condition that failed behind one that could not be looked at is no answer yet: the whole is repeated."""
    ops = [Put(key=Key(pk="p", sk=sk), item={}, conditions=(Exists(),)) for sk in "ab"]
    async with dynamo_store(ministack, wrap=lambda client: Answers(cancelled(reasons))) as (store, _):
        with pytest.raises(expected):
            await store.transact(ops)


async def test_a_failed_condition_brings_the_item(ministack: str) -> None:
    """The first failed index, and the item as it is or None."""
    op = Put(key=Key(pk="p", sk="a"), item={}, conditions=(Absent(),))
    other = Put(key=Key(pk="p", sk="b"), item={}, conditions=(Exists(),))
    for reasons, version in (([NONE, FAILED], 3), ([NONE, GONE], None)):
        error = cancelled(reasons)
        async with dynamo_store(ministack, wrap=lambda client, error=error: Answers(error)) as (store, _):
            with pytest.raises(ConditionFailed) as raised:
                await store.transact([other, op])
            assert raised.value.index == 1
            current = raised.value.current
            assert (current.version if current else None) == version


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ThrottlingException", 400, Throttled),
        ("TransactionInProgressException", 400, StoreUnavailable),
        ("TransactionConflictException", 400, Conflict),
        ("InternalServerError", 500, StoreUnavailable),
        ("SomethingNew", 503, StoreUnavailable),
    ],
)
async def test_an_error_is_the_ports(
    ministack: str, code: str, status: int, expected: type[Exception]
) -> None:
    """Each answered error becomes what the caller can act on."""
    error = client_error("TransactWriteItems", code, "said so", status)
    async with dynamo_store(ministack, wrap=lambda client: Answers(error)) as (store, _):
        with pytest.raises(expected):
            await store.transact([Put(key=Key(pk="p", sk="a"), item={})])


def test_what_is_left_out_has_its_own_test() -> None:
    """Only what has another error through `SteadyStore` is left out of the failing layer, and runs on the other."""
    assert {closed_is_unavailable, refuses_what_is_too_much} <= set(OTHERWISE) <= set(PROMISES)


async def test_the_failing_layer_fails_in_every_way(ministack: str) -> None:
    """Each kind of failure is injected, counted by the adapter, and slows it down."""
    clients: list[HostileClient] = []

    def wrap(client: Any) -> Any:
        clients.append(HostileClient(client, share=0.5))
        return clients[-1]

    async with dynamo_store(ministack, wrap=wrap, clock=Hasty()) as (store, _):
        steady = SteadyStore(store, Hasty(), random.Random(1))
        keys = [Key(pk="p", sk=str(n)) for n in range(8)]
        for n in range(40):
            await steady.transact([Put(key=key, item={"n": n}) for key in keys])
            assert [each.item["n"] if each else None for each in await steady.get_many(keys)] == [n] * 8
        assert set(clients[0].injected) == {
            "throttled", "provisioned", "limit", "server", "refused connection", "lost", "late", "conflict",
            "item throttled", "in progress", "unprocessed",
        }  # fmt: skip
        assert min(store.counters.throttled, store.counters.conflicts, store.counters.unavailable) > 0
        assert store.counters.unprocessed > 0
        assert store.gate.pace.limit < 64


async def test_closing_finishes_what_was_accepted(ministack: str) -> None:
    """Calls under way and calls that wait for their turn are answered; later ones are refused."""
    async with dynamo_store(ministack, pace=Pace(least=1, most=2)) as (store, _):
        puts = [Put(key=Key(pk="p", sk=f"{n:02d}"), item={}) for n in range(8)]
        tasks = [asyncio.create_task(store.transact([put])) for put in puts]
        await asyncio.sleep(0)
        assert store.gate.waiting > 0
        await store.close()
        await asyncio.gather(*tasks)
        with pytest.raises(StoreUnavailable):
            await store.transact([puts[0]])


async def test_too_many_waiting_calls_are_refused_at_once(ministack: str) -> None:
    """What would wait behind a full line is `Throttled`, counted, and reaches no table."""
    async with dynamo_store(ministack, pace=Pace(least=1, most=1)) as (store, _):
        store.gate = Gate(Pace(least=1, most=1), lambda: 0.0, max_waiting=2)
        gets = (store.get(Key(pk="p", sk=str(n))) for n in range(8))
        outcomes = await asyncio.gather(*gets, return_exceptions=True)
        assert sum(isinstance(outcome, Throttled) for outcome in outcomes) == store.counters.shed == 5
        assert store.counters.calls["get_item"] == 3
