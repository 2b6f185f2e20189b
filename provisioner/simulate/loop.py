"""Virtual time for asyncio: whenever nothing is ready, the clock jumps to the next timer. Equal seeds, equal runs."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)


class Stuck(Exception):
    """Nothing is scheduled any more, and the run is not over."""


class _Jump(selectors.SelectSelector):
    """Waits for nothing: it moves the loop's time on instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing is left to happen")
        self.loop.jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without a real clock and without I/O."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        jump = _Jump()
        super().__init__(jump)
        jump.loop = self

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._elapsed_s

    def jump(self, seconds: float) -> None:
        """Let so much time pass."""
        if seconds > 0:
            self._elapsed_s += seconds


class LoopClock:
    """The `Clock` of a virtual loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> datetime:
        """The virtual wall clock."""
        return START + timedelta(seconds=self._loop.time())

    def monotonic(self) -> float:
        """Virtual seconds since the start."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(max(0.0, seconds))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end in virtual time.

    Raises:
        Stuck: It waits for something that never happens.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
