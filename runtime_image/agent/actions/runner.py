"""The steps of one incarnation: never one twice, in their order, each recorded before and after."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from runtime_image.agent import crash
from runtime_image.agent.actions.lane import Lane
from runtime_image.agent.actions.records import Records, Replay, check_same
from runtime_image.agent.actions.run import ActionRun, Batch, KillReason
from runtime_image.agent.actions.shrink import (
    JOURNAL_LIMIT_BYTES,
    SMALL_BYTES,
    shrink_action,
    shrink_observation,
)
from runtime_image.agent.clock import Clock
from runtime_image.agent.errors import detail_of
from runtime_image.agent.journal.file import Entry, Journal
from runtime_image.agent.link import LinkError
from runtime_image.agent.ports import KillGroup
from runtime_image.agent.sandboxes import SandboxRuntimeError
from shoal.contract.actions import Action, ExecObservation, Observation
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.identity import kept_json
from shoal.contract.states import ActionStatus

_log = structlog.get_logger()

#: Performs a step: gives its observation, or raises. The callback says that a background step has started.
Perform = Callable[[ActionRun, Callable[[], None]], Awaitable[Observation]]
#: Frees what the guest keeps of a step; its result is recorded.
Forget = Callable[[ActionRun], None]


def outcome_unknown(id: str, seq: int) -> ShoalError:
    """The step had started when its host crashed; nobody knows how far it got."""
    return ShoalError(
        ErrorCode.ACTION_OUTCOME_UNKNOWN,
        f"Action {id} had started when its host crashed; it is not known how far it got, and it is not run again.",
        details={"id": id, "seq": seq},
    )


class SessionActions:
    """Takes the steps of one incarnation. The journal stays its owner's."""

    def __init__(
        self,
        *,
        records: Records,
        journal: Journal,
        first_seq: int,
        perform: Perform,
        forget: Forget,
        clock: Clock,
        touched: Callable[[], None],
    ) -> None:
        self._records = records
        self._session = records.session
        self._epoch = records.epoch
        self._next_seq = max(first_seq, journal.last_seq + 1)
        self._journal = journal
        self._perform = perform
        self._forget = forget
        self._clock = clock
        self._touched = touched
        self._runs: dict[str, ActionRun] = {}
        self._main = Lane(self._start, self._skip)
        self._lanes: dict[ActionRun, Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Kill groups of ended steps in which processes live on, by the step's id.
        self._leftover: list[tuple[str, KillGroup]] = []
        self._closed: ShoalError | None = None
        self.performed = 0

    @property
    def running(self) -> int:
        """How many steps run now, background ones included."""
        return len(self._tasks)

    @property
    def busy(self) -> bool:
        """Whether a step runs or waits."""
        return bool(self._runs)

    def get(self, id: str) -> ActionRun | None:
        """The step of this id, while it is queued or runs."""
        return self._runs.get(id)

    def open_ids(self) -> list[str]:
        """Ids of the steps that run now, by seq."""
        running = [run for run in self._runs.values() if run.entry is not None]
        return [run.id for run in sorted(running, key=lambda run: run.seq or 0)]

    async def submit(self, id: str, action: Action, *, parallel: bool) -> ActionRun | Replay:
        """Take a step: a new one is queued or started, one that is under way is joined, a recorded one is answered.

        Raises:
            ShoalError: `action_conflict`, `action_outcome_unknown`, or why this incarnation takes no steps.
        """
        kept, sha = self._records.digest(action)
        found = await self._known(id, sha)
        if found is not None:
            return found
        run = ActionRun(id=id, action=action, kept=kept, sha=sha)
        self._enqueue(run, Lane(self._start, self._skip) if parallel else self._main)
        return run

    async def submit_list(
        self, id: str, actions: Sequence[Action], *, parallel: bool, keep_going: bool
    ) -> list[ActionRun | Replay]:
        """Take a list of steps, `<id>.0` and on: all are queued together, in order. A recorded failure stops the list
        there; the answer then ends with it.

        Raises:
            ShoalError: As `submit`; nothing was queued.
        """
        batch = Batch(keep_going=keep_going)
        lane = Lane(self._start, self._skip) if parallel else self._main
        taken: list[ActionRun | Replay] = []
        fresh: list[ActionRun] = []
        for n, action in enumerate(actions):
            item = f"{id}.{n}"
            kept, sha = self._records.digest(action)
            found = await self._known(item, sha)
            if found is None:
                found = ActionRun(id=item, action=action, kept=kept, sha=sha, batch=batch)
                fresh.append(found)
            taken.append(found)
            if isinstance(found, Replay) and found.failed and not keep_going:
                break
        for run in fresh:
            self._enqueue(run, lane)
        return taken

    async def _known(self, id: str, sha: str) -> ActionRun | Replay | None:
        run = self._runs.get(id)
        if run is not None:
            check_same(id, run.sha, sha)
            return run
        found = await self._records.find(id, sha=sha)
        if found is not None and found.status is ActionStatus.UNKNOWN:
            raise outcome_unknown(id, found.seq)
        if found is not None and found.status is not ActionStatus.ROLLED_BACK:
            return found
        # Another call may have taken the id, and even ended, while the history was fetched.
        if id in self._runs or (found is None and self._records.known_here(id)):
            return await self._known(id, sha)
        return None

    def _enqueue(self, run: ActionRun, lane: Lane) -> None:
        if self._closed is not None:
            raise self._closed
        self._runs[run.id] = run
        self._lanes[run] = lane
        self._touched()
        lane.add(run)

    def _begin(self, run: ActionRun) -> bool:
        """Give the step its seq and record the intent; False when that cannot be written."""
        at = self._clock.now()
        try:
            kept = run.kept
            if len(kept) > SMALL_BYTES and self._journal.size_bytes > JOURNAL_LIMIT_BYTES:
                kept = kept_json(shrink_action(run.action))
            run.entry = self._journal.intent(seq=self._next_seq, id=run.id, sha=run.sha, action=kept, at=at)
        except OSError as error:
            _log.error("journal.write_failed", session_id=self._session, epoch=self._epoch, errno=error.errno)
            problem = ShoalError(
                ErrorCode.UNAVAILABLE, "The host could not record the action; it did not run."
            )
            run.body, run.is_error, run.failed = _detail_json(problem), True, True
            self._drop(run)
            return False
        self._next_seq += 1
        run.status = ActionStatus.RUNNING
        return True

    def _start(self, run: ActionRun, lane: Lane) -> None:
        if not self._begin(run):
            lane.release(run)
            return
        crash.passing("after_intent")
        task = asyncio.get_running_loop().create_task(self._run(run, lane, self._perform))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, run: ActionRun, lane: Lane, perform: Perform) -> None:
        def started() -> None:
            if getattr(run.action, "background", False):
                run.answerable.set()
                lane.release(run)

        try:
            observation = await perform(run, started)
        except ShoalError as error:
            self._settle(run, ActionStatus.UNKNOWN, _detail_json(error), is_error=True, failed=True)
        except (LinkError, SandboxRuntimeError, OSError) as error:
            _log.warning(
                "action.lost",
                session_id=self._session,
                epoch=self._epoch,
                seq=run.seq,
                kind=run.action.type,
                error=type(error).__name__,
            )
            lost = self._closed or ShoalError(
                ErrorCode.SANDBOX_LOST,
                "The sandbox went away while the action ran; how far it got is not known.",
            )
            self._settle(run, ActionStatus.UNKNOWN, _detail_json(lost), is_error=True, failed=True)
        except Exception:  # noqa: BLE001 - a step's own loop: logged, counted, told to the caller
            _log.exception("action.failed", session_id=self._session, epoch=self._epoch, seq=run.seq)
            problem = ShoalError(
                ErrorCode.INTERNAL, "The host failed at the action; how far it got is not known."
            )
            self._settle(run, ActionStatus.UNKNOWN, _detail_json(problem), is_error=True, failed=True)
        else:
            if (
                run.kill_reason == "end"
                and self._closed is not None
                and self._closed.code is ErrorCode.SANDBOX_LOST
            ):
                # The platform took the sandbox away under it: never to be read as the command's own end.
                self._settle(
                    run, ActionStatus.UNKNOWN, _detail_json(self._closed), is_error=True, failed=True
                )
                return
            body = recorded = observation.model_dump_json().encode()
            if len(body) > SMALL_BYTES and self._journal.size_bytes > JOURNAL_LIMIT_BYTES:
                recorded = shrink_observation(observation).model_dump_json().encode()
            self._settle(
                run, ActionStatus.DONE, body, is_error=False, failed=observation.failed, recorded=recorded
            )
        finally:
            lane.release(run)

    def _settle(
        self,
        run: ActionRun,
        status: ActionStatus,
        body: bytes,
        *,
        is_error: bool,
        failed: bool,
        recorded: bytes | None = None,
    ) -> None:
        """End a step: `body` is answered now, `recorded` (None: the same) from the journal ever after."""
        run.status, run.body, run.is_error, run.failed = status, body, is_error, failed
        assert run.entry is not None
        try:
            self._journal.result(
                run.entry, status=status, body=recorded or body, at=self._clock.now(), is_error=is_error
            )
        except OSError as error:
            # Who waits is told what is true; a repeat will be told that it is not known, and never that it runs still.
            run.entry.status = ActionStatus.UNKNOWN
            _log.error("journal.write_failed", session_id=self._session, epoch=self._epoch, errno=error.errno)
        crash.passing("after_result")
        self.performed += 1
        if run.batch is not None and failed and not run.batch.keep_going:
            run.batch.stopped = True
        if run.group is not None and run.owns_group and not run.group.remove():
            self._leftover.append((run.id, run.group))
        self._forget(run)
        self._drop(run)

    def _drop(self, run: ActionRun) -> None:
        self._runs.pop(run.id, None)
        self._lanes.pop(run, None)
        self._touched()
        run.answerable.set()
        run.process_changed.set()
        run.settled.set()

    def _skip(self, run: ActionRun) -> None:
        run.skipped = True
        self._drop(run)

    async def kill(self, id: str) -> ActionRun | Replay:
        """Kill a step's whole process tree, or take it out of the queue: it then counts as killed before its start.

        Of a step that has ended, what it left running is killed: its record stays as it is. That is the way out
        of a session in which no process can be started any more.

        Raises:
            ShoalError: `action_not_running`: it has ended and left nothing; `not_found`.
        """
        run = self._runs.get(id)
        if run is None:
            replay = await self._records.find(id)
            if replay is None:
                raise ShoalError(ErrorCode.NOT_FOUND, f"There is no action {id} in this session.")
            self.sweep_groups()
            left = [group for of, group in self._leftover if of == id]
            if not left:
                raise ShoalError(ErrorCode.ACTION_NOT_RUNNING, f"Action {id} has ended.")
            for group in left:
                group.kill()
            return replay
        self._kill(run, "kill")
        return run

    def _kill(self, run: ActionRun, reason: KillReason) -> None:
        lane = self._lanes.get(run)
        run.kill_reason = run.kill_reason or reason
        if run.entry is None and lane is not None and lane.remove(run):
            if self._begin(run):
                body = ExecObservation(signal="KILL", killed=True).model_dump_json().encode()
                self._settle(run, ActionStatus.DONE, body, is_error=False, failed=True)
            return
        run.kill(reason)

    def resume(self, entry: Entry, run: ActionRun, perform: Perform) -> None:
        """Go on with a step that an earlier agent began and whose process still runs, or ended unforgotten."""
        run.entry = entry
        run.status = ActionStatus.RUNNING
        self._runs[run.id] = run
        lane = Lane(self._start, self._skip) if getattr(run.action, "background", False) else self._main
        self._lanes[run] = lane
        task = asyncio.get_running_loop().create_task(self._run(run, lane, perform))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill_left(self, group: KillGroup) -> None:
        """Kill what a step left whose end nobody will record, and see its kill group off."""
        group.kill()
        if not group.remove():
            self._leftover.append(("", group))

    def sweep_groups(self) -> None:
        """Remove the kill groups whose last process has ended since."""
        self._leftover = [left for left in self._leftover if not left[1].remove()]

    async def close(self, reason: ShoalError, *, grace_s: float) -> None:
        """Take no more steps; kill those that run and record what they printed.

        Args:
            reason: What is told to whoever sends a step from now on.
            grace_s: How long killed steps may take to report; what is left then counts as unknown.
        """
        if self._closed is None:
            self._closed = reason
        for run in list(self._runs.values()):
            self._kill(run, "end")
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for run in list(self._runs.values()):
            if run.entry is not None:
                self._settle(run, ActionStatus.UNKNOWN, _detail_json(reason), is_error=True, failed=True)
            else:
                self._drop(run)
        for _, group in self._leftover:
            group.kill()
            group.remove()


def settle_unknown(journal: Journal, entry: Entry, clock: Clock) -> None:
    """Record that nobody knows how a step ended: its agent died between the intent and the result."""
    body = _detail_json(outcome_unknown(entry.id, entry.seq))
    journal.result(entry, status=ActionStatus.UNKNOWN, body=body, at=clock.now(), is_error=True)


def _detail_json(error: ShoalError) -> bytes:
    return detail_of(error).model_dump_json(exclude_none=True).encode()
