"""A host's life: admission, the warm pool, expiry, fencing, orders, the end; and what is left after it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import tarfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shoal.contract.host import Incarnation, SandboxSource
from shoal.contract.sessions import Resources
from tests.integration.agent.conftest import options
from tests.integration.agent.harness import SMALL, AgentProcess, Control, running_agent, warm_order

pytestmark = pytest.mark.root


async def test_a_full_host_refuses(control: Control, root: Path, shared: Path, source: SandboxSource) -> None:
    """What does not fit is refused with what is short; the same start again is the same sandbox; room comes back."""
    async with running_agent(control, root / "h1", max_sandboxes=1, **options(shared)) as agent:
        box = await agent.create(source)
        again = await agent.create(source, session=box.session)
        assert (again.status_code, again.status["state"]) == (200, "running")
        refused = await agent.create(source)
        assert (refused.status_code, refused.status["error"]["code"]) == (503, "host_refused")
        assert refused.status["error"]["details"]["short_of"] == "sandboxes"
        await box.delete()
        assert (await agent.create(source)).status["state"] == "running"


async def test_warm_sandboxes_are_handed_over_once(
    agent: AgentProcess, control: Control, source: SandboxSource
) -> None:
    """A claim from the pool is fast, has the session's own limits, and is never seen by a second session; dead ones
    are noticed; the pool refills, and drains when its level falls."""
    control.reply["warm"] = [warm_order(source, 2)]
    await control.beat_where(lambda beat: any(one.ready == 2 for one in beat.warm))
    boxes = [
        await agent.create(source, resources=SMALL.model_copy(update={"memory_mib": 64})) for _ in range(2)
    ]
    assert [box.status["warm"] for box in boxes] == [True, True]
    assert (await boxes[0].sh("touch mine; ls"))["stdout"] == "mine\n"
    assert (await boxes[1].sh("ls"))["stdout"] == ""
    assert (await boxes[0].sh("tail /dev/zero"))["oom_killed"]
    await control.beat_where(lambda beat: any(one.ready == 2 for one in beat.warm))
    for pid in _guest_pids(agent):
        # Which of them are warm is the agent's secret: the sessions' own are killed too, and told as lost.
        os.kill(pid, 9)
    fresh = await agent.create(source)
    assert fresh.status["state"] == "running"
    assert (await fresh.sh("echo alive"))["stdout"] == "alive\n"
    beat = await control.beat_where(lambda beat: sum(one.state == "ended" for one in beat.sandboxes) == 2)
    assert {one.end_reason for one in beat.sandboxes if one.state == "ended"} == {"failed"}
    control.reply["warm"] = []
    await control.beat_where(lambda beat: not beat.warm)


async def test_sessions_push_warm_sandboxes_out(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """Warm ones give way where a session needs the room, and are not refilled beyond what is left."""
    async with running_agent(control, root / "h1", max_sandboxes=2, **options(shared)) as agent:
        control.reply["warm"] = [warm_order(source, 2)]
        await control.beat_where(lambda beat: any(one.ready == 2 for one in beat.warm))
        other = Resources(cpu_millis=1000, memory_mib=256, disk_mib=256, pids=64, shm_mib=32)
        first = await agent.create(source, resources=other)
        second = await agent.create(source, resources=other)
        assert [box.status["state"] for box in (first, second)] == ["running", "running"]
        beat = await control.beat_where(lambda beat: len(beat.sandboxes) == 2)
        assert sum(one.ready for one in beat.warm) == 0
        assert beat.reserved.sandboxes == 2


async def test_expiry_and_idleness(agent: AgentProcess, control: Control, source: SandboxSource) -> None:
    """The TTL ends a session; idleness does when asked, and a running action is activity."""
    brief = await agent.create(source)
    await agent.call(
        "PATCH",
        f"/v1/sandboxes/{brief.session}",
        token=brief.control_token,
        body={"epoch": 1, "expires_at": (datetime.now(UTC) + timedelta(seconds=0.5)).isoformat()},
    )
    idle = await agent.create(source, idle_timeout_s=1)
    busy = await agent.create(source, idle_timeout_s=1)
    action = {"type": "exec", "command": "sleep 1000", "background": True}
    await busy.post(id="b", action=action)
    beat = await control.beat_where(lambda beat: sum(one.state == "ended" for one in beat.sandboxes) == 2)
    reasons = {one.session: one.end_reason for one in beat.sandboxes}
    assert reasons == {brief.session: "ttl", idle.session: "idle", busy.session: None}
    status, refused = await brief.post(action={"type": "exec", "command": "true"})
    assert (status, refused["error"]["code"]) == (410, "session_ended")
    assert refused["error"]["details"]["end"]["reason"] == "ttl"


async def test_a_host_that_nobody_answers_fences_itself(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """Processes stand still and work is refused until it is acknowledged again; what was released is not thawed."""
    control.lease_s = 2.0
    async with running_agent(control, root / "h1", **options(shared)) as agent:
        kept, lost = await agent.create(source), await agent.create(source)
        for box in (kept, lost):
            command = "while :; do date +%s >> ticks; sleep 0.1; done"
            await box.post(id="t", action={"type": "exec", "command": command, "background": True})
        control.silent = True
        began = time.monotonic()
        while True:
            _, answer = await kept.post(action={"type": "exec", "command": "true"}, wait_s=0)
            if answer.get("error", {}).get("code") == "host_fenced":
                break
            await asyncio.sleep(0.05)
        assert time.monotonic() - began > 1.0
        for pid in _guest_pids(agent):
            cgroup = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
            unified = next(line.removeprefix("0::") for line in cgroup if line.startswith("0::"))
            events = next(
                path
                for top in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")
                if (path := Path(top + unified) / "cgroup.events").exists()
            )
            while "frozen 1" not in events.read_text():
                await asyncio.sleep(0.01)
        assert (await agent.create(source)).status["error"]["code"] == "host_fenced"
        control.reply["release"] = [Incarnation(session=lost.session, epoch=1)]
        control.silent = False
        await control.beat_where(
            lambda beat: {one.session: one.state for one in beat.sandboxes}.get(lost.session) == "ended"
        )
        _, record = await kept.get("/actions/t")
        assert record["status"] == "running"
        await agent.call("DELETE", f"/v1/sessions/{kept.session}/actions/t", token=kept.token)
        assert (await kept.sh("echo on"))["stdout"] == "on\n"


async def test_reports_are_repeated_until_forgotten(
    agent: AgentProcess, control: Control, source: SandboxSource
) -> None:
    """Ended sandboxes, snapshots, usage and events stay in the heartbeat until the control plane has them."""
    control.ack = False
    box = await agent.create(source)
    await box.sh("true")
    taken = await box.snapshot()
    await box.delete()
    beat = await control.beat_where(lambda beat: any(one.state == "ended" for one in beat.sandboxes))
    assert {record.condition for record in beat.usage} == {"starting", "running"}
    assert sum(record.actions for record in beat.usage) == 1
    assert {event.event.kind for event in beat.events} == {"sandbox.started", "sandbox.ended"}
    assert [one.snapshot for one in beat.snapshots] == [taken["snapshot"]]
    control.ack = True
    control.reply["forget"] = [Incarnation(session=box.session, epoch=1)]
    control.reply["forget_snapshots"] = [taken["snapshot"]]
    await control.beat_where(lambda beat: not (beat.sandboxes or beat.snapshots or beat.usage or beat.events))
    assert list((agent.home / "journals").iterdir()) == []


async def test_failed_starts_are_typed(agent: AgentProcess, control: Control, source: SandboxSource) -> None:
    """A layer that is not there and an `on_start` that fails say which phase; nothing is left; bad substrates and
    networks are refused."""
    missing = source.layers[0].model_copy(update={"digest": "sha256:" + "0" * 64})
    box = await agent.create(source.model_copy(update={"layers": [missing]}))
    assert (box.status["state"], box.status["error"]["code"]) == ("failed", "image_pull_failed")
    box = await agent.create(source, on_start=["true", "echo why >&2; exit 9"])
    assert (box.status["state"], box.status["error"]["code"]) == ("failed", "sandbox_start_failed")
    details = box.status["error"]["details"]
    assert (details["phase"], details["index"], details["exit_code"]) == ("on_start", 1, 9)
    assert details["output"] == "why\n"
    box = await agent.create(source, on_start=["echo made > by"])
    assert (await box.sh("cat by"))["stdout"] == "made\n"
    refused = await agent.create(source, network={"mode": "allowlist", "allow": ["example.org"]})
    assert (refused.status_code, refused.status["error"]["code"]) == (501, "not_implemented")
    assert len(_guest_pids(agent)) == 1


async def test_raw_files_and_tars(agent: AgentProcess, source: SandboxSource) -> None:
    """Any size in constant memory, checked, atomic; an overwrite keeps the mode; directories travel as tars."""
    box = await agent.create(source, resources=SMALL.model_copy(update={"disk_mib": 1024}))
    path = f"/v1/sessions/{box.session}/files"
    content = os.urandom(1 << 20) * 64
    status, made = await agent.call(
        "PUT", path, token=box.token, data=io.BytesIO(content), params={"path": "big", "mode": "640"}
    )
    assert (status, made["size_bytes"]) == (200, len(content))
    assert made["sha256"] == hashlib.sha256(content).hexdigest()
    assert (await box.sh("sha256sum < big; stat -c %a big"))["stdout"].split()[::2] == [made["sha256"], "640"]
    status, raw = await agent.call("GET", path, token=box.token, params={"path": "big"})
    assert raw == content
    status, refused = await agent.call(
        "PUT", path, token=box.token, data=b"x", params={"path": "big"}, headers={"x-shoal-sha256": "0" * 64}
    )
    assert (status, refused["error"]["code"]) == (422, "invalid_request")
    assert (await box.sh("stat -c %s big"))["stdout"] == f"{len(content)}\n"
    status, refused = await agent.call("GET", path, token=box.token, params={"path": "none"})
    assert (status, refused["error"]["details"]["errno"]) == (404, "ENOENT")
    await box.sh("mkdir -p t/u; echo 1 > t/a; ln -s a t/l; chmod 700 t/u")
    _, tar = await agent.call("GET", path, token=box.token, params={"path": "t"})
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        names = {name.removeprefix("./").rstrip("/") for name in opened.getnames()}
    assert {"a", "l", "u"} <= {name.removeprefix("t/") for name in names}
    status, made = await agent.call(
        "PUT",
        path,
        token=box.token,
        data=tar,
        params={"path": "copy"},
        headers={"content-type": "application/x-tar"},
    )
    assert status == 200, made
    assert "a" in (await box.sh("ls copy copy/t 2>/dev/null"))["stdout"]


async def test_an_order_to_shut_down_ends_everything(
    control: Control, root: Path, shared: Path, source: SandboxSource
) -> None:
    """Sandboxes end, journals are flushed, the control plane is told, the process exits with 0, nothing is left."""
    agent = AgentProcess(control, root / "h1", holder=True, **options(shared))
    await agent.start()
    box = await agent.create(source)
    await box.sh("true")
    await agent.http.close()
    agent._http = None
    guests = _guest_pids(agent)
    control.reply["shutdown"] = True
    assert agent.process is not None
    async with asyncio.timeout(20):
        assert await agent.process.wait() == 0
    assert control.left
    assert (control.blobs / f"journal-{box.session}-1").exists()
    assert not [pid for pid in guests if _lives(pid)]
    assert str(root) not in Path("/proc/mounts").read_text()
    assert list((root / "h1" / "runtime" / "sandboxes").iterdir()) == []


def _lives(pid: int) -> bool:
    """Whether a process is there and not just waiting for the machine's first process to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _guest_pids(agent: AgentProcess) -> set[int]:
    """Host pids of the guests of this agent's sandboxes."""

    found = set()
    for record in (agent.home / "runtime" / "sandboxes").glob("*/running.json"):
        pid = json.loads(record.read_text()).get("pid")
        if pid:
            found.add(int(pid))
    return found


