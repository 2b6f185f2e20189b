"""Limits that a real sandbox runs into are told as events."""

from __future__ import annotations

import pytest

from shoal.contract.host import SandboxSource
from tests.integration.agent.harness import SMALL, AgentProcess, Control

pytestmark = pytest.mark.root

_BALLOON = "head -c 400m /dev/zero | tail"
_BOMB = "for n in $(seq 200); do sleep 5 & done; wait"
_FILL = "dd if=/dev/zero of=/fill bs=1M count=400"
_INODES = "n=0; while : > $n; do n=$((n+1)); done"


@pytest.mark.parametrize(
    ("kind", "command"),
    [("limit.memory", _BALLOON), ("limit.pids", _BOMB), ("limit.disk", _FILL), ("limit.disk", _INODES)],
)
async def test_a_limit_that_is_hit_is_told(
    agent: AgentProcess, control: Control, source: SandboxSource, kind: str, command: str
) -> None:
    """Once, of that kind alone, while the session lives on; a session that hits none is told of none."""
    control.ack = False
    box, calm = await agent.create(source), await agent.create(source)
    await calm.sh("true")
    assert (await box.sh(command))["exit_code"] != 0
    beat = await control.beat_where(
        lambda beat: any(one.event.kind.startswith("limit.") for one in beat.events)
    )
    before = len(control.beats)
    await control.beat_where(lambda _: len(control.beats) > before + 5)
    beat = control.beats[-1]
    told = [(one.session, one.event) for one in beat.events if one.event.kind.startswith("limit.")]
    assert [(session, event.kind) for session, event in told] == [(box.session, kind)]
    data = told[0][1].data
    limit = {"limit.memory": SMALL.memory_mib, "limit.pids": SMALL.pids, "limit.disk": SMALL.disk_mib}[kind]
    assert data["limit" if kind == "limit.pids" else "limit_mib"] == limit
    if kind != "limit.disk":
        assert isinstance(data["count"], int)
        assert data["count"] >= 1
    assert (await box.sh("echo on"))["stdout"] == "on\n"
