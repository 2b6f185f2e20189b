"""Taking one sandbox away for good: its steps, its processes, its disk; then its journal into the blob store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from runtime_image.agent.actions.runner import settle_unknown
from runtime_image.agent.clock import Clock
from runtime_image.agent.errors import detail_of
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.incarnate import Incarnator
from runtime_image.agent.journals import Journals
from runtime_image.agent.metering import UsageQueue
from runtime_image.agent.ports import RuntimePort
from runtime_image.agent.sandboxes import SandboxGone, SandboxRuntimeError
from runtime_image.agent.transfer import TransferError
from shoal.contract.base import HostId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import EndReason, Phase
from shoal.contract.usage import SandboxCondition

_log = structlog.get_logger()

#: How long killed steps may take to report what they printed.
_KILL_GRACE_S = 1.0
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)


class Ender:
    """Ends sandboxes, and meters them: the last record of each is cut while its cgroup can still be read."""

    def __init__(
        self,
        *,
        runtime: RuntimePort,
        incarnator: Incarnator,
        journals: Journals,
        usage: UsageQueue,
        clock: Clock,
        host: Callable[[], HostId],
    ) -> None:
        self._runtime = runtime
        self._incarnator = incarnator
        self._journals = journals
        self._usage = usage
        self._clock = clock
        self._host = host
        self._giving_up = asyncio.Event()

    def oom_kills(self, hosted: Hosted) -> int:
        """How many processes of it the memory limit has killed; the last that was known when it is gone."""
        if hosted.ooms is None:
            return hosted.oom_kills
        try:
            return hosted.ooms.read()
        except OSError:
            return hosted.oom_kills

    def cut(self, hosted: Hosted, condition: SandboxCondition | None = None) -> None:
        """Make a usage record of the time since the last; the next interval is in `condition` (None: the same)."""
        cpu_usec: int | None = None
        memory_mib: float | None = None
        if hosted.sandbox is not None:
            try:
                used = self._runtime.usage(hosted.sandbox)
                cpu_usec, memory_mib = used.cpu_usec, used.memory_bytes / 1048576
                hosted.oom_kills = used.oom_kills
            except SandboxGone:
                pass
        if hosted.actions is not None:
            hosted.meter.actions, hosted.actions.performed = hosted.actions.performed, 0
        self._usage.add(
            hosted.meter.cut(
                host=self._host(),
                now=self._clock.now(),
                cpu_usec=cpu_usec,
                memory_mib=memory_mib,
                condition=condition,
            )
        )

    async def fail(self, hosted: Hosted, error: ShoalError) -> None:
        """Undo a start that failed; the record says why."""
        await self._discard(hosted)
        self.cut(hosted)
        hosted.error = detail_of(error)
        hosted.end_reason, hosted.end_detail = EndReason.FAILED, error.message
        hosted.state, hosted.phase = "failed", None
        hosted.journal_flushed = True
        hosted.journal.close()
        hosted.changed()

    async def end(self, hosted: Hosted) -> None:
        """Bring a record in `ending` to `ended`: everything of the sandbox is gone and its journal is durable.

        A journal that does not get through is tried again for as long as the agent runs.
        """
        if hosted.bring_up is not None and not hosted.bring_up.done():
            hosted.bring_up.cancel()
            await asyncio.wait({hosted.bring_up})
        if hosted.frozen_by and hosted.sandbox is not None:
            hosted.frozen_by.clear()
        if hosted.actions is not None:
            await hosted.actions.close(hosted.refusal(), grace_s=_KILL_GRACE_S)
        self._settle_adopted(hosted)
        self.cut(hosted)
        await self._discard(hosted)
        for task in list(hosted.tasks):
            if task is not asyncio.current_task():
                task.cancel()
        hosted.phase = Phase.FLUSHING_JOURNAL
        hosted.changed()
        await self._flush(hosted)
        hosted.journal.close()
        hosted.phase = None
        hosted.state = "failed" if hosted.error is not None else "ended"
        hosted.changed()

    def _settle_adopted(self, hosted: Hosted) -> None:
        """Steps of an earlier agent with which this one did not go on."""
        try:
            for entry in hosted.journal.unsettled():
                settle_unknown(hosted.journal, entry, self._clock)
        except OSError as error:
            _log.error(
                "journal.write_failed", session_id=hosted.session, epoch=hosted.epoch, errno=error.errno
            )

    async def _discard(self, hosted: Hosted) -> None:
        for delay in (*_RETRY_S, None):
            try:
                await self._incarnator.discard(hosted)
            except (SandboxRuntimeError, OSError) as error:
                _log.error(
                    "sandbox.stop_failed", session_id=hosted.session, epoch=hosted.epoch, error=str(error)
                )
                if delay is None:
                    return
                await asyncio.sleep(delay)
            else:
                return

    async def _flush(self, hosted: Hosted) -> None:
        attempt = 0
        while not hosted.journal_flushed:
            try:
                await self._journals.flush(hosted.journal, hosted.session, hosted.epoch, hosted.lineage)
                hosted.journal_flushed = True
                return
            except (ShoalError, TransferError, OSError) as error:
                if isinstance(error, ShoalError) and error.code is ErrorCode.NOT_FOUND:
                    # The control plane does not know this session (any more): nobody will ever ask for it.
                    hosted.journal_flushed = True
                    return
                _log.warning(
                    "journal.flush_failed", session_id=hosted.session, epoch=hosted.epoch, error=str(error)
                )
            if self._giving_up.is_set():
                return
            delay = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
            attempt += 1
            try:
                async with asyncio.timeout(delay):
                    await self._giving_up.wait()
            except TimeoutError:
                pass

    def give_up(self) -> None:
        """The agent goes: journals that do not get through stay on the disk for the next one."""
        self._giving_up.set()

    async def quiet(self, records: Iterable[Hosted]) -> None:
        """Return when nothing of these is on its way any more: everything is taken down, and the journals are
        durable, or given up."""
        ending = {
            hosted.ending for hosted in records if hosted.ending is not None and not hosted.ending.done()
        }
        if ending:
            await asyncio.wait(ending)
