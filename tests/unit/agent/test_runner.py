"""The steps of a session: order, joining, replay, kills, and what is said when the sandbox goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.perform import perform
from runtime_image.agent.actions.records import Records, Replay
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.actions.runner import SessionActions
from runtime_image.agent.fakes import FakeCounter, FakeGroup, FakeLink, FakeProcess, ManualClock
from runtime_image.agent.journal.file import Journal
from runtime_image.agent.link import GuestLink, SpawnError
from shoal.contract.actions import Exec, Observation
from shoal.contract.errors import ErrorCode, ShoalError


class World:
    """A session's steps over a scripted guest."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.link = FakeLink()
        self.counter = FakeCounter()
        self.groups: dict[str, FakeGroup] = {}
        self.journal = Journal(directory)
        self.actions = self._actions()

    def _actions(self) -> SessionActions:
        runtime = cast(Any, self)
        bench = Bench(
            link=cast(GuestLink, self.link),
            runtime=runtime,
            sandbox=cast(Any, None),
            clock=ManualClock(),
            workdir="/workspace",
            user=None,
            env={"IMAGE": "1"},
            ooms=self.counter,
            saw_ooms=lambda count: None,
            lowers=(),
            snapshot_index=lambda id: None,
        )

        async def run(step: ActionRun, started: Callable[[], None]) -> Observation:
            return await perform(bench, step, started)

        def forget(step: ActionRun) -> None:
            if step.process is not None:
                self.link.forget_later(cast(Any, step.process))

        return SessionActions(
            records=Records(session="ses_1", epoch=1, journal=self.journal, history=None),
            journal=self.journal,
            first_seq=1,
            perform=run,
            forget=forget,
            clock=ManualClock(),
            touched=lambda: None,
        )

    def kill_group(self, sandbox: object, name: str) -> FakeGroup:
        """What the runtime would make."""
        group = self.groups.setdefault(name, FakeGroup(name))
        self.link.group = group
        return group

    async def submit(
        self, id: str, command: str = "true", *, parallel: bool = False, **fields: Any
    ) -> ActionRun:
        """Send an exec that must be taken as new."""
        run = await self.actions.submit(id, Exec(command=command, **fields), parallel=parallel)
        assert isinstance(run, ActionRun)
        return run

    def observed(self, run: ActionRun) -> Any:
        """The step's record."""
        return json.loads(run.record("ses_1", 1))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A session with nothing done yet."""
    made = World(tmp_path)
    yield made
    made.journal.close()


def hold(process: FakeProcess) -> None:
    """Processes run until the test ends them."""


async def started(world: World, count: int) -> None:
    """Return when so many processes have been started."""
    while len(world.link.spawned) < count:
        await asyncio.sleep(0)


async def leave_a_child(world: World) -> FakeProcess:
    """A step `a` whose leader has ended and whose child runs on."""
    world.link.on_spawn = hold
    run = await world.submit("a")
    await started(world, 1)
    child = FakeProcess(world.link.spawned[0].spec, world.groups["a1"])
    world.link.spawned[0].end(0)
    await run.settled.wait()
    return child


async def test_one_after_another_in_arrival_order(world: World) -> None:
    """The second starts when the first has ended; its seq is given then; a parallel one does not wait."""
    world.link.on_spawn = hold
    first, second = await world.submit("a"), await world.submit("b")
    await started(world, 1)
    third = await world.submit("c", parallel=True)
    await started(world, 2)
    assert (first.seq, second.seq, third.seq) == (1, None, 2)
    world.link.spawned[0].end(0)
    await first.settled.wait()
    await started(world, 3)
    assert second.seq == 3
    for process in world.link.spawned:
        process.end(0)
    await second.settled.wait()
    await third.settled.wait()
    assert world.link.forgotten == ["a1", "a2", "a3"] or set(world.link.forgotten) == {"a1", "a2", "a3"}
    assert not world.actions.busy


async def test_the_same_id_joins_then_replays_and_never_runs_again(world: World) -> None:
    """...and means the same action, or is refused."""
    world.link.on_spawn = hold
    run = await world.submit("a", "echo 1")
    await started(world, 1)
    assert await world.actions.submit("a", Exec(command="echo 1"), parallel=False) is run
    with pytest.raises(ShoalError) as conflict:
        await world.actions.submit("a", Exec(command="echo 2"), parallel=False)
    assert conflict.value.code is ErrorCode.ACTION_CONFLICT
    world.link.spawned[0].print(b"1\n")
    world.link.spawned[0].end(0)
    await run.settled.wait()
    again = await world.actions.submit("a", Exec(command="echo 1"), parallel=False)
    assert isinstance(again, Replay)
    record = json.loads(again.record)
    assert (record["replayed"], record["observation"]["stdout"]) == (True, "1\n")
    assert len(world.link.spawned) == 1
    with pytest.raises(ShoalError) as conflict:
        await world.actions.submit("a", Exec(command="echo 1", env={"A": "1"}), parallel=False)
    assert conflict.value.code is ErrorCode.ACTION_CONFLICT


async def test_environment_values_tell_actions_apart_and_are_not_kept(world: World) -> None:
    """A repeat with another value is another action; the journal has neither value."""
    await (await world.submit("a", env={"K": "first-secret"})).settled.wait()
    with pytest.raises(ShoalError):
        await world.actions.submit("a", Exec(command="true", env={"K": "second-secret"}), parallel=False)
    assert world.link.spawned[0].spec.env == {"IMAGE": "1", "K": "first-secret"}
    assert b"secret" not in (world.directory / "journal").read_bytes()


async def test_a_list_runs_in_order_and_stops(world: World) -> None:
    """What comes after a failure is skipped: not started, not recorded, free to be asked for."""
    codes = iter([0, 3, 0])
    world.link.on_spawn = lambda process: process.end(next(codes))
    steps = [Exec(command=f"echo {n}") for n in range(3)]
    taken = await world.actions.submit_list("l", steps, parallel=False, keep_going=False)
    runs = [run for run in taken if isinstance(run, ActionRun)]
    for run in runs:
        await run.settled.wait()
    assert [run.skipped for run in runs] == [False, False, True]
    assert len(world.link.spawned) == 2
    again = await world.actions.submit_list("l", steps, parallel=False, keep_going=False)
    assert [isinstance(one, Replay) for one in again] == [True, True]


async def test_a_kill_ends_the_tree_and_keeps_what_was_printed(world: World) -> None:
    """By request: killed, no exit code; a queued step is killed before it starts, and is recorded as that."""
    world.link.on_spawn = hold
    run, queued = await world.submit("a"), await world.submit("b")
    await started(world, 1)
    world.link.spawned[0].print(b"partial")
    await world.actions.kill("b")
    await queued.settled.wait()
    assert world.observed(queued)["observation"]["killed"]
    assert len(world.link.spawned) == 1
    await world.actions.kill("a")
    await run.settled.wait()
    seen = world.observed(run)["observation"]
    assert (seen["killed"], seen["timed_out"], seen["exit_code"], seen["signal"]) == (
        True,
        False,
        None,
        "KILL",
    )
    assert seen["stdout"] == "partial"
    with pytest.raises(ShoalError) as ended:
        await world.actions.kill("a")
    assert ended.value.code is ErrorCode.ACTION_NOT_RUNNING
    with pytest.raises(ShoalError) as unknown:
        await world.actions.kill("z")
    assert unknown.value.code is ErrorCode.NOT_FOUND


async def test_a_timeout_is_a_kill_that_says_so(world: World) -> None:
    """Counted from the start of the process."""
    world.link.on_spawn = hold
    run = await world.submit("a", timeout_s=0.01)
    await run.settled.wait()
    assert world.observed(run)["observation"]["timed_out"]
    assert world.groups["a1"].kills == 1


async def test_a_guest_that_does_not_report_a_kill_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output so far is taken, and the queue goes on."""
    monkeypatch.setattr("runtime_image.agent.actions.processes._KILL_REPORT_S", 0.02)
    world.link.on_spawn = lambda process: setattr(process, "deaf", True)
    run = await world.submit("a")
    await started(world, 1)
    world.link.spawned[0].print(b"so far")
    await world.actions.kill("a")
    await run.settled.wait()
    assert world.observed(run)["observation"]["stdout"] == "so far"
    world.link.on_spawn = lambda process: process.end(0)
    await (await world.submit("b")).settled.wait()


