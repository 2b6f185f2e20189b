"""Events of sessions that hosts report: stored once each, and not more of them than a reader wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from provisioner import keys
from provisioner.context import Context
from provisioner.model import Host
from provisioner.sessions import records
from provisioner.store.port import MAX_OPS, Delete, Op
from shoal.contract.base import SessionId
from shoal.contract.host import SessionEvent

#: After how many events of a session its oldest are looked for: what is kept may exceed the slots by so many.
_LOOK_EVERY = 100


class HostEvents:
    """Takes events. How many came of a session is only counted here to know when to look: a restart loses nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._came: Counter[SessionId] = Counter()

    async def take(
        self, host: Host, events: Collection[SessionEvent], sessions: Collection[SessionId]
    ) -> int:
        """Store what is new and of one of `sessions` (those that are on the host); a repeat changes nothing.

        Returns:
            The largest number that is stored now.
        """
        last = host.last_event
        ops: list[Op] = []
        full: list[SessionId] = []
        for reported in sorted(events, key=lambda event: event.n):
            if reported.n <= last:
                continue
            last = reported.n
            session = reported.session
            if session not in sessions:
                continue
            ops.append(records.host_event_op(session, host.id, reported.n, reported.event))
            self._came[session] += 1
            if self._came[session] >= _LOOK_EVERY:
                full.append(session)
                del self._came[session]
        await self._apply(ops)
        for session in full:
            await self._thin(session)
        return last

    def forget(self, session: SessionId) -> None:
        """The session is not here any more."""
        self._came.pop(session, None)

    async def _thin(self, session: SessionId) -> None:
        """The oldest give way to the newest."""
        kept = await self._context.store.query_all(keys.session(session).pk, prefix=records.HOST_EVENTS)
        kept.sort(key=lambda stored: str(stored.item["at"]))
        await self._apply([Delete(key=stored.key) for stored in kept[: -records.EVENT_SLOTS]])

    async def _apply(self, ops: list[Op]) -> None:
        for start in range(0, len(ops), MAX_OPS):
            await self._context.store.transact(ops[start : start + MAX_OPS])
