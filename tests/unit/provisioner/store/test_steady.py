"""What is repeated, how often, and that many that meet at one item all get through; in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from provisioner.clock import ManualClock
from provisioner.store.fake import FakeStore
from provisioner.store.port import (
    Absent,
    Add,
    ConditionFailed,
    Conflict,
    Key,
    Op,
    Put,
    StoreError,
    StoreUnavailable,
    Throttled,
    Update,
)
from provisioner.store.steady import SteadyStore
from shoal.contract.errors import ErrorCode, ShoalError

HOT = Key(pk="hot", sk="-")


class Contended(FakeStore):
    """A store whose transactions take 10 ms; one that meets another at an item is told `Conflict` at once."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._time = clock
        self._held: set[Key] = set()
        self.conflicts = 0

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        keys = {op.key for op in ops}
        if keys & self._held:
            self.conflicts += 1
            raise Conflict("another is at it")
        self._held |= keys
        try:
            await self._time.sleep(0.01)
            await super().transact(ops, token=token)
        finally:
            self._held -= keys


async def elapse(clock: ManualClock, work: asyncio.Future[list[object]]) -> list[object]:
    while not work.done():
        await clock.advance(0.005)
    return work.result()


@pytest.mark.parametrize("seed", range(5))
async def test_sixty_four_at_one_item_all_get_through(seed: int) -> None:
    """None of 64 that add to one counter at once is sent away, and none counts twice."""
    clock = ManualClock()
    inner = Contended(clock)
    store = SteadyStore(inner, clock, random.Random(seed))
    op = Update(key=HOT, add={"n": Add(delta=1)})
    await elapse(clock, asyncio.gather(*(store.transact([op]) for _ in range(64))))
    assert (await inner.get(HOT)).item == {"n": 64}  # type: ignore[union-attr]
    assert inner.conflicts > 64
    assert clock.monotonic() < 5


async def test_of_sixty_four_claims_one_wins_and_all_are_told() -> None:
    """A claim that lost is a failed condition, not a store that is away."""
    clock = ManualClock()
    store = SteadyStore(Contended(clock), clock, random.Random(1))

    async def claim(n: int) -> bool:
        try:
            await store.transact([Put(key=HOT, item={"n": n}, conditions=(Absent(),))])
        except ConditionFailed:
            return False
        return True

    outcomes = await elapse(clock, asyncio.gather(*(claim(n) for n in range(64))))
    assert outcomes.count(True) == 1


@pytest.mark.parametrize(
    ("error", "tries"), [(Throttled("t"), 5), (StoreUnavailable("u"), 5), (Conflict("c"), 11)], ids=str
)
async def test_tries_are_bounded(error: StoreError, tries: int) -> None:
    """What does not pass is given up after so many tries, within some seconds, with a time to come back."""
    clock = ManualClock()
    inner = FakeStore()
    for number in range(1, 50):
        inner.fail_call(number, error)
    store = SteadyStore(inner, clock, random.Random(1))
    work = asyncio.gather(store.transact([Put(key=HOT, item={})]), return_exceptions=True)
    (outcome,) = await elapse(clock, work)
    assert isinstance(outcome, ShoalError)
    assert outcome.code is ErrorCode.UNAVAILABLE
    assert outcome.retry_after_s
    assert len(inner.calls) == tries
    assert clock.monotonic() < 6
