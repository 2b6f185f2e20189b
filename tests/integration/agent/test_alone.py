"""A host that nobody wants, or that nobody hears, ends by itself and leaves nothing: its machine is paid for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.contract.host import SandboxSource
from tests.integration.agent.conftest import options
from tests.integration.agent.harness import AgentProcess, Control, running_agent

pytestmark = [pytest.mark.root, pytest.mark.slow]


async def _end(agent: AgentProcess) -> int:
    assert agent.process is not None
    async with asyncio.timeout(60):
        return await agent.process.wait()


async def test_an_agent_that_hears_nothing_ends_with_its_holder(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """When the control plane is silent for `orphan_s`, the agent ends its sandboxes and itself; its holder starts no
    other."""
    about = options(shared) | {"orphan_s": 3, "flush_grace_s": 0.1}
    async with running_agent(control, root / "h1", holder=True, **about) as agent:
        box = await agent.create(source)
        await box.sh("true")
        control.silent = True
        assert await _end(agent) == 1
        assert "host.orphaned" in agent.log()
        assert agent.log().count("starting it again") == 0
        assert list((root / "h1").glob("disks/*")) == []


async def test_a_refused_host_ends_with_its_holder(
    control: Control, root: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A join token that another agent used is of no use to any agent after it: nothing is started again."""

    async def refuse(request: web.Request) -> web.Response:
        detail = {"code": "unauthenticated", "message": "used", "next": "fix"}
        return web.json_response({"error": detail}, status=401)

    monkeypatch.setattr(control, "_register", refuse)
    other = Control.__new__(Control)
    other.__dict__ |= control.__dict__
    await other.start()
    agent = AgentProcess(other, root / "h2", holder=True, **options(shared))
    starting: asyncio.Task[Any] = asyncio.create_task(agent.start())
    try:
        while agent.process is None:
            await asyncio.sleep(0.01)
        assert await _end(agent) == 1
        assert agent.log().count("starting it again") == 0
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await agent.stop()
        await other.stop()
