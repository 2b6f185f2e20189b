"""After a restart: go on with what lives, account for what died, clean what nobody owns."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import structlog

from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.perform import resume
from runtime_image.agent.actions.processes import group_name, process_id
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.actions.runner import settle_unknown
from runtime_image.agent.admission import Reservation
from runtime_image.agent.clock import Clock
from runtime_image.agent.errors import detail_of
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.incarnate import Incarnator
from runtime_image.agent.journal.file import Entry
from runtime_image.agent.journals import Journals, Left
from runtime_image.agent.keeper import Keeper, Kept
from runtime_image.agent.layer_store import LayerStore, Stack
from runtime_image.agent.link import GuestProcess, LinkError
from runtime_image.agent.ports import Connect, RuntimePort
from runtime_image.agent.sandboxes import Sandbox, SandboxRuntimeError
from runtime_image.agent.service import FENCE, SandboxService
from runtime_image.agent.starting import Started, disk_class
from runtime_image.agent.warm import WarmPool, WarmSandbox, warm_reservation
from shoal.contract.actions import ActionRecord, Observation
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxStart
from shoal.contract.states import EndReason

_log = structlog.get_logger()

_DIED = "the sandbox did not survive a restart of its host's agent"


class Adopter:
    """Adopts once, at start, before anything new is taken: sessions' sandboxes stand still, and nobody speaks to them,
    until `go_on`. The control plane may have given their sessions to other hosts while no agent was here."""

    def __init__(
        self,
        *,
        runtime: RuntimePort,
        service: SandboxService,
        incarnator: Incarnator,
        warm: WarmPool,
        keeper: Keeper,
        journals: Journals,
        layers: LayerStore,
        connect: Connect,
        clock: Clock,
    ) -> None:
        self._runtime = runtime
        self._service = service
        self._incarnator = incarnator
        self._warm = warm
        self._keeper = keeper
        self._journals = journals
        self._layers = layers
        self._connect = connect
        self._clock = clock

    async def adopt(self) -> None:
        """Adopt living sandboxes, remove all others, and report what ended unseen."""
        began = self._clock.monotonic()
        living = {sandbox.sandbox_id: sandbox for sandbox in await self._runtime.adopt()}
        kept = self._keeper.load()
        adopted: set[str] = set()
        tried = await asyncio.gather(*(self._try(one, living.get(one.sandbox_id)) for one in kept))
        for one, taken in zip(kept, tried, strict=True):
            if taken:
                adopted.add(one.sandbox_id)
            else:
                one.sock.close()
                self._keeper.drop(one.sandbox_id)
        try:
            removed = await self._runtime.sweep(adopted)
        except ExceptionGroup as errors:
            _log.error("adoption.sweep_failed", errors=[str(error) for error in errors.exceptions])
            removed = []
        ended = self._account()
        if adopted or removed or ended:
            _log.info(
                "host.adopted",
                adopted=len(adopted),
                removed=len(removed),
                ended=ended,
                duration_ms=round((self._clock.monotonic() - began) * 1000, 3),
            )

    async def _try(self, one: Kept, living: Sandbox | None) -> bool:
        about = one.about
        if living is None or (about.spec is None and (about.key is None or about.source is None)):
            return False
        sandbox = dataclasses.replace(living, sock=one.sock)
        if about.spec is not None and not about.running:
            # It was still starting: what of its start had been done is not known.
            return False
        stack: Stack | None = None
        try:
            stack = await self._layers.acquire(about.layers)
            if about.spec is not None:
                await self._session(one, about.spec, sandbox, stack)
            else:
                await self._warm_one(one, sandbox, stack)
        except (SandboxRuntimeError, LinkError, OSError, ShoalError) as error:
            _log.warning("adoption.failed", sandbox_id=one.sandbox_id, error=str(error))
            if stack is not None:
                self._layers.release(stack)
            return False
        return True

    async def _warm_one(self, one: Kept, sandbox: Sandbox, stack: Stack) -> None:
        about = one.about
        assert about.key is not None
        assert about.source is not None
        started = Started(sandbox=sandbox, link=await self._connect(one.sock), stack=stack)
        warm = WarmSandbox(
            sandbox_id=one.sandbox_id,
            key=about.key,
            started=started,
            reservation=warm_reservation(about.key),
        )
        self._warm.adopt(warm, about.source)

    async def _session(self, one: Kept, spec: SandboxStart, sandbox: Sandbox, stack: Stack) -> None:
        oom_kills = self._runtime.usage(sandbox).oom_kills
        hosted = self._service.record(
            spec,
            Reservation(
                cpu_millis=spec.resources.cpu_millis,
                memory_mib=spec.resources.memory_mib,
                disk_mib=disk_class(self._runtime, spec.resources.disk_mib),
            ),
        )
        hosted.warm, hosted.acknowledged = one.about.warm, one.about.acknowledged
        hosted.sandbox_id = one.sandbox_id
        hosted.sandbox, hosted.stack = sandbox, stack
        hosted.state = "running"
        hosted.meter.condition = "running"
        hosted.meter.start = one.about.metered_to or hosted.meter.start
        hosted.meter.cpu_usec = one.about.metered_cpu_usec
        hosted.oom_kills = oom_kills
        hosted.limits.told = one.about.told
        try:
            await hosted.freeze(self._runtime, FENCE)
        except (SandboxRuntimeError, TimeoutError) as error:
            _log.error("host.freeze_failed", session_id=hosted.session, error=str(error))

    async def go_on(self, hosted: Hosted) -> None:
        """Speak to the guest of an adopted sandbox, thawed by now, and go on with its steps. One that does not answer
        ends. Repeatable; nothing for a sandbox that was not adopted."""
        sandbox = hosted.sandbox
        if hosted.state != "running" or hosted.link is not None or sandbox is None or sandbox.sock is None:
            return
        # The link owns the socket from here on.
        hosted.sandbox = dataclasses.replace(sandbox, sock=None)
        try:
            link = await self._connect(sandbox.sock)
        except (LinkError, OSError) as error:
            sandbox.sock.close()
            self._fail(hosted, error)
            return
        if hosted.ending is not None:
            # Ended meanwhile, by somebody who knew of no link.
            link.close()
            return
        hosted.link = link
        try:
            bench = self._incarnator.attach(hosted)
        except SandboxRuntimeError as error:
            self._fail(hosted, error)
            return
        await self._steps(hosted, bench)
        self._service.watch(hosted)
        hosted.changed()

    def _fail(self, hosted: Hosted, error: Exception) -> None:
        _log.warning("adoption.failed", session_id=hosted.session, error=str(error))
        self._service.end(hosted, EndReason.FAILED, _DIED)

    async def _steps(self, hosted: Hosted, bench: Bench) -> None:
        """Go on with the steps that were running; what is not known to have ended is `unknown`."""
        assert hosted.actions is not None
        try:
            processes = {process.process_id: process for process in await bench.link.processes()}
        except LinkError:
            processes = {}
        if hosted.state != "running":
            # Whoever ended it meanwhile has settled them.
            return
        for entry in hosted.journal.unsettled():
            process = _taken(processes, process_id(entry.seq))
            if process is None:
                settle_unknown(hosted.journal, entry, self._clock)
                # Whatever of it still runs, such as a compiler, nobody would ever read or end.
                hosted.actions.kill_left(bench.group(group_name(entry.seq)))
                continue
            record = ActionRecord.model_validate_json(
                b'{"id":"x","epoch":1,"status":"running","action":' + hosted.journal.read(entry).action + b"}"
            )
            run = ActionRun(
                id=entry.id, action=record.action, kept=hosted.journal.read(entry).action, sha=entry.sha
            )
            hosted.actions.resume(entry, run, self._resumer(bench, process))
        for name in processes:
            # Recorded before the last agent could say so.
            if name.startswith(("a", "on_start")):
                _forget_later(hosted, bench, name)

    def _resumer(
        self, bench: Bench, process: GuestProcess
    ) -> Callable[[ActionRun, Callable[[], None]], asyncio.Future[Observation]]:
        def perform(run: ActionRun, started: Callable[[], None]) -> asyncio.Future[Observation]:
            started()
            age_s = time.monotonic() - process.started_monotonic
            return asyncio.ensure_future(resume(bench, run, process, age_s))

        return perform

    def _account(self) -> int:
        """Take the journals that nobody stands for any more: answered, flushed and reported from here on."""
        count = 0
        for left in self._journals.left():
            if self._service.find(left.spec.session, left.spec.epoch) is None:
                self._bury(left)
                count += 1
        return count

    def _bury(self, left: Left) -> None:
        hosted = self._service.record(
            left.spec, Reservation(cpu_millis=0, memory_mib=0, disk_mib=0, sandboxes=0)
        )
        entries: list[Entry] = hosted.journal.unsettled()
        for entry in entries:
            settle_unknown(hosted.journal, entry, self._clock)
        hosted.journal_flushed = left.flushed
        if left.end is not None:
            hosted.end_reason, hosted.end_detail = left.end
            hosted.state = "ended" if left.flushed else "ending"
        elif not left.ran:
            failure = ShoalError(
                ErrorCode.SANDBOX_START_FAILED,
                "The host's agent restarted while the sandbox started.",
                details={"phase": "starting_sandbox"},
            )
            hosted.error = detail_of(failure)
            hosted.end_reason, hosted.end_detail = EndReason.FAILED, failure.message
            hosted.state, hosted.journal_flushed = "failed", True
            return
        else:
            hosted.state = "ending"
            hosted.end_reason = EndReason.FAILED
            hosted.end_detail = _DIED
        if hosted.state == "ending":
            self._service.finish(hosted)


def _taken(processes: dict[str, GuestProcess], name: str) -> GuestProcess | None:
    """The step's process out of those found: under its name, or that of a second choice of interpreter, `<name>.1`."""
    for found in processes:
        if found == name or found.startswith(f"{name}."):
            return processes.pop(found)
    return None


def _forget_later(hosted: Hosted, bench: Bench, name: str) -> None:
    async def forget() -> None:
        try:
            await bench.link.forget(name)
        except LinkError:
            pass

    task = asyncio.create_task(forget())
    hosted.tasks.add(task)
    task.add_done_callback(hosted.tasks.discard)
