"""Bringing one session's sandbox up on this host: the steps between admission and `running`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import structlog

from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.perform import perform
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.actions.runner import SessionActions
from runtime_image.agent.clock import Clock
from runtime_image.agent.hosted import Hosted, workdir_of
from runtime_image.agent.journals import Journals
from runtime_image.agent.keeper import About, Keeper
from runtime_image.agent.link import LinkError
from runtime_image.agent.metering import UsageQueue
from runtime_image.agent.ports import RuntimePort
from runtime_image.agent.sandboxes import SandboxRuntimeError
from runtime_image.agent.starting import (
    Started,
    Starter,
    limits_of,
    prepare_workdir,
    run_on_start,
    start_failed,
)
from runtime_image.agent.warm import WarmPool
from runtime_image.layers import LayerIndex
from shoal.contract.actions import Observation
from shoal.contract.base import HostId, new_id
from shoal.contract.host import WarmKey
from shoal.contract.states import Phase

_log = structlog.get_logger()

#: The index of a sandbox's writable layer at a snapshot; None when it was not taken of this sandbox.
SnapshotIndex = Callable[[Hosted, str], LayerIndex | None]


class Incarnator:
    """Brings sandboxes up, cold or warm, and gives them what takes their steps."""

    def __init__(
        self,
        *,
        runtime: RuntimePort,
        starter: Starter,
        warm: WarmPool,
        keeper: Keeper,
        journals: Journals,
        usage: UsageQueue,
        clock: Clock,
        host: Callable[[], HostId],
        snapshot_index: SnapshotIndex,
    ) -> None:
        self._runtime = runtime
        self._starter = starter
        self._warm = warm
        self._keeper = keeper
        self._journals = journals
        self._usage = usage
        self._clock = clock
        self._host = host
        self._snapshot_index = snapshot_index

    async def bring_up(self, hosted: Hosted, warm_key: WarmKey | None) -> None:
        """Bring it to `running`.

        Args:
            hosted: The record, in `starting`.
            warm_key: Which warm sandbox would do; None when none does.

        Raises:
            ShoalError: It did not come up; what there is of it is in `hosted`, for the ender.
        """
        began = self._clock.monotonic()
        self._starter.claims += 1
        try:
            found = await self._warm.take(warm_key) if warm_key is not None else None
            if found is not None and await self._claim(hosted, *found):
                hosted.warm = True
            else:
                await self._cold(hosted)
        finally:
            self._starter.claims -= 1
        await self._ready(hosted)
        if hosted.state != "starting":
            # It was ended meanwhile; who ended it cleans up.
            raise asyncio.CancelledError
        hosted.timings_ms["total"] = round((self._clock.monotonic() - began) * 1000, 3)
        self._run(hosted)

    async def _claim(self, hosted: Hosted, sandbox_id: str, started: Started) -> bool:
        self._take(hosted, sandbox_id, started)
        try:
            await self._runtime.set_limits(started.sandbox, limits_of(hosted.spec.resources))
        except SandboxRuntimeError as error:
            _log.warning("warm.claim_failed", sandbox_id=sandbox_id, error=str(error))
            await self.discard(hosted)
            return False
        return True

    async def _cold(self, hosted: Hosted) -> None:
        self._phase(hosted, Phase.FETCHING_IMAGE)
        sandbox_id = new_id("sbx")
        hosted.sandbox_id = sandbox_id
        source, limits = hosted.spec.source, limits_of(hosted.spec.resources)
        started = await self._starter.cold(
            sandbox_id, source, limits, hosted.timings_ms, self._announce(hosted)
        )
        self._take(hosted, sandbox_id, started)

    def _announce(self, hosted: Hosted) -> Callable[[], None]:
        return lambda: self._phase(hosted, Phase.STARTING_SANDBOX)

    def _take(self, hosted: Hosted, sandbox_id: str, started: Started) -> None:
        hosted.sandbox_id = sandbox_id
        hosted.sandbox, hosted.link, hosted.stack = started.sandbox, started.link, started.stack
        self.keep(hosted)

    async def discard(self, hosted: Hosted) -> None:
        """Take the sandbox under a record away, whatever there is of it. Repeatable."""
        if hosted.link is not None:
            hosted.link.close()
        elif hosted.sandbox is not None and hosted.sandbox.sock is not None:
            # Adopted, and never spoken to.
            hosted.sandbox.sock.close()
        if hosted.sandbox_id:
            await self._runtime.stop(hosted.sandbox_id)
            self._keeper.drop(hosted.sandbox_id)
        if hosted.stack is not None:
            self._starter.release(hosted.stack)
        if hosted.ooms is not None:
            hosted.ooms.close()
        for group in hosted.lasting.values():
            group.remove()
        hosted.lasting.clear()
        hosted.link = hosted.sandbox = hosted.stack = hosted.ooms = None
        hosted.sandbox_id = ""

    async def _ready(self, hosted: Hosted) -> None:
        assert hosted.link is not None
        assert hosted.stack is not None
        if hosted.spec.rewound:
            await hosted.past()
        config = hosted.spec.source.config
        if not hosted.warm or (hosted.workdir, hosted.user) != (workdir_of(config), config.user):
            try:
                await prepare_workdir(hosted.link, hosted.stack, hosted.workdir, hosted.user)
            except LinkError as error:
                raise start_failed(Phase.STARTING_SANDBOX, "The sandbox went away at its start.") from error
        if hosted.spec.on_start:
            self._phase(hosted, Phase.ON_START)
            began = self._clock.monotonic()
            await run_on_start(hosted, hosted.link, self._runtime)
            hosted.timings_ms["on_start"] = round((self._clock.monotonic() - began) * 1000, 3)

    def _run(self, hosted: Hosted) -> None:
        self.attach(hosted)
        hosted.state, hosted.phase = "running", None
        self._journals.mark_ran(hosted.session, hosted.epoch)
        hosted.touch()
        self._usage.add(
            hosted.meter.cut(
                host=self._host(), now=self._clock.now(), cpu_usec=None, memory_mib=None, condition="running"
            )
        )
        self.keep(hosted)

    def attach(self, hosted: Hosted) -> Bench:
        """Give a live sandbox what takes its steps."""
        assert hosted.link is not None
        assert hosted.sandbox is not None
        assert hosted.stack is not None
        hosted.ooms = self._runtime.oom_counter(hosted.sandbox)
        bench = Bench(
            ooms=hosted.ooms,
            saw_ooms=hosted.saw_ooms,
            link=hosted.link,
            runtime=self._runtime,
            sandbox=hosted.sandbox,
            clock=self._clock,
            workdir=hosted.workdir,
            user=hosted.user,
            env=hosted.env,
            lowers=hosted.stack.paths,
            lasting=hosted.lasting,
            snapshot_index=lambda snapshot: self._snapshot_index(hosted, snapshot),
        )
        link = hosted.link

        async def run(step: ActionRun, started: Callable[[], None]) -> Observation:
            return await perform(bench, step, started)

        def forget(step: ActionRun) -> None:
            if step.process is not None and not link.closed.is_set():
                if step.process.exited:
                    link.forget_later(step.process)
                else:
                    _in_background(hosted, _forget(link.forget(step.process.process_id)))

        hosted.actions = SessionActions(
            records=hosted.records,
            journal=hosted.journal,
            first_seq=hosted.spec.first_seq,
            perform=run,
            forget=forget,
            clock=self._clock,
            touched=hosted.touch,
        )
        return bench

    def _phase(self, hosted: Hosted, phase: Phase) -> None:
        hosted.phase = phase
        hosted.changed()

    def keep(self, hosted: Hosted) -> None:
        """Let the holder know what the sandbox is, for the agent after this one."""
        if hosted.sandbox is None or hosted.stack is None:
            return
        about = About(
            layers=list(hosted.stack.layers),
            spec=hosted.spec,
            warm=hosted.warm,
            acknowledged=hosted.acknowledged,
            running=hosted.state == "running",
            metered_to=hosted.meter.start,
            metered_cpu_usec=hosted.meter.cpu_usec,
            told=hosted.limits.told,
        )
        self._keeper.keep_session(hosted.sandbox_id, hosted.sandbox.sock, about)


def _in_background(hosted: Hosted, work: Coroutine[None, None, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    hosted.tasks.add(task)
    task.add_done_callback(hosted.tasks.discard)


async def _forget(work: Awaitable[None]) -> None:
    try:
        await work
    except LinkError:
        # The guest is gone, and what it kept with it.
        pass
