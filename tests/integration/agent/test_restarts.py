"""An agent that restarts: fenced until somebody acknowledges it, and rid of what nobody watches any more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.contract.host import Incarnation, SandboxSource
from tests.integration.agent.conftest import options
from tests.integration.agent.harness import AgentProcess, BoxHandle, Control, running_agent

pytestmark = [pytest.mark.root, pytest.mark.slow]

_COMPILER = "#!/bin/sh\nsleep 4321 &\nsleep 4321\n"


async def test_a_restart_does_not_renew_the_lease(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """Nobody acknowledges: killed and started twice, the agent refuses every action, and processes that ran stand
    still, long before a lease is over. Acknowledged, what was not released goes on; what was never ran again."""
    async with running_agent(control, root / "h1", holder=True, **options(shared)) as agent:
        kept, lost = await agent.create(source), await agent.create(source)
        for box in (kept, lost):
            command = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done"
            await box.post(id="t", action={"type": "exec", "command": command, "background": True})
            while not (await box.get("/actions/t"))[1].get("observation", {}).get("stdout"):
                await asyncio.sleep(0.01)
        control.silent = True
        for _ in range(2):
            await _kill(agent)
            assert (await _refusal(kept))["code"] == "host_fenced"
        frozen = [(cgroup / "cgroup.events").read_text() for cgroup in _cgroups(agent)]
        assert ["frozen 1" in events for events in frozen] == [True, True]
        control.reply["release"] = [Incarnation(session=lost.session, epoch=1)]
        control.silent = False
        await control.beat_where(
            lambda beat: {one.session: one.state for one in beat.sandboxes}.get(lost.session) == "ended"
        )
        _, record = await kept.get("/actions/t")
        assert record["status"] == "running"
        shown = len(record["observation"]["stdout"])
        while len((await kept.get("/actions/t"))[1]["observation"]["stdout"]) <= shown:
            await asyncio.sleep(0.01)
        assert (await kept.sh("echo on"))["stdout"] == "on\n"


async def test_an_action_during_a_restart_is_not_refused(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """The control plane is there: whoever calls while the agent restarts waits a moment, and is never told of a
    fence."""
    async with running_agent(control, root / "h1", holder=True, **options(shared)) as agent:
        box = await agent.create(source)
        await box.sh("true")
        for _ in range(3):
            await _kill(agent)
            while True:
                try:
                    status, answer = await box.post(action={"type": "exec", "command": "echo on"}, wait_s=25)
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.01)
            assert (status, answer["observation"]["stdout"]) == (200, "on\n"), answer


async def test_a_compiler_does_not_outlive_its_step(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """The agent dies during a compilation: the step is unknown, and the compiler is killed with all its children."""
    async with running_agent(control, root / "h1", holder=True, **options(shared)) as agent:
        box = await agent.create(source)
        await box.act("write_file", path="/usr/bin/gcc", content=_COMPILER, mode=0o755)
        await box.post(id="c", action={"type": "run_code", "language": "c", "code": "x"}, wait_s=0)
        (cgroup,) = _cgroups(agent)
        async with asyncio.timeout(10):
            while len(_pids(cgroup / "group-a2")) < 3:
                await asyncio.sleep(0.01)
        await _kill(agent)
        await control.beat_where(lambda beat: any(one.state == "running" for one in beat.sandboxes))
        status, record = await box.post(id="c", action={"type": "run_code", "language": "c", "code": "x"})
        assert (status, record["error"]["code"]) == (409, "action_outcome_unknown")
        assert "sleep" not in (await box.sh("ps"))["stdout"]
        async with asyncio.timeout(5):
            while (cgroup / "group-a2").exists():
                await asyncio.sleep(0.05)


async def _kill(agent: AgentProcess) -> None:
    """Kill the agent, and wait until its holder has started another."""
    before = agent.pid_of_agent()
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(20):
        while True:
            try:
                if agent.pid_of_agent() != before:
                    return
            except IndexError:
                pass
            await asyncio.sleep(0.01)


async def _refusal(box: BoxHandle) -> Any:
    """What an action is refused with, once the agent answers at all."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, answer = await box.post(action={"type": "exec", "command": "true"}, wait_s=0)
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
            else:
                return answer["error"]


def _cgroups(agent: AgentProcess) -> list[Path]:
    """The cgroups of this agent's sandboxes, in the v2 hierarchy."""
    found = []
    for record in (agent.home / "runtime" / "sandboxes").glob("*/running.json"):
        lines = Path(f"/proc/{json.loads(record.read_text())['pid']}/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::"))
        tops = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
        found.append(next(top / own for top in tops if (top / own / "cgroup.events").exists()))
    return found


def _pids(group: Path) -> list[str]:
    try:
        return (group / "cgroup.procs").read_text().split()
    except OSError:
        return []
