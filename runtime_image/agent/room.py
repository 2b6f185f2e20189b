"""The room on this host: who holds what of it, and whether one more fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime_image.agent.admission import Refusal, Reservation, admit, admit_warm, total
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.warm import WarmPool
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Capacity, SandboxStart, WarmKey


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """What this host has. `disk_floor_mib`: with less free disk than this, nothing new is taken."""

    capacity: Capacity
    disk_path: Path
    disk_floor_mib: int


class Room:
    """Accounts for the host's capacity over the living sandboxes and the warm pool."""

    def __init__(self, *, limits: HostLimits, warm: WarmPool, live: Callable[[], Iterator[Hosted]]) -> None:
        self._limits = limits
        self._warm = warm
        self._live = live
        self.refused = 0

    def held(self) -> Reservation:
        """What sandboxes of sessions hold."""
        return total(hosted.reservation for hosted in self._live())

    def reserved(self) -> Capacity:
        """What all sandboxes hold, warm ones included."""
        held = self.held() + total(self._warm.reservations().values())
        return Capacity(
            cpu_millis=held.cpu_millis,
            memory_mib=held.memory_mib,
            disk_mib=held.disk_mib,
            sandboxes=held.sandboxes,
        )

    @property
    def capacity(self) -> Capacity:
        """What may be held at the most."""
        return self._limits.capacity

    def may_add_warm(self, ask: Reservation) -> bool:
        """Whether one more warm sandbox fits beside everything."""
        if self._short_of_disk():
            return False
        held = self.held() + total(self._warm.reservations().values())
        return admit_warm(capacity=self._limits.capacity, held=held, ask=ask)

    def _short_of_disk(self) -> bool:
        free_mib = shutil.disk_usage(self._limits.disk_path).free >> 20
        return free_mib < self._limits.disk_floor_mib

    def refusal(self, short_of: str, asked: int, left: int) -> ShoalError:
        """The answer to a start that does not fit; counted."""
        self.refused += 1
        return ShoalError(
            ErrorCode.HOST_REFUSED,
            f"This host has no room: {short_of}.",
            details={"short_of": short_of, "asked": asked, "left": left},
        )

    def admit(self, spec: SandboxStart, key: WarmKey | None, disk_mib: int) -> Reservation:
        """Take a session's sandbox in; warm ones that are in its way are evicted.

        Args:
            spec: What is asked.
            key: Which warm sandbox it would take over; None: none.
            disk_mib: Its disk class.

        Returns:
            What it holds from now on, for the caller's record.

        Raises:
            ShoalError: `host_refused`, with what is short.
        """
        if self._short_of_disk():
            raise self.refusal("disk_free_mib", self._limits.disk_floor_mib, 0)
        ask = Reservation(
            cpu_millis=spec.resources.cpu_millis,
            memory_mib=spec.resources.memory_mib,
            disk_mib=disk_mib,
        )
        warm = self._warm.reservations()
        decision = admit(
            capacity=self._limits.capacity,
            sessions=self.held(),
            warm=warm,
            ask=ask,
            keep=self._warm.peek(key) if key is not None else None,
        )
        if isinstance(decision, Refusal):
            raise self.refusal(decision.short_of, decision.asked, decision.left)
        self._warm.evict(decision.evict)
        return ask
