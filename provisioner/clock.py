"""Time, injected: nothing else of this room asks the machine for it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What use cases know of time."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC."""

    def monotonic(self) -> float:
        """Seconds that never go back; for durations."""

    async def sleep(self, seconds: float) -> None:
        """Wait so long; zero or less yields once."""


async def event_or_time(clock: Clock, event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set, or after `seconds`."""
    told = asyncio.ensure_future(event.wait())
    slept = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({told, slept}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        slept.cancel()


class SystemClock:
    """The machine's own time."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(max(0.0, seconds))


class LastTime:
    """When something was done last, for what is not to be done again too soon.

    By the time of day: in a function that is frozen between its calls no other clock is sure to go on, and what was
    done minutes ago would count as just done. A clock that was set back holds nothing up.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at: datetime | None = None

    def note(self) -> None:
        """It is done now."""
        self._at = self._clock.now()

    def forget(self) -> None:
        """It was not done, after all."""
        self._at = None

    def within(self, seconds: float) -> bool:
        """Whether it was done less than so many seconds ago."""
        return self._at is not None and 0 <= (self._clock.now() - self._at).total_seconds() < seconds


class ManualClock:
    """Virtual time: it stands still until `advance` moves it. Sleepers wake in the order of their times."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        """The virtual wall clock."""
        return self._start + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        """Virtual seconds since the start."""
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has passed so many seconds."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + seconds, next(self._order), future))
        await future

    def tick(self, seconds: float) -> None:
        """Move time without giving sleepers a turn (for code under test that is not asynchronous)."""
        self._elapsed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)

    def jump(self, seconds: float) -> None:
        """Set the wall clock alone: what a process sees that was frozen so long, or whose clock was set."""
        self._start += timedelta(seconds=seconds)

    async def advance(self, seconds: float) -> None:
        """Move time, waking each sleeper at its own moment and letting it run."""
        end = self._elapsed + seconds
        await _let_run()
        while self._sleepers and self._sleepers[0][0] <= end:
            self.tick(max(0.0, self._sleepers[0][0] - self._elapsed))
            await _let_run()
        self.tick(end - self._elapsed)
        await _let_run()


async def _let_run() -> None:
    """Give tasks that are ready as many turns as any chain of them takes."""
    for _ in range(20):
        await asyncio.sleep(0)
