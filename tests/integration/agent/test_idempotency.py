"""The same id never runs twice: proved by a file that counts, with the agent dying at each named point."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.contract.host import SandboxSource
from tests.integration.agent.conftest import options
from tests.integration.agent.harness import AgentProcess, BoxHandle, Control, running_agent

pytestmark = pytest.mark.root

COUNT = "echo x >> /workspace/count; sleep 0.2; echo done"


async def _send_until_answered(box: BoxHandle, id: str, action: dict[str, Any]) -> tuple[int, Any]:
    """What a client does: the same id again until somebody answers."""
    for _ in range(200):
        try:
            status, answer = await box.post(id=id, action=action, wait_s=10)
        except (TimeoutError, OSError, Exception) as error:
            if isinstance(error, AssertionError):
                raise
            await asyncio.sleep(0.05)
            continue
        if status in (502, 503) or answer.get("error", {}).get("code") in ("sandbox_lost", "token_refused"):
            await asyncio.sleep(0.05)
            continue
        return status, answer
    raise AssertionError("nobody answered")


@pytest.mark.parametrize("point", ["after_intent", "after_fork", "after_result", "before_reply"])
async def test_an_agent_that_dies_runs_no_step_twice(
    point: str, control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """The counter is 1 where the step had started, and its outcome is told as what it is; where nothing had been
    forked the outcome is unknown, and nothing has run."""
    agent = AgentProcess(control, root / "h1", holder=True, **options(shared))
    once = root / "once"
    # The crash is armed for the restart only: the sandbox is made by a healthy agent first.
    try:
        await agent.start()
        box = await agent.create(source)
        await agent.stop()
        agent = AgentProcess(control, root / "h2", holder=True, **options(shared))
        agent.env = {"SHOAL_TESTING": "1", "SHOAL_CRASH_AT": point, "SHOAL_CRASH_ONCE": str(once)}
        await agent.start()
        box = await agent.create(source)
        status, answer = await _send_until_answered(box, "step", {"type": "exec", "command": COUNT})
        assert once.exists(), "the point was never reached"
        if point == "after_intent":
            assert (status, answer["error"]["code"]) == (409, "action_outcome_unknown")
            assert (await box.act("read_file", path="/workspace/count"))["error"]["errno"] == "ENOENT"
        else:
            assert (status, answer["status"]) == (200, "done")
            assert answer["observation"]["stdout"] == "done\n"
            assert (await box.act("read_file", path="/workspace/count"))["content"] == "x\n"
            _, again = await box.post(id="step", action={"type": "exec", "command": COUNT})
            assert again["replayed"]
            assert (await box.act("read_file", path="/workspace/count"))["content"] == "x\n"
    finally:
        await agent.stop()


async def test_an_agent_that_dies_before_admission_starts_nothing(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """The start is repeated and makes one sandbox."""
    once = root / "once"
    agent = AgentProcess(control, root / "h1", holder=True, **options(shared))
    agent.env = {"SHOAL_TESTING": "1", "SHOAL_CRASH_AT": "before_admission", "SHOAL_CRASH_ONCE": str(once)}
    try:
        await agent.start()
        with pytest.raises(Exception):  # noqa: B017 - whatever a dying server does
            await agent.create(source, session="ses_a")
        assert once.exists()
        beats = len(control.beats)
        await control.beat_where(lambda _: len(control.beats) > beats)
        box = await agent.create(source, session="ses_a")
        assert box.status["state"] == "running"
        assert [one.session for one in control.beats[-1].sandboxes] in ([], ["ses_a"])
    finally:
        await agent.stop()


async def test_a_killed_agent_finds_its_sandboxes_again(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """After kill -9 sandboxes, shells, running steps and what they print live on; no byte and no exit is lost."""
    async with running_agent(control, root / "h1", holder=True, **options(shared)) as agent:
        box = await agent.create(source, env={"SECRET": "kept"})
        await box.sh("cd /tmp; V=1", shell="main")
        await box.post(
            id="long", wait_s=0, action={"type": "exec", "command": "echo a; sleep 1.5; echo b; exit 4"}
        )
        while (await box.get("/actions/long"))[1].get("observation", {}).get("stdout") != "a\n":
            await asyncio.sleep(0.01)
        await _kill_agent(agent, control)
        status, record = await box.get("/actions/long?wait_s=10")
        assert (status, record["observation"]["exit_code"]) == (200, 4)
        assert record["observation"]["stdout"] == "a\nb\n"
        assert (await box.sh("echo $V; pwd; echo $SECRET", shell="main"))["stdout"] == "1\n/tmp\nkept\n"
        assert (await box.sh("echo $SECRET"))["stdout"] == "kept\n"
        beat = await control.beat_where(lambda beat: bool(beat.sandboxes))
        assert [(one.session, one.state) for one in beat.sandboxes] == [(box.session, "running")]
        seqs = [record["seq"] for record in await _trajectory(box)]
        assert seqs == sorted(set(seqs))


async def test_what_ended_just_before_a_kill_hurts_nobody(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """A process that the guest still keeps, with output on stderr only, is taken over and forgotten."""
    async with running_agent(control, root / "h1", holder=True, **options(shared)) as agent:
        box = await agent.create(source)
        for n, command in enumerate(("true", "echo out", "echo err >&2")):
            await box.sh(command, id=f"p{n}")
        await _kill_agent(agent, control)
        assert (await box.sh("echo alive"))["stdout"] == "alive\n"
        assert [record["status"] for record in await _trajectory(box)] == ["done"] * 4


async def test_a_timeout_goes_on_over_a_restart(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """The time counts from the process's start, whoever watches it."""
    async with running_agent(control, root / "h1", holder=True, **options(shared)) as agent:
        box = await agent.create(source)
        await box.post(
            id="t", wait_s=0, action={"type": "exec", "command": "echo up; sleep 1000", "timeout_s": 4}
        )
        while (await box.get("/actions/t"))[1].get("observation", {}).get("stdout") != "up\n":
            await asyncio.sleep(0.01)
        await _kill_agent(agent, control)
        _, record = await box.get("/actions/t?wait_s=20")
        assert record["observation"]["timed_out"]
        assert record["observation"]["stdout"] == "up\n"
        assert 3500 < record["observation"]["duration_ms"] < 6500


