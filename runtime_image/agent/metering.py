"""What sandboxes reserved and used, as records that the control plane stores once each."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from shoal.contract.base import HostId, SessionId, TenantId
from shoal.contract.sessions import Resources
from shoal.contract.states import Substrate
from shoal.contract.usage import SandboxCondition, UsageRecord

#: Records kept while the control plane does not take them; the oldest are dropped, and counted, beyond it.
MAX_UNACKED = 100_000
RECORDS_A_BEAT = 500


@dataclass(frozen=True, kw_only=True)
class Payer:
    """Whom a sandbox's usage belongs to, and what it was."""

    tenant: TenantId
    run: str | None
    session: SessionId
    epoch: int
    pool: str
    image_digest: str | None
    substrate: Substrate
    labels: Mapping[str, str]
    resources: Resources


@dataclass(kw_only=True)
class Meter:
    """One sandbox's meter: it runs from `start`, and `cut` makes a record of what passed since the last cut."""

    payer: Payer
    start: datetime
    condition: SandboxCondition = "starting"
    cpu_usec: int = 0
    memory_mib: float = 0.0
    actions: int = 0

    def cut(
        self,
        *,
        host: HostId,
        now: datetime,
        cpu_usec: int | None,
        memory_mib: float | None,
        condition: SandboxCondition | None = None,
    ) -> UsageRecord | None:
        """End the interval, begin the next in `condition` (None: the same).

        Args:
            host: This host's id.
            now: The interval's end; an interval without length gives no record.
            cpu_usec: What the sandbox used since it was made; None when it cannot be read any more.
            memory_mib: What it uses now; the interval counts the mean of both its ends.
            condition: What the next interval is.
        """
        seconds = (now - self.start).total_seconds()
        used_usec = max(0, cpu_usec - self.cpu_usec) if cpu_usec is not None else 0
        memory = (self.memory_mib + memory_mib) / 2 if memory_mib is not None else self.memory_mib
        payer, was = self.payer, self.condition
        if condition is not None:
            self.condition = condition
        if seconds <= 0:
            return None
        record = UsageRecord(
            tenant=payer.tenant,
            run=payer.run,
            session=payer.session,
            epoch=payer.epoch,
            host=host,
            pool=payer.pool,
            image_digest=payer.image_digest,
            substrate=payer.substrate,
            labels=dict(payer.labels),
            condition=was,
            start=self.start,
            end=now,
            reserved_cpu_s=payer.resources.cpu_millis / 1000 * seconds,
            used_cpu_s=used_usec / 1e6,
            reserved_memory_mib_s=payer.resources.memory_mib * seconds,
            used_memory_mib_s=memory * seconds,
            disk_mib_s=payer.resources.disk_mib * seconds,
            actions=self.actions,
        )
        self.start, self.actions = now, 0
        if cpu_usec is not None:
            self.cpu_usec = cpu_usec
        if memory_mib is not None:
            self.memory_mib = memory_mib
        return record


@dataclass
class UsageQueue:
    """Records not acknowledged yet, oldest first."""

    dropped: int = 0
    _waiting: deque[UsageRecord] = field(default_factory=deque)

    def add(self, record: UsageRecord | None) -> None:
        """Queue a record; None is ignored."""
        if record is None:
            return
        if len(self._waiting) >= MAX_UNACKED:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(record)

    def head(self) -> list[UsageRecord]:
        """What the next heartbeat carries."""
        return [self._waiting[n] for n in range(min(RECORDS_A_BEAT, len(self._waiting)))]

    def acked(self, count: int) -> None:
        """The first `count` of the head that was sent are stored."""
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()

    def __len__(self) -> int:
        return len(self._waiting)
