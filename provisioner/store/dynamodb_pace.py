"""How many calls go to DynamoDB at once: more while it keeps up, half as many when it throttles."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

#: Calls at once at the least and at the most; the most is also what the SDK's connections allow.
LEAST = 2
MOST = 64
#: A throttle halves the limit; those within so many seconds after it are of the same burst and do not halve it again.
BURST_S = 0.03
#: What a round of calls (as many as the limit) adds to it: from least to most takes some 300 rounds, 3 s at 10 ms.
RAISE = 0.2
#: Calls that may wait for their turn; one more is refused at once rather than kept until its caller has gone.
MAX_WAITING = 20_000


class Busy(Exception):
    """Too many calls wait already."""


class Pace:
    """The limit itself, without a clock of its own: additive increase (`RAISE` per round of calls), multiplicative
    decrease. Reads and writes share it: a partition that throttles one throttles most of what is asked of it.

    Attributes:
        limit: Calls at once; its whole part counts.
    """

    def __init__(self, *, least: int = LEAST, most: int = MOST) -> None:
        if not 1 <= least <= most:
            raise ValueError("1 <= least <= most")
        self._least = least
        self._most = most
        self._halved_at = float("-inf")
        self.limit = float(most)

    def succeeded(self) -> None:
        """A call was answered."""
        self.limit = min(float(self._most), self.limit + RAISE / self.limit)

    def throttled(self, now: float) -> None:
        """A call was throttled at `now` (monotonic seconds)."""
        if now - self._halved_at >= BURST_S:
            self._halved_at = now
            self.limit = max(float(self._least), self.limit / 2)


class Gate:
    """Lets as many through as its pace allows, in the order they came.

    Args:
        monotonic: Seconds that never go back.
    """

    def __init__(self, pace: Pace, monotonic: Callable[[], float], *, max_waiting: int = MAX_WAITING) -> None:
        self.pace = pace
        self.running = 0
        self._monotonic = monotonic
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Wait for a turn.

        Raises:
            Busy: Too many wait.
        """
        if not self._waiting and self.running < int(self.pace.limit):
            self._enter()
            return
        if len(self._waiting) >= self._max_waiting:
            raise Busy(f"{len(self._waiting)} calls wait already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # Its turn had come: hand it on.
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def succeeded(self) -> None:
        """The call in hand was answered."""
        self.pace.succeeded()

    def throttled(self) -> None:
        """The call in hand was throttled."""
        self.pace.throttled(self._monotonic())

    async def idle(self) -> None:
        """Return when no call runs or waits."""
        await self._idle.wait()

    def _enter(self) -> None:
        self.running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self.running -= 1
        while self._waiting and self.running < int(self.pace.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self._enter()
                turn.set_result(None)
        if not self.running and not self._waiting:
            self._idle.set()
