"""The pace of calls to DynamoDB, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.clock import ManualClock
from provisioner.store.dynamodb_pace import BURST_S, RAISE, Busy, Gate, Pace


def test_a_throttle_halves_the_limit_once_a_burst() -> None:
    """Throttles of one burst halve once, those after it again, down to the least."""
    pace = Pace(least=2, most=64)
    for _ in range(10):
        pace.throttled(100.0)
    assert pace.limit == 32
    pace.throttled(100.0 + BURST_S)
    assert pace.limit == 16
    for n in range(10):
        pace.throttled(200.0 + n)
    assert pace.limit == 2


def test_answers_raise_it_a_little_each_round() -> None:
    """As many answers as the limit raise it by the same amount, up to the most."""
    pace = Pace(least=2, most=64)
    pace.throttled(0.0)
    for _ in range(32):
        pace.succeeded()
    assert 32 + 0.95 * RAISE < pace.limit <= 32 + RAISE
    for _ in range(10_000):
        pace.succeeded()
    assert pace.limit == 64


@settings(deadline=None)
@given(st.lists(st.booleans() | st.floats(0, 10), max_size=200))
def test_it_stays_within_its_bounds(events: list[bool | float]) -> None:
    """Whatever happens in whatever order."""
    pace, now = Pace(least=3, most=9), 0.0
    for event in events:
        if isinstance(event, float):
            now += event
        elif event:
            pace.succeeded()
        else:
            pace.throttled(now)
        assert 3 <= pace.limit <= 9


class Table:
    """A table that takes so many calls a second, in virtual time; calls take 10 ms."""

    def __init__(self, clock: ManualClock, per_s: float) -> None:
        self.clock = clock
        self.per_s = per_s
        self.tokens = 0.0
        self.at = 0.0
        self.taken = self.refused = 0

    async def call(self) -> bool:
        await self.clock.sleep(0.01)
        now = self.clock.monotonic()
        self.tokens = min(self.per_s * 0.05, self.tokens + (now - self.at) * self.per_s)
        self.at = now
        if self.tokens < 1:
            self.refused += 1
            return False
        self.tokens -= 1
        self.taken += 1
        return True


async def test_it_settles_at_what_the_table_takes() -> None:
    """Against a table that takes 1,000 calls a second, 64 eager callers lose few to throttles and use most of it."""
    clock = ManualClock()
    table = Table(clock, 1000)
    gate = Gate(Pace(), clock.monotonic)
    most_at_once = 0

    async def caller() -> None:
        nonlocal most_at_once
        while True:
            async with gate:
                most_at_once = max(most_at_once, gate.running)
                if await table.call():
                    gate.succeeded()
                else:
                    gate.throttled()

    tasks = [asyncio.create_task(caller()) for _ in range(64)]
    try:
        for _ in range(1000):
            await clock.advance(0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert most_at_once <= 64
    # Unpaced, 64 callers would ask 6,400 times a second: six of seven refused.
    assert table.taken > 0.7 * 10 * 1000
    assert table.refused < 0.2 * table.taken
    assert gate.running == 0


async def test_turns_come_in_order_and_are_bounded() -> None:
    """Who waits is let in by arrival; beyond the bound one is refused at once; a cancelled one gives up its place."""
    gate = Gate(Pace(least=1, most=1), lambda: 0.0, max_waiting=3)
    order: list[int] = []

    async def call(n: int) -> None:
        async with gate:
            order.append(n)

    await gate.__aenter__()
    tasks = [asyncio.create_task(call(n)) for n in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await call(9)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert gate.waiting == 2
    await gate.__aexit__()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == [0, 2]
    assert (gate.running, gate.waiting) == (0, 0)
    await gate.idle()


async def test_a_turn_that_came_too_late_is_handed_on() -> None:
    """One that is cancelled in the moment its turn comes does not keep it."""
    gate = Gate(Pace(least=1, most=1), lambda: 0.0)
    await gate.__aenter__()

    async def call() -> bool:
        async with gate:
            return True

    first, second = asyncio.create_task(call()), asyncio.create_task(call())
    await asyncio.sleep(0)
    await gate.__aexit__()
    first.cancel()
    assert await second
    assert (gate.running, gate.waiting) == (0, 0)
