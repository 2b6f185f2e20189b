"""Waiting for a thing to change: told at once when this replica changed it, found by looking when another one did.

Looking costs a read each time, and most waits last: so the pauses between looks grow, from `FIRST_POLL_S` by half of
each to `POLL_S` at the most. A wait of 25 s in which nothing changes costs 18 reads; what another replica changed is
seen after a quarter to a half of the time that was waited for it already, and never later than `POLL_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from provisioner.clock import Clock, event_or_time

T = TypeVar("T")
#: Seconds until the first look for changes that another replica made, and between two looks at the most.
FIRST_POLL_S = 0.25
POLL_S = 2.0
_GROWTH = 1.5


class Waiters:
    """Who waits for what, by the id of the thing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def notify(self, id: str) -> None:
        """The thing changed."""
        for event in self._waiting.get(id, ()):
            event.set()

    async def until(
        self, id: str, read: Callable[[], Awaitable[T]], done: Callable[[T], bool], wait_s: float
    ) -> T:
        """What `read` gives once `done` says so, or when `wait_s` has passed."""
        value = await read()
        if wait_s <= 0 or done(value):
            return value
        deadline = self._clock.monotonic() + wait_s
        event = asyncio.Event()
        self._waiting.setdefault(id, set()).add(event)
        pause = FIRST_POLL_S
        try:
            while True:
                # Look again first: it may have changed before the event was in its place.
                value = await read()
                left = deadline - self._clock.monotonic()
                if done(value) or left <= 0:
                    return value
                await event_or_time(self._clock, event, min(pause, left))
                # A change here is one of several, mostly: the next one is looked for soon again.
                pause = FIRST_POLL_S if event.is_set() else min(pause * _GROWTH, POLL_S)
                event.clear()
        finally:
            waiting = self._waiting[id]
            waiting.discard(event)
            if not waiting:
                del self._waiting[id]
