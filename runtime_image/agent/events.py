"""Events of sessions, numbered, until the control plane has stored them."""

from __future__ import annotations

from collections import deque

from runtime_image.agent.clock import Clock
from shoal.contract.base import SessionId
from shoal.contract.host import SessionEvent
from shoal.contract.sessions import Event

#: Kept while the control plane does not take them; the oldest go first.
MAX_UNACKED = 20_000
EVENTS_A_BEAT = 500


class Events:
    """Numbers go up for as long as the host lives: they begin at the wall clock's microseconds, so that a restarted
    agent's are larger than all before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = int(clock.now().timestamp() * 1_000_000)
        self._waiting: deque[SessionEvent] = deque(maxlen=MAX_UNACKED)

    def add(self, session: SessionId, kind: str, message: str, **data: object) -> None:
        """Report that something happened to a session just now."""
        event = Event(at=self._clock.now(), kind=kind, message=message, data=data)
        self._waiting.append(SessionEvent(n=self._next, session=session, event=event))
        self._next += 1

    def head(self) -> list[SessionEvent]:
        """What the next heartbeat carries."""
        return [self._waiting[n] for n in range(min(EVENTS_A_BEAT, len(self._waiting)))]

    def acked(self, n: int) -> None:
        """All up to number `n` are stored."""
        while self._waiting and self._waiting[0].n <= n:
            self._waiting.popleft()
