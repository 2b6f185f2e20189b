"""Waking a reconciler that runs in another process: by an item of the store, whose stream invokes it.

The item is written at most once a second per replica. What wakes within that second after a write writes nothing: the
reconciler ticks once more at least `WAKE_EVERY_S` after the wake that it saw (`provisioner.shift`), and sees it then.

A thousand replicas may write it in one moment, which is more than its partition takes, and transactions at one item
refuse each other. A write that is refused is not repeated: another's is under way, and wakes whom this one would have.
Where it was the table that refused, the schedule wakes it within a minute.
"""

from __future__ import annotations

from provisioner import keys
from provisioner.clock import Clock, LastTime
from provisioner.context import Background, Wake, log
from provisioner.store.port import Conflict, StoreUnavailable, Throttled, Update
from provisioner.store.steady import SteadyStore
from shoal.contract.base import new_id
from shoal.contract.errors import ErrorCode, ShoalError

#: Seconds between two writes of one replica.
WAKE_EVERY_S = 1.0
#: Tries where no answer came; the first may meet a connection that died while the process was frozen.
_TRIES = 2


class StoredWake(Wake):
    """Wakes whoever waits in this process, and the reconciler elsewhere."""

    def __init__(self, clock: Clock, store: SteadyStore, background: Background, replica: str) -> None:
        super().__init__(clock)
        self._store = store
        self._background = background
        self._replica = replica
        self._written = LastTime(clock)

    def set(self) -> None:
        """There is something to do for the reconciler."""
        super().set()
        if self._written.within(WAKE_EVERY_S):
            return
        self._written.note()
        self._background.start(self._write(), "wake the reconciler")

    async def _write(self) -> None:
        try:
            await write_wake(self._store, self._clock, self._replica)
        except ShoalError as error:
            # The next one is not held back by one that did not arrive; without any, the schedule wakes it.
            self._written.forget()
            log.warning("wake.lost", reason=str(error))


async def write_wake(store: SteadyStore, clock: Clock, replica: str) -> None:
    """Write the wake item: its version counts up, and the stream tells. Or another does at this moment.

    Raises:
        ShoalError: UNAVAILABLE.
    """
    change = {"at": clock.now().isoformat(), "by": replica}
    token = new_id("tx")
    for left in reversed(range(_TRIES)):
        try:
            await store.bare.transact([Update(key=keys.WAKE, set=change)], token=token)
        except (Conflict, Throttled) as error:
            log.info("wake.left_to_another", reason=type(error).__name__)
        except StoreUnavailable as error:
            if not left:
                raise ShoalError(
                    ErrorCode.UNAVAILABLE, "The state store does not answer; try again.", retry_after_s=1.0
                ) from error
            continue
        return
