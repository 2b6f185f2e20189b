"""After a restart: go on with what lives, account for what died, clean what nobody owns."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import structlog

from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.perform import resume
from runtime_image.agent.actions.processes import process_id
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
from runtime_image.agent.layer_store import LayerStore
from runtime_image.agent.link import GuestProcess, LinkError
from runtime_image.agent.ports import Connect, RuntimePort
from runtime_image.agent.sandboxes import Sandbox, SandboxRuntimeError
from runtime_image.agent.service import SandboxService
from runtime_image.agent.starting import Started, disk_class
from runtime_image.agent.warm import WarmPool, WarmSandbox, warm_reservation
from shoal.contract.actions import ActionRecord, Observation
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxStart
from shoal.contract.states import EndReason

_log = structlog.get_logger()


class Adopter:
    """Adopts once, at start, before anything new is taken."""

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
        """Adopt living sandboxes with their running steps, remove all others, and report what ended unseen."""
        began = self._clock.monotonic()
        living = {sandbox.sandbox_id: sandbox for sandbox in await self._runtime.adopt()}
        kept = self._keeper.load()
        adopted: set[str] = set()
        for one in kept:
            sandbox = living.get(one.sandbox_id)
            if sandbox is not None and await self._try(one, dataclasses.replace(sandbox, sock=one.sock)):
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

    async def _try(self, one: Kept, sandbox: Sandbox) -> bool:
        about = one.about
        if about.spec is not None and not about.running:
            # It was still starting: what of its start had been done is not known.
            return False
        try:
            # The last agent may have died while it held the sandbox still.
            await self._runtime.thaw(sandbox)
            link = await self._connect(one.sock)
        except (SandboxRuntimeError, LinkError, OSError) as error:
            _log.warning("adoption.failed", sandbox_id=one.sandbox_id, error=str(error))
            return False
        try:
            stack = await self._layers.acquire(about.layers)
        except ShoalError as error:
            _log.warning("adoption.failed", sandbox_id=one.sandbox_id, error=str(error))
            link.close()
            return False
        started = Started(sandbox=sandbox, link=link, stack=stack)
        if about.spec is not None:
            await self._session(one, about.spec, started)
        elif about.key is not None and about.source is not None:
            warm = WarmSandbox(
                sandbox_id=one.sandbox_id,
                key=about.key,
                started=started,
                reservation=warm_reservation(about.key),
            )
            self._warm.adopt(warm, about.source)
        return True

    async def _session(self, one: Kept, spec: SandboxStart, started: Started) -> None:
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
        hosted.sandbox, hosted.link, hosted.stack = started.sandbox, started.link, started.stack
        bench = self._incarnator.attach(hosted)
        hosted.state = "running"
        hosted.meter.condition = "running"
        hosted.meter.start = one.about.metered_to or hosted.meter.start
        hosted.meter.cpu_usec = one.about.metered_cpu_usec
        hosted.oom_kills = self._runtime.usage(started.sandbox).oom_kills
        await self._steps(hosted, bench)
        self._service.watch(hosted)
        hosted.changed()

    async def _steps(self, hosted: Hosted, bench: Bench) -> None:
        """Go on with the steps that were running; what is not known to have ended is `unknown`."""
        assert hosted.actions is not None
        try:
            processes = {process.process_id: process for process in await bench.link.processes()}
        except LinkError:
            processes = {}
        for entry in hosted.journal.unsettled():
            process = processes.pop(process_id(entry.seq), None)
            if process is None:
                settle_unknown(hosted.journal, entry, self._clock)
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
            hosted.end_detail = "the sandbox did not survive a restart of its host's agent"
        if hosted.state == "ending":
            self._service.finish(hosted)


def _forget_later(hosted: Hosted, bench: Bench, name: str) -> None:
    async def forget() -> None:
        try:
            await bench.link.forget(name)
        except LinkError:
            pass

    task = asyncio.create_task(forget())
    hosted.tasks.add(task)
    task.add_done_callback(hosted.tasks.discard)