async def test_background_frees_the_queue_when_it_has_started(world: World) -> None:
    """It is answered as running, goes on beside the others, and has no default time-out."""
    world.link.on_spawn = hold
    background = await world.submit("bg", background=True)
    await background.answerable.wait()
    assert not background.settled.is_set()
    assert background.killer is None
    world.link.on_spawn = lambda process: process.end(0)
    await (await world.submit("b")).settled.wait()
    assert world.actions.open_ids() == ["bg"]
    await world.actions.kill("bg")
    await background.settled.wait()


async def test_a_command_that_cannot_start_is_an_observation(world: World) -> None:
    """Recorded like any other, with the system's reason."""
    world.link.refuse = SpawnError(2, "No such file or directory", "command")
    run = await world.submit("a", command=["nope"])  # type: ignore[arg-type]
    await run.settled.wait()
    record = world.observed(run)
    assert (record["status"], record["observation"]["error"]["errno"]) == ("done", "ENOENT")


async def test_a_sandbox_that_goes_away_leaves_the_outcome_unknown(world: World) -> None:
    """The step is told as unknown, also when it is asked for again; it never runs a second time."""
    world.link.on_spawn = hold
    run = await world.submit("a")
    await started(world, 1)
    world.link.spawned[0].lose()
    await run.settled.wait()
    record = world.observed(run)
    assert (record["status"], record["error"]["code"]) == ("unknown", "sandbox_lost")
    with pytest.raises(ShoalError) as unknown:
        await world.actions.submit("a", Exec(command="true"), parallel=False)
    assert unknown.value.code is ErrorCode.ACTION_OUTCOME_UNKNOWN


