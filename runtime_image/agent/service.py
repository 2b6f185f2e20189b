"""The sandboxes of sessions on this host: started, patched, ended; each reported until the control plane forgets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import structlog

from runtime_image.agent import crash
from runtime_image.agent.actions.records import Records
from runtime_image.agent.admission import Reservation
from runtime_image.agent.clock import Clock
from runtime_image.agent.ending import Ender
from runtime_image.agent.events import Events
from runtime_image.agent.hosted import Hosted, payer_of
from runtime_image.agent.incarnate import Incarnator
from runtime_image.agent.journals import Journals
from runtime_image.agent.link import GuestLink, LinkError
from runtime_image.agent.metering import Meter
from runtime_image.agent.ports import RuntimePort
from runtime_image.agent.room import HostLimits, Room
from runtime_image.agent.sandboxes import SandboxGone
from runtime_image.agent.starting import disk_class
from runtime_image.agent.warm import WARM_SHM_MIB, WarmPool
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Capacity, SandboxPatch, SandboxStart, WarmKey
from shoal.contract.states import EndReason, Phase, Substrate

_log = structlog.get_logger()

#: How long a start waits for the same session's earlier sandbox on this host to be gone.
_PREDECESSOR_WAIT_S = 10.0
#: Why the sandboxes of a host that may have been declared lost stand still.
FENCE = "fence"


class SandboxService:
    """The one owner of `Hosted` records."""

    def __init__(
        self,
        *,
        limits: HostLimits,
        runtime: RuntimePort,
        warm: WarmPool,
        incarnator: Incarnator,
        ender: Ender,
        journals: Journals,
        events: Events,
        clock: Clock,
        nudge: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._warm = warm
        self._incarnator = incarnator
        self._ender = ender
        self._journals = journals
        self._events = events
        self._clock = clock
        self._nudge = nudge
        self._all: dict[tuple[SessionId, int], Hosted] = {}
        self._current: dict[SessionId, Hosted] = {}
        self._starting_locks: dict[SessionId, asyncio.Lock] = {}
        self.draining = False
        self.fenced = False
        self.room = Room(limits=limits, warm=warm, live=self.live)

    def __iter__(self) -> Iterator[Hosted]:
        return iter(list(self._all.values()))

    def live(self) -> Iterator[Hosted]:
        """Those that have not ended."""
        return (hosted for hosted in self if not hosted.over)

    def current(self, session: str) -> Hosted:
        """The newest incarnation of a session here.

        Raises:
            ShoalError: `sandbox_lost`: there is none.
        """
        hosted = self._current.get(SessionId(session))
        if hosted is None:
            raise ShoalError(ErrorCode.SANDBOX_LOST, "This host has no sandbox of that session.")
        return hosted

    def get(self, session: str) -> Hosted:
        """The newest incarnation of a session here.

        Raises:
            ShoalError: `not_found`.
        """
        hosted = self._current.get(SessionId(session))
        if hosted is None:
            raise ShoalError(ErrorCode.NOT_FOUND, "This host has no sandbox of that session.")
        return hosted

    def find(self, session: SessionId, epoch: int) -> Hosted | None:
        """One incarnation; None when it is not, or no longer, here."""
        return self._all.get((session, epoch))

    def reserved(self) -> Capacity:
        """What all sandboxes hold, warm ones included."""
        return self.room.reserved()

    @property
    def capacity(self) -> Capacity:
        """What may be held at the most."""
        return self.room.capacity

    @property
    def refused(self) -> int:
        """How many starts were refused for want of room."""
        return self.room.refused

    def may_add_warm(self, ask: Reservation) -> bool:
        """Whether one more warm sandbox fits beside everything."""
        return not self.draining and not self.fenced and self.room.may_add_warm(ask)

    async def start(self, spec: SandboxStart) -> Hosted:
        """Take a session's sandbox of this epoch, or find the one that is here. It comes up in the background.

        Raises:
            ShoalError: `host_refused`, `host_fenced`, `epoch_mismatch`, `substrate_unavailable`, `not_implemented`.
        """
        lock = self._starting_locks.setdefault(spec.session, asyncio.Lock())
        try:
            async with lock:
                return await self._start(spec)
        finally:
            if not lock.locked():
                self._starting_locks.pop(spec.session, None)

    async def _start(self, spec: SandboxStart) -> Hosted:
        known = self._all.get((spec.session, spec.epoch))
        if known is not None:
            return known
        crash.passing("before_admission")
        self._check_possible(spec)
        before = self._current.get(spec.session)
        if before is not None and before.epoch > spec.epoch:
            raise ShoalError(
                ErrorCode.EPOCH_MISMATCH,
                f"This host runs epoch {before.epoch} of that session.",
                details={"epoch": before.epoch},
            )
        if before is not None and not before.over:
            self.end(before, EndReason.DELETED, "replaced")
            await before.wait_while("starting", "running", "paused", "ending", timeout_s=_PREDECESSOR_WAIT_S)
        size = disk_class(self._runtime, spec.resources.disk_mib)
        # The /dev/shm of a warm sandbox cannot be changed any more.
        key = (
            WarmKey(digest=spec.source.digest, substrate=spec.substrate, disk_mib=size)
            if spec.resources.shm_mib == WARM_SHM_MIB
            else None
        )
        reservation = self.room.admit(spec, key, size)
        hosted = self.record(spec, reservation)
        hosted.bring_up = asyncio.create_task(self._bring_up(hosted, key))
        return hosted

    def record(self, spec: SandboxStart, reservation: Reservation) -> Hosted:
        """A new record, owned from now on, in `starting`; its journal is made, or recovered."""
        journal = self._journals.open(spec)
        hosted = Hosted(
            spec=spec,
            journal=journal,
            records=Records(session=spec.session, epoch=spec.epoch, journal=journal, history=None),
            clock=self._clock,
            reservation=reservation,
            meter=Meter(payer=payer_of(spec), start=self._clock.now()),
            active_at=self._clock.monotonic(),
        )
        if spec.history:
            hosted.read_past = lambda: self._journals.history(spec)
            hosted.records = Records(
                session=spec.session, epoch=spec.epoch, journal=journal, history=hosted.past
            )
        self._add(hosted)
        return hosted

    def _add(self, hosted: Hosted) -> None:
        self._all[(hosted.session, hosted.epoch)] = hosted
        newest = self._current.get(hosted.session)
        if newest is None or newest.epoch <= hosted.epoch:
            self._current[hosted.session] = hosted

    def _check_possible(self, spec: SandboxStart) -> None:
        if self.fenced:
            raise ShoalError(ErrorCode.HOST_FENCED, "This host has lost touch with the control plane.")
        if spec.substrate is not Substrate.CONTAINER:
            raise ShoalError(
                ErrorCode.SUBSTRATE_UNAVAILABLE, f"This host has no substrate {spec.substrate.value}."
            )
        if spec.network.mode != "none":
            raise ShoalError(
                ErrorCode.NOT_IMPLEMENTED, "The network mode `allowlist` is not implemented in this version."
            )
        if spec.durability != "host":
            raise ShoalError(
                ErrorCode.NOT_IMPLEMENTED, "The durability `remote` is not implemented in this version."
            )
        if self.draining:
            raise self.room.refusal("draining", 1, 0)

    async def _bring_up(self, hosted: Hosted, warm_key: WarmKey | None) -> None:
        try:
            await self._incarnator.bring_up(hosted, warm_key)
        except ShoalError as error:
            await self._ender.fail(hosted, error)
            _log.warning(
                "sandbox.start_failed",
                session_id=hosted.session,
                epoch=hosted.epoch,
                code=error.code.value,
                phase=error.details.get("phase"),
            )
            self._events.add(
                hosted.session,
                "sandbox.start_failed",
                error.message,
                code=error.code.value,
                epoch=hosted.epoch,
            )
        except Exception as error:  # noqa: BLE001 - a start's own loop: logged, told, undone
            _log.exception("sandbox.start_failed", session_id=hosted.session, epoch=hosted.epoch)
            failure = ShoalError(
                ErrorCode.SANDBOX_START_FAILED,
                f"The sandbox did not start: {type(error).__name__}.",
                details={"phase": hosted.phase.value if hosted.phase else Phase.STARTING_SANDBOX.value},
            )
            await self._ender.fail(hosted, failure)
        else:
            self.watch(hosted)
            _log.info(
                "sandbox.started",
                session_id=hosted.session,
                epoch=hosted.epoch,
                warm=hosted.warm,
                duration_ms=hosted.timings_ms.get("total"),
            )
            self._events.add(
                hosted.session,
                "sandbox.started",
                "warm" if hosted.warm else "cold",
                epoch=hosted.epoch,
                timings_ms=hosted.timings_ms,
            )
        hosted.changed()
        self._nudge()
        # The pool stood back for this start.
        self._warm.tend()

    def watch(self, hosted: Hosted) -> None:
        """End the sandbox when its guest goes."""
        task = asyncio.create_task(self._watch(hosted))
        hosted.tasks.add(task)
        task.add_done_callback(hosted.tasks.discard)

    async def _watch(self, hosted: Hosted) -> None:
        link, sandbox = hosted.link, hosted.sandbox
        if link is None or sandbox is None:
            return
        await link.closed.wait()
        if hosted.state != "running":
            return
        reason, detail = EndReason.FAILED, "the sandbox's first process ended"
        kills = self._ender.oom_kills(hosted)
        if kills > hosted.oom_kills:
            reason, detail = EndReason.OOM, "the sandbox's first process was killed: out of memory"
        _log.warning(
            "sandbox.guest_gone",
            session_id=hosted.session,
            epoch=hosted.epoch,
            reason=reason.value,
            error=_why_closed(link),
        )
        self.end(hosted, reason, detail)

    def end(self, hosted: Hosted, reason: EndReason, detail: str | None = None) -> None:
        """Begin to end a sandbox, in the background; repeatable, from every state: the first reason counts."""
        if hosted.ending is not None or hosted.over:
            return
        hosted.state, hosted.phase = "ending", None
        hosted.end_reason, hosted.end_detail = reason, detail
        hosted.changed()
        self._journals.mark_ended(hosted.session, hosted.epoch, reason, detail)
        self.finish(hosted)

    def finish(self, hosted: Hosted) -> None:
        """Bring a record in `ending` to its end, in the background."""
        hosted.ending = asyncio.create_task(self._finish(hosted))

    async def _finish(self, hosted: Hosted) -> None:
        began = self._clock.monotonic()
        self.tell_limits(hosted, final=True)
        await self._ender.end(hosted)
        reason = hosted.end_reason.value if hosted.end_reason else None
        _log.info(
            "sandbox.ended",
            session_id=hosted.session,
            epoch=hosted.epoch,
            reason=reason,
            duration_ms=round((self._clock.monotonic() - began) * 1000, 3),
        )
        self._events.add(
            hosted.session,
            "sandbox.ended",
            hosted.end_detail or reason or "",
            epoch=hosted.epoch,
            reason=reason,
        )
        self._nudge()
        self._warm.tend()

    def tell_limits(self, hosted: Hosted, *, final: bool = False) -> None:
        """Make events of the limits that a sandbox has run into since the last. `final`: it ends."""
        if hosted.sandbox is None:
            return
        try:
            hits = self._runtime.limits_hit(hosted.sandbox)
        except SandboxGone:
            return
        disk_mib, now = hosted.reservation.disk_mib, self._clock.monotonic()
        told = list(hosted.limits.look(hits, hosted.spec.resources, disk_mib, now, final=final))
        for hit in told:
            self._events.add(hosted.session, hit.kind, hit.message, epoch=hosted.epoch, **hit.data)
        if told:
            self._incarnator.keep(hosted)

    async def patch(self, session: SessionId, patch: SandboxPatch) -> Hosted:
        """Change what may change while a sandbox lives.

        Raises:
            ShoalError: `not_found`, `epoch_mismatch`, `not_implemented` for a network.
        """
        hosted = self.get(session)
        if hosted.epoch != patch.epoch:
            raise ShoalError(
                ErrorCode.EPOCH_MISMATCH,
                f"This host runs epoch {hosted.epoch} of that session.",
                details={"epoch": hosted.epoch},
            )
        if patch.network is not None and patch.network.mode != "none":
            raise ShoalError(
                ErrorCode.NOT_IMPLEMENTED, "The network mode `allowlist` is not implemented in this version."
            )
        changes: dict[str, object] = {
            name: getattr(patch, name)
            for name in ("expires_at", "idle_pause_s", "idle_timeout_s", "labels", "network")
            if name in patch.model_fields_set
            and (getattr(patch, name) is not None or name.startswith("idle"))
        }
        if "labels" in changes:
            self._ender.cut(hosted)
        hosted.spec = hosted.spec.model_copy(update=changes)
        hosted.meter.payer = payer_of(hosted.spec)
        hosted.acknowledged = hosted.acknowledged or patch.acknowledged
        self._incarnator.keep(hosted)
        hosted.changed()
        return hosted

    def forget(self, session: SessionId, epoch: int) -> None:
        """The end of a sandbox is recorded elsewhere: drop its record and its journal. One that lives is kept."""
        hosted = self._all.get((session, epoch))
        if hosted is None:
            self._journals.forget(session, epoch)
            return
        if not hosted.over:
            return
        del self._all[(session, epoch)]
        if self._current.get(session) is hosted:
            del self._current[session]
        hosted.journal.close()
        self._journals.forget(session, epoch)

    async def end_all(self, reason: EndReason, detail: str) -> None:
        """End every sandbox and wait until nothing of them is left, and their journals are durable or given up."""
        for hosted in self.live():
            self.end(hosted, reason, detail)
        await self._ender.quiet(self)


def _why_closed(link: GuestLink) -> str:
    """What ended a link."""
    try:
        link.check_open()
    except LinkError as error:
        return f"{type(error).__name__}: {error}"
    return "open"
