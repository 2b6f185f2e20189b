"""One session's sandbox on this host: what it was started as, and what it is now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime_image.agent.admission import Reservation
from runtime_image.agent.clock import Clock
from runtime_image.agent.journal.file import Journal
from runtime_image.agent.journal.flush import Lineage
from runtime_image.agent.journal.history import History
from runtime_image.agent.limits import LimitWatch
from runtime_image.agent.metering import Meter, Payer
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ErrorDetail, ShoalError
from shoal.contract.host import SandboxStart, SandboxState, SandboxStatus
from shoal.contract.images import ImageConfig
from shoal.contract.states import EndReason, Phase

if TYPE_CHECKING:
    from runtime_image.agent.actions.records import Records
    from runtime_image.agent.actions.runner import SessionActions
    from runtime_image.agent.layer_store import Stack
    from runtime_image.agent.link import GuestLink
    from runtime_image.agent.ports import KillGroup, OomCounter, RuntimePort
    from runtime_image.agent.sandboxes import Sandbox

#: Where an action runs when neither the session nor its image says.
DEFAULT_WORKDIR = "/workspace"


def workdir_of(config: ImageConfig) -> str:
    """Where actions run in an image's sandboxes unless the session says otherwise."""
    return config.workdir or DEFAULT_WORKDIR


def payer_of(spec: SandboxStart) -> Payer:
    """Whom the sandbox's usage belongs to."""
    return Payer(
        tenant=spec.tenant,
        run=spec.run,
        session=spec.session,
        epoch=spec.epoch,
        pool=spec.pool,
        image_digest=spec.source.image_digest,
        substrate=spec.substrate,
        labels=spec.labels,
        resources=spec.resources,
    )