async def test_memory_is_blamed_only_when_it_was_memory(world: World) -> None:
    """A failing command during which the limit killed something is oom_killed; a clean one and an earlier kill
    are not."""

    def eat(process: FakeProcess) -> None:
        world.counter.count += 1
        process.end(None, signal="KILL")

    world.link.on_spawn = eat
    run = await world.submit("a")
    await run.settled.wait()
    assert world.observed(run)["observation"]["oom_killed"]
    world.link.on_spawn = lambda process: process.end(1)
    run = await world.submit("b")
    await run.settled.wait()
    assert not world.observed(run)["observation"]["oom_killed"]


async def test_a_group_with_children_left_is_removed_when_they_end(world: World) -> None:
    """What a leader leaves running keeps its group; the sweep takes it once it is empty."""
    child = await leave_a_child(world)
    assert not world.groups["a1"].removed
    child.end(0)
    world.actions.sweep_groups()
    assert world.groups["a1"].removed


async def test_what_an_ended_step_left_running_can_be_killed(world: World) -> None:
    """A kill of it ends its children and answers the record unchanged; once nothing is left, it has ended."""
    child = await leave_a_child(world)
    answered = await world.actions.kill("a")
    assert isinstance(answered, Replay)
    assert json.loads(answered.record)["observation"]["exit_code"] == 0
    assert child.exited
    with pytest.raises(ShoalError) as refused:
        await world.actions.kill("a")
    assert refused.value.code is ErrorCode.ACTION_NOT_RUNNING


async def test_closing_kills_what_runs_and_refuses_what_comes(world: World) -> None:
    """Running steps are recorded as killed, queued ones never ran, new ones hear why."""
    world.link.on_spawn = hold
    run, queued = await world.submit("a"), await world.submit("b")
    await started(world, 1)
    await world.actions.close(ShoalError(ErrorCode.SESSION_ENDED, "ended"), grace_s=1)
    assert world.observed(run)["observation"]["killed"]
    assert queued.settled.is_set()
    with pytest.raises(ShoalError) as refused:
        await world.submit("c")
    assert refused.value.code is ErrorCode.SESSION_ENDED


@pytest.mark.parametrize(
    ("code", "status"), [(ErrorCode.SANDBOX_LOST, "unknown"), (ErrorCode.SESSION_ENDED, "done")]
)
async def test_a_sandbox_taken_away_by_the_platform_is_no_end_of_the_command(
    world: World, code: ErrorCode, status: str
) -> None:
    """A host that goes leaves the outcome unknown, with a code to act on; an end that the caller asked for, or knew
    of, is a kill that keeps what was printed."""
    world.link.on_spawn = hold
    run = await world.submit("a")
    await started(world, 1)
    await world.actions.close(ShoalError(code, "gone"), grace_s=5)
    record = world.observed(run)
    assert record["status"] == status
    if status == "unknown":
        assert record["error"]["code"] == code
        assert record.get("observation") is None
    else:
        assert record["observation"]["killed"]


async def test_a_step_that_cannot_be_recorded_does_not_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk of the host: refused as unavailable, and the id is free."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world.journal, "intent", full)
    run = await world.submit("a")
    await run.settled.wait()
    assert run.body is not None
    assert json.loads(run.body)["code"] == "unavailable"
    assert world.link.spawned == []
    monkeypatch.undo()
    await (await world.submit("a")).settled.wait()


async def test_a_result_that_cannot_be_recorded_is_unknown_ever_after(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up under a step: who waits is told its end; a repeat does not run it again, and a poll is not
    told that it runs still."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world.journal, "result", full)
    run = await world.submit("a")
    await run.settled.wait()
    assert world.observed(run)["status"] == "done"
    monkeypatch.undo()
    with pytest.raises(ShoalError) as refused:
        await world.submit("a")
    assert refused.value.code is ErrorCode.ACTION_OUTCOME_UNKNOWN
    found = await world.actions._records.find("a")
    assert found is not None
    assert json.loads(found.record)["status"] == "unknown"
    assert len(world.link.spawned) == 1
