"""Waiting for a thing to change: told at once when this replica changed it, found by looking when another one did."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from provisioner.clock import Clock, event_or_time

T = TypeVar("T")
#: Seconds between looks for changes that another replica made.
POLL_S = 0.5


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
        try:
            while True:
                # Look again first: it may have changed before the event was in its place.
                value = await read()
                left = deadline - self._clock.monotonic()
                if done(value) or left <= 0:
                    return value
                await event_or_time(self._clock, event, min(POLL_S, left))
                event.clear()
        finally:
            waiting = self._waiting[id]
            waiting.discard(event)
            if not waiting:
                del self._waiting[id]
