"""A process that runs only while it answers (Lambda): what others do in the background is done in turns.

After the answer such a process is frozen, perhaps for ever. So each request is a turn: while it waits (long polls), the
queue is pumped beside it; before it answers, what it began is waited for, within `SETTLE_S`. What is not done by then
is either done by others or begun anew, as if the process had died. Who sees to what:

    work in the background             when it is left half done
    place a session                    its lease (`placing_lease_s`) runs out; any replica's pump places it, or a
                                       heartbeat that reports its sandbox writes it down
    end a sandbox, unwanted or not     its host's next heartbeat shows it: it is told again, or the reply releases it
    tell a sandbox what changed        its heartbeats show other settings than the record: it is told again
    follow a snapshot                  its host reports it by heartbeats; one whose host never heard of it is ordered
                                       again at a heartbeat
    make an image                      its lease runs out; the reconciler fails it, putting it again tries again
    make a group of sessions           the reconciler finishes it
    wake the reconciler                its schedule wakes it every minute
    count demand                       lost; it steers warm sandboxes alone
    carry out an `execute`             the same call, repeated on any replica, joins it; else its session's TTL ends it
    end the session of an `execute`    its TTL ends it

The queue is pumped by whoever has a turn: registrations and heartbeats come for as long as there is a host, so that
room that grew is used before they are answered. Without any host nothing can be placed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from provisioner.clock import LastTime
from provisioner.context import Context, log
from provisioner.sessions.queue import Pump
from provisioner.store.port import ConditionFailed
from shoal.contract.errors import ShoalError

#: Seconds that an answer is held back, at the most, for what its request began.
SETTLE_S = 5.0
#: Seconds between two looks at the queue without a reason.
LOOK_S = 2.0
#: Seconds between two writes of the demand that was counted, and between two looks for new signing keys.
DEMAND_S = 1.0
KEYS_S = 60.0


class Turns:
    """What a replica without the reconciler's loop does by itself: in turns, or as a loop beside the queue's."""

    def __init__(self, context: Context, pump: Pump) -> None:
        self._context = context
        self._pump = pump
        self._looking = asyncio.Lock()
        self._refreshed = LastTime(context.clock)
        self._flushed = LastTime(context.clock)

    @asynccontextmanager
    async def turn(self, left_s: Callable[[], float] | None = None) -> AsyncIterator[None]:
        """One request. Leaving the block takes up to `SETTLE_S`: the answer must be known then, and not yet given.

        Args:
            left_s: How many seconds there are until it must be given, asked when the block is left.

        Raises:
            ShoalError: UNAVAILABLE at the first turn, when the store does not answer: without keys nothing can be done.
        """
        await self._refresh()
        pumping = asyncio.create_task(self._pump_beside(), name="queue")
        try:
            yield
        finally:
            async with self._looking:
                # Not in the middle of a look: it counts room as taken for what it is about to place.
                pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)
            await self._settle(SETTLE_S if left_s is None else max(0.0, min(SETTLE_S, left_s())))

    async def upkeep(self) -> None:
        """What turns do besides pumping, in a process that runs all the time; until cancelled."""
        while True:
            try:
                await self._refresh()
                await self._flush()
            except Exception:  # noqa: BLE001 - the loop's top
                log.exception("upkeep.broke")
            await self._context.clock.sleep(DEMAND_S * 5)

    async def _pump_beside(self) -> None:
        while True:
            await self._context.wake_queue.wait(LOOK_S)
            async with self._looking:
                await self._pump.pass_by()

    async def _settle(self, within_s: float) -> None:
        context = self._context
        began = context.clock.monotonic()
        left = within_s
        # Placing what waits may make others wait, or free room: once more where it did, then it is the next turn's.
        for _ in range(2):
            if self._pump.due(LOOK_S):
                # Nobody else waits for it here: what is set from now on is a new reason.
                context.wake_queue.clear()
                await self._pump.pass_by()
            await context.background.settle(context.clock, left)
            left = within_s - (context.clock.monotonic() - began)
            if left <= 0 or not context.wake_queue.is_set:
                break
        await self._flush()
        await context.background.settle(context.clock, max(left, 0.0))

    async def _flush(self) -> None:
        if not self._context.demand.pending or self._flushed.within(DEMAND_S):
            return
        self._flushed.note()
        try:
            await self._context.demand.flush(self._context.store)
        except (ShoalError, ConditionFailed) as error:
            log.warning("demand.lost", reason=str(error))

    async def _refresh(self) -> None:
        if self._refreshed.within(KEYS_S):
            return
        try:
            await self._context.signer.refresh()
        except ShoalError as error:
            if not self._context.signer.public_keys:
                raise
            log.warning("keys.not_refreshed", reason=str(error))
        self._refreshed.note()
