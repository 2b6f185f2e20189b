"""Waking a reconciler that runs in another process: by an item of the store, whose stream invokes it.

The item is written at most once a second per replica. What wakes within that second after a write writes nothing: the
reconciler ticks once more at least `WAKE_EVERY_S` after the wake that it saw (`provisioner.shift`), and sees it then.
"""

from __future__ import annotations

from provisioner import keys
from provisioner.clock import Clock
from provisioner.context import Background, Wake, log
from provisioner.store.port import ConditionFailed, Update
from provisioner.store.steady import SteadyStore
from shoal.contract.errors import ShoalError

#: Seconds between two writes of one replica.
WAKE_EVERY_S = 1.0


class StoredWake(Wake):
    """Wakes whoever waits in this process, and the reconciler elsewhere."""

    def __init__(self, clock: Clock, store: SteadyStore, background: Background, replica: str) -> None:
        super().__init__(clock)
        self._store = store
        self._background = background
        self._replica = replica
        self._written_at: float | None = None

    def set(self) -> None:
        """There is something to do for the reconciler."""
        super().set()
        now = self._clock.monotonic()
        if self._written_at is not None and now - self._written_at < WAKE_EVERY_S:
            return
        self._written_at = now
        self._background.start(self._write(), "wake the reconciler")

    async def _write(self) -> None:
        try:
            await write_wake(self._store, self._clock, self._replica)
        except (ShoalError, ConditionFailed) as error:
            # The next one is not held back by one that did not arrive; without any, the schedule wakes it.
            self._written_at = None
            log.warning("wake.lost", reason=str(error))


async def write_wake(store: SteadyStore, clock: Clock, replica: str) -> None:
    """Write the wake item: its version counts up, and the stream tells.

    Raises:
        ShoalError: UNAVAILABLE.
    """
    change = {"at": clock.now().isoformat(), "by": replica}
    await store.transact([Update(key=keys.WAKE, set=change)])