async def test_a_sandbox_can_be_ended_while_it_starts(
    agent: AgentProcess, control: Control, source: SandboxSource
) -> None:
    """Delete works from every state and is repeatable; nothing of a half-made start is left."""
    box = await agent.create(source, on_start=["sleep 1000"], wait_s=0)
    assert (box.status_code, box.status["state"]) == (202, "starting")
    fresh = await agent.create(source, wait_s=0)
    for one in (box, fresh):
        status, ended = await one.delete()
        assert (status, ended["state"], ended["end_reason"]) == (200, "ended", "deleted")
        assert (await one.delete())[1]["state"] == "ended"
    assert _guest_pids(agent) == set()
    status, refused = await agent.call(
        "DELETE", "/v1/sandboxes/ses_none?epoch=1", token=control.token(kind="control")
    )
    assert (status, refused["error"]["code"]) == (404, "not_found")


async def test_the_next_epoch_takes_the_place_of_the_one_before(
    agent: AgentProcess, control: Control, source: SandboxSource
) -> None:
    """A start of a later epoch ends the earlier sandbox first; one of an earlier epoch is refused."""
    first = await agent.create(source)
    await first.sh("true")
    second = await agent.create(
        source, session=first.session, epoch=2, first_seq=2, rewound=True, restored_seq=0
    )
    assert second.status["state"] == "running"
    status, refused = await first.post(action={"type": "exec", "command": "true"})
    assert (status, refused["error"]["code"]) == (401, "token_refused")
    late = await agent.create(source, session=first.session, epoch=1)
    assert late.status["state"] in ("ended", "ending")
    wanted = {(1, "ended"), (2, "running")}
    await control.beat_where(lambda beat: {(one.epoch, one.state) for one in beat.sandboxes} == wanted)