@dataclass(kw_only=True, eq=False)
class Hosted:
    """The record of one incarnation on this host. The service moves it; everyone else reads.

    `sandbox`, `link` are None before it runs and after it ended; the journal is answered until forgotten. `lasting` are
    the kill groups of its named shells.
    """

    spec: SandboxStart
    journal: Journal
    records: Records
    clock: Clock
    reservation: Reservation
    meter: Meter
    state: SandboxState = "starting"
    phase: Phase | None = None
    warm: bool = False
    acknowledged: bool = False
    sandbox_id: str = ""
    sandbox: Sandbox | None = None
    link: GuestLink | None = None
    stack: Stack | None = None
    ooms: OomCounter | None = None
    lasting: dict[str, KillGroup] = field(default_factory=dict)
    actions: SessionActions | None = None
    history: History | None = None
    read_past: Callable[[], Awaitable[History]] | None = None
    end_reason: EndReason | None = None
    end_detail: str | None = None
    error: ErrorDetail | None = None
    journal_flushed: bool = False
    oom_kills: int = 0
    limits: LimitWatch = field(default_factory=LimitWatch)
    timings_ms: dict[str, float] = field(default_factory=dict)
    frozen_by: set[str] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    bring_up: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    active_at: float = 0.0
    using: int = 0
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def session(self) -> SessionId:
        """The session it belongs to."""
        return self.spec.session

    @property
    def epoch(self) -> int:
        """Which incarnation it is."""
        return self.spec.epoch

    @property
    def lineage(self) -> Lineage:
        """Where its disk came from, for later epochs."""
        restored = (self.spec.restored_seq or 0) if self.spec.rewound else None
        return Lineage(first_seq=self.spec.first_seq, restored_seq=restored)

    @property
    def rewound(self) -> bool:
        """Whether actions are refused until the rewind is acknowledged."""
        return self.spec.rewound and not self.acknowledged

    @property
    def workdir(self) -> str:
        """Where actions run unless they say otherwise."""
        return self.spec.workdir or workdir_of(self.spec.source.config)

    @property
    def user(self) -> str | None:
        """Who actions run as unless they say otherwise; None is root."""
        return self.spec.user or self.spec.source.config.user

    @property
    def env(self) -> dict[str, str]:
        """The image's environment with the session's over it."""
        return {**self.spec.source.config.env, **self.spec.env}

    async def past(self) -> History:
        """The epochs before, read once, when first asked.

        Raises:
            ShoalError: `unavailable`: they cannot be read now.
        """
        if self.history is None:
            async with self._reading:
                if self.history is None:
                    read = self.read_past
                    restored = self.lineage.restored_seq
                    self.history = await read() if read is not None else History({}, restored_seq=restored)
        return self.history

    @property
    def over(self) -> bool:
        """Whether it has ended, or failed to start, for good."""
        return self.state in ("ended", "failed")

    @property
    def idle_s(self) -> float:
        """Seconds since the last activity; 0 while something runs."""
        if self.using or (self.actions is not None and self.actions.busy):
            return 0.0
        return max(0.0, self.clock.monotonic() - self.active_at)

    def saw_ooms(self, count: int) -> None:
        """The memory limit has killed that many processes so far."""
        self.oom_kills = count

    def touch(self) -> None:
        """Something was done in the session just now."""
        self.active_at = self.clock.monotonic()

    @property
    def last_seq(self) -> int:
        """The last seq that is taken."""
        return max(self.journal.last_seq, self.spec.first_seq - 1)

    @property
    def disk_seq_at_start(self) -> int:
        """The last seq whose effects this disk held when it began."""
        restored = self.lineage.restored_seq
        return restored if restored is not None else self.spec.first_seq - 1

    def changed(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_while(self, *states: SandboxState, timeout_s: float) -> None:
        """Return when the state is none of `states`, or after `timeout_s` seconds."""
        deadline = self.clock.monotonic() + timeout_s
        while self.state in states:
            left = deadline - self.clock.monotonic()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return

    def require_running(self) -> None:
        """Raise the error that says why nothing can be done in this sandbox now."""
        if self.state == "running":
            return
        raise self.refusal()

    def refusal(self) -> ShoalError:
        """Why nothing can be done in this sandbox now."""
        if self.state in ("starting", "paused"):
            return ShoalError(
                ErrorCode.SESSION_NOT_READY,
                f"The session's sandbox is {self.state}.",
                retry_after_s=0.5,
                details={"phase": self.phase.value if self.phase else None},
            )
        if self.state == "failed" or self.end_reason in (
            EndReason.FAILED,
            EndReason.OOM,
            EndReason.HOST_LOST,
        ):
            return ShoalError(
                ErrorCode.SANDBOX_LOST,
                "The session's sandbox is gone.",
                details={
                    "reason": self.end_reason.value if self.end_reason else "failed",
                    "detail": self.end_detail,
                },
            )
        reason = self.end_reason.value if self.end_reason else "deleted"
        return ShoalError(
            ErrorCode.SESSION_ENDED,
            f"The session ended: {reason}.",
            details={"end": {"reason": reason, "detail": self.end_detail}},
        )

    @asynccontextmanager
    async def frozen(self, runtime: RuntimePort, why: str) -> AsyncIterator[None]:
        """Hold every process of the sandbox still; nests by `why`. Thaws on leaving, unless others hold it still."""
        await self.freeze(runtime, why)
        try:
            yield
        finally:
            await asyncio.shield(self.thaw(runtime, why))

    async def freeze(self, runtime: RuntimePort, why: str) -> None:
        """Hold every process still until `thaw` with the same `why`."""
        if self.sandbox is None:
            raise self.refusal()
        if not self.frozen_by:
            await runtime.freeze(self.sandbox)
        self.frozen_by.add(why)

    async def thaw(self, runtime: RuntimePort, why: str) -> None:
        """Take back one freeze; harmless when there is none."""
        self.frozen_by.discard(why)
        if not self.frozen_by and self.sandbox is not None:
            await runtime.thaw(self.sandbox)

    def status(self) -> SandboxStatus:
        """What is reported of it."""
        return SandboxStatus(
            session=self.session,
            epoch=self.epoch,
            state=self.state,
            phase=self.phase,
            warm=self.warm,
            last_seq=self.last_seq,
            running_actions=self.actions.running if self.actions is not None else 0,
            idle_s=round(self.idle_s, 3),
            end_reason=self.end_reason,
            end_detail=self.end_detail,
            journal_flushed=self.journal_flushed,
            oom_kills=self.oom_kills,
            error=self.error,
            timings_ms=self.timings_ms,
            lost_actions=self.history.lost() if self.rewound and self.history is not None else [],
            settings=self.spec.settings(acknowledged=not self.rewound).mark(),
        )
