"""The queue's pump: places who waits, oldest first, whenever there may be room.

Entries that another replica is placing are left alone until its lease is over; so the pump also takes over what a
replica that died left half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime

from provisioner import spread
from provisioner.clock import LastTime
from provisioner.context import Context, log
from provisioner.lifecycle import UNPLACED
from provisioner.model import Queued, load, replace
from provisioner.placement import Ask, Own, Room, WarmName, warm_name
from provisioner.sessions import records
from provisioner.sessions.placing import Placing
from provisioner.sessions.records import Loaded
from provisioner.store.port import ConditionFailed
from shoal.contract.base import HostId
from shoal.contract.errors import ShoalError
from shoal.contract.states import Phase

#: Placements at once: an agent's cold start takes hundreds of milliseconds, and hosts do a few at a time.
_AT_ONCE = 32
#: Misfits in a row after which a pass stops looking: what is behind them is hardly smaller.
_MISFITS = 50
_INTERVAL_S = 1.0
#: Seconds after which a queue that does not move wakes the reconciler again.
_AGAIN_S = 10.0

Order = Callable[[list[Queued]], Iterable[Queued]]


def first_come(entries: list[Queued]) -> Iterable[Queued]:
    """The order of waiting: by age. Runs' weights come in here."""
    return entries


class Pump:
    """Places queued sessions. `order` decides who is next among those that wait."""

    def __init__(self, context: Context, placing: Placing, order: Order = first_come) -> None:
        self._context = context
        self._placing = placing
        self._order = order
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._placed: set[asyncio.Task[None]] = set()
        self._newest: dict[str, tuple[datetime, LastTime]] = {}
        self._looked = LastTime(context.clock)

    async def run(self) -> None:
        """Pump until cancelled."""
        while True:
            await self.pass_by()
            await self._context.wake_queue.wait(_INTERVAL_S)

    async def pass_by(self) -> None:
        """Look once, whatever becomes of it: the next pass tries again."""
        try:
            await self.look()
        except ShoalError as error:
            log.warning("queue.failed", code=error.code.value)
        except Exception:  # noqa: BLE001 - the loop's top
            log.exception("queue.broke")

    def due(self, every_s: float) -> bool:
        """Whether there is a reason to look, or the last look is so long ago."""
        return self._context.wake_queue.is_set or not self._looked.within(every_s)

    async def drain(self) -> None:
        """Place all that fit now; returns when those are placed."""
        await self.look()
        while self._placed:
            await asyncio.wait(self._placed)

    async def look(self) -> None:
        """Begin to place all that fit now, without waiting for their starts."""
        self._looked.note()
        for pool in self._context.settings.pools:
            await self._pool(pool.name)

    async def _pool(self, pool: str) -> None:
        context = self._context
        now = context.clock.now()
        stored = await spread.queue(context.store, pool)
        entries = [load(Queued, item.item) for item in stored]
        free = [entry for entry in entries if not _leased(entry, now) and entry.expires_at > now]
        misfits: set[tuple[Room, WarmName]] = set()
        waiting: list[Queued] = []
        for entry in self._order(free):
            ask = Ask(
                pool=pool,
                substrate=entry.key.substrate,
                room=Room.for_one(entry.resources),
                warm=warm_name(entry.key),
            )
            kind = (ask.room, ask.warm)
            # The room counts from here, so that the next in the queue does not take it for free.
            first = None if kind in misfits else await context.fleet.take(ask, context.chance)
            if first is None:
                misfits.add(kind)
                waiting.append(entry)
                if len(waiting) >= _MISFITS:
                    break
                continue
            await self._limit.acquire()
            task = context.background.start(self._one(entry, first), "place queued session")
            self._placed.add(task)
            task.add_done_callback(self._placed.discard)
        if waiting:
            self._placing.blocked.add(pool)
            self._want_hosts(pool, max(entry.created_at for entry in waiting))
        else:
            self._placing.blocked.discard(pool)
            self._newest.pop(pool, None)

    def _want_hosts(self, pool: str, newest: datetime) -> None:
        """Wake the reconciler for a queue that grew, and now and then for one that stays: who waits in vain, where a
        pool is as large as it may be, is no reason to look at all hosts every second."""
        known = self._newest.get(pool)
        if known is None or newest > known[0] or not known[1].within(_AGAIN_S):
            woken = LastTime(self._context.clock)
            woken.note()
            self._newest[pool] = (newest, woken)
            self._context.wake_reconciler.set()

    async def _one(self, entry: Queued, first: tuple[HostId, Own]) -> None:
        try:
            found = await self._claim(entry)
            if found is not None:
                await self._placing.place(found, first)
        except ShoalError as error:
            log.warning("queue.place_failed", session_id=entry.session, code=error.code.value)
        finally:
            if not first[1].settled:
                self._context.fleet.memory.refused(*first)
            self._limit.release()

    async def _claim(self, entry: Queued) -> Loaded | None:
        """Take the session's placing lease; None when it needs no place any more, or another has it."""
        context = self._context
        found = await records.read(context.store, entry.session)
        if found is None or found.session.state not in UNPLACED or found.session.host is not None:
            return None
        session = found.session
        if session.placer_until is not None and session.placer_until > context.clock.now():
            return None
        new = replace(session, phase=Phase.PLACING, **self._placing.lease())  # type: ignore[arg-type]
        try:
            await context.store.transact([records.save(new, found.version), records.queue_entry(new)])
        except ConditionFailed:
            return None
        return Loaded(session=new, version=found.version + 1)


def _leased(entry: Queued, now: datetime) -> bool:
    return entry.placer_until is not None and entry.placer_until > now