async def test_without_a_holder_what_lived_is_cleaned_up_and_accounted_for(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """Nobody kept the sockets: the sandboxes are gone, and reported ended, their records still answered and flushed."""
    first = AgentProcess(control, root / "h1", **options(shared))
    await first.start()
    box = await first.create(source)
    await box.sh("echo recorded", id="r")
    os.kill(first.pid_of_agent(), signal.SIGKILL)
    await first.stop()
    async with running_agent(control, root / "h1", **options(shared)) as second:
        box.agent = second
        beat = await control.beat_where(lambda beat: any(one.state == "ended" for one in beat.sandboxes))
        assert [(one.end_reason, one.journal_flushed) for one in beat.sandboxes] == [("failed", True)]
        _, record = await box.get("/actions/r")
        assert record["observation"]["stdout"] == "recorded\n"
        status, refused = await box.post(id="new", action={"type": "exec", "command": "true"})
        assert (status, refused["error"]["code"]) == (410, "sandbox_lost")
        assert control.registered == 1


async def _kill_agent(agent: AgentProcess, control: Control) -> None:
    before, beats = agent.pid_of_agent(), len(control.beats)
    os.kill(before, signal.SIGKILL)
    await control.beat_where(lambda _: len(control.beats) > beats + 1)
    assert agent.pid_of_agent() != before


async def _trajectory(box: BoxHandle) -> list[Any]:
    _, raw = await box.get("/trajectory")
    return [json.loads(line) for line in raw.splitlines()]


async def test_the_cleanup_command_leaves_nothing_of_a_killed_host(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """Holder and agent killed at once: the command removes every sandbox, and refuses while an agent lives there."""
    agent = AgentProcess(control, root / "h1", holder=True, **options(shared))
    await agent.start()
    await agent.create(source)
    argv = [sys.executable, "-m", "runtime_image.agent.cleanup", "--home", str(agent.home)]
    refusing = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    assert await refusing.wait() == 1
    pid = agent.pid_of_agent()
    assert agent.process is not None
    agent.process.kill()
    os.kill(pid, signal.SIGKILL)
    await agent.stop()
    assert list((agent.home / "runtime" / "sandboxes").iterdir())
    cleaning = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    assert await cleaning.wait() == 0
    assert list((agent.home / "runtime" / "sandboxes").iterdir()) == []
    assert str(root) not in Path("/proc/mounts").read_text()


async def test_what_was_recorded_is_answered_by_a_sandbox_that_has_ended(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """Steps and lists that came to their end are replayed; what was not made, or cut off, is refused; another action
    under the id is a conflict."""
    ok: dict[str, Any] = {"type": "exec", "command": "echo ok"}
    bad: dict[str, Any] = {"type": "exec", "command": "exit 3"}
    async with running_agent(control, root / "h", **options(shared)) as agent:
        box = await agent.create(source)
        requests: list[dict[str, Any]] = [
            {"id": "one", "action": ok},
            {"id": "all", "actions": [ok, ok]},
            {"id": "stops", "actions": [ok, bad, ok]},
            {"id": "goes-on", "actions": [ok, bad, ok], "keep_going": True},
        ]
        before = [await box.post(**request) for request in requests]
        await box.delete()
        for request, (status, answer) in zip(requests, before, strict=True):
            assert status == 200
            records = answer.get("actions", [answer])
            again_status, again = await box.post(**request)
            assert again_status == 200
            replayed = again.get("actions", [again])
            assert all(record["replayed"] for record in replayed)
            assert [one | {"replayed": False} for one in replayed] == records
            assert again.get("skipped") == answer.get("skipped")
        for request in (
            {"id": "two", "action": ok},
            {"id": "more", "actions": [ok]},
            {"id": "all", "actions": [ok, ok, ok]},
            {"action": ok},
        ):
            status, answer = await box.post(**request)
            assert (status, answer["error"]["code"]) == (410, "session_ended")
        for request in ({"id": "one", "action": bad}, {"id": "all", "actions": [ok, bad]}):
            status, answer = await box.post(**request)
            assert (status, answer["error"]["code"]) == (409, "action_conflict")
