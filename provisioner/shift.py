"""One shift of a reconciler that does not run all the time: woken, it ticks for as long as there is something to do.

Any number may be woken at once; the lease lets one work. Who finds it taken leaves, and nothing is missed: a wake is an
item of the store whose version counts up, and the holder looks at it before each tick and once more after it has given
the lease back. So a wake is either seen by the holder, or it came after that look, and whoever brought it finds the
lease free. A wake that left no mark there (the schedule, an event of the cloud) leaves one when it finds it taken.

A replica writes at most one wake a second: what it wanted within that second is seen too, because the last tick is
always later than that after the last wake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from provisioner import keys
from provisioner.capacity.port import CapacityError
from provisioner.context import Context, log
from provisioner.executor import Executor
from provisioner.lease import Lease
from provisioner.reconcile import Reconciler
from provisioner.store.port import ConditionFailed
from provisioner.wakes import WAKE_EVERY_S, write_wake
from shoal.contract.errors import ShoalError

#: Seconds of the time given at which no new tick is begun.
MARGIN_S = 10.0
#: Seconds that ending machines, and what else a tick began, may take once nothing else is to do.
_SETTLE_S = 60.0
#: Ticks that may fail in a row until a shift ends.
_FAILURES = 3


@dataclass(frozen=True, kw_only=True)
class Shift:
    """What came of one.

    Attributes:
        ticks: How often it looked; 0 when the lease was another's.
        failed: Ticks that came to nothing, by a store or a cloud that did not answer.
        pending: Whether there is more to do that time was too short for; a wake was left for it.
    """

    ticks: int
    failed: int = 0
    pending: bool = False


class Shifts:
    """Works in shifts. `replica` names this process."""

    def __init__(self, context: Context, reconciler: Reconciler, executor: Executor) -> None:
        self._context = context
        self._reconciler = reconciler
        self._executor = executor

    async def work(self, left_s: Callable[[], float], *, marked: bool) -> Shift:
        """Reconcile until nothing is pending, or the time is over.

        Args:
            left_s: How many seconds there are still.
            marked: Whether what woke it is written in the store, as a wake; if not, and another works, it is now.

        Raises:
            ShoalError: UNAVAILABLE when the store does not answer.
        """
        context = self._context
        ticks = failed = 0
        pending = False
        while True:
            lease = Lease(context.store, context.clock, f"{context.replica}-{context.ids('lse')}")
            if not await lease.take():
                if not marked and not ticks:
                    await write_wake(context.store, context.clock, context.replica)
                return Shift(ticks=ticks, failed=failed)
            self._executor.fence = lease.fence
            try:
                async with lease.kept():
                    seen, done, broken, pending = await self._ticks(lease, left_s, marked=marked)
                    ticks, failed = ticks + done, failed + broken
                    if not lease.lost:
                        await context.background.settle(
                            context.clock, max(0.0, min(_SETTLE_S, left_s() - MARGIN_S / 2))
                        )
            finally:
                self._executor.fence = ()
                await self._executor.cease()
                if not lease.lost:
                    await lease.release()
            if lease.lost:
                return Shift(ticks=ticks, failed=failed)
            # Whoever came with a newer wake while the lease was ours has left again.
            woken = await self._mark() != seen
            if left_s() <= MARGIN_S:
                if pending or woken:
                    await write_wake(context.store, context.clock, context.replica)
                return Shift(ticks=ticks, failed=failed, pending=pending or woken)
            if not woken:
                return Shift(ticks=ticks, failed=failed)
            marked = True

    async def _ticks(
        self, lease: Lease, left_s: Callable[[], float], *, marked: bool
    ) -> tuple[int, int, int, bool]:
        """Tick until there is nothing to do; answers the last wake that was seen, how many ticks there were, how many
        failed, and whether more is to do."""
        context = self._context
        seen = -1
        ticks = failed = broken = 0
        while True:
            mark = await self._mark()
            # What was not woken by a wake has none to wait after; one that was written just before brings its own.
            fresh, seen = mark != seen and (marked or ticks > 0), mark
            try:
                await self._reconciler.tick()
                pending, broken = self._reconciler.pending, 0
            except (ShoalError, CapacityError, ConditionFailed) as error:
                log.warning("reconcile.failed", reason=str(error))
                failed, broken = failed + 1, broken + 1
                # What does not answer now may in a moment; what does not answer at all is the schedule's to try again.
                pending = broken < _FAILURES
            ticks += 1
            if lease.lost or left_s() <= MARGIN_S:
                return seen, ticks, failed, pending
            if not pending and not fresh:
                return seen, ticks, failed, False
            # After a wake there is one more tick, later than what else its writer may have wanted by it.
            await context.clock.sleep(
                max(WAKE_EVERY_S, context.settings.reconcile_s) if pending else WAKE_EVERY_S
            )

    async def _mark(self) -> int:
        stored = await self._context.store.get(keys.WAKE)
        return stored.version if stored is not None else 0
