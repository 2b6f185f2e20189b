"""Snapshots: taken, built upon, restored and forked; and what a session remembers after its disk went back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import zstandard

from shoal.contract.host import SandboxSource
from tests.integration.agent.harness import AgentProcess, Control, source_of

pytestmark = pytest.mark.root


async def test_what_a_snapshot_holds_comes_back(agent: AgentProcess, source: SandboxSource) -> None:
    """Contents, deletions, links, modes; a chain of increments; forks have disks of their own."""
    box = await agent.create(source)
    await box.sh(
        "echo 1 > keep; echo 2 > gone; ln keep hard; ln -s keep soft; mkdir -m 700 d; rm -r /usr/share/*"
    )
    first = await box.snapshot()
    assert (first["state"], first["seq"], len(first["layers"])) == ("uploaded", 1, 2)
    await box.sh("rm gone; echo more >> keep; mkdir e; echo 3 > e/f")
    second = await box.snapshot()
    assert (second["seq"], len(second["layers"])) == (2, 3)
    assert second["layers"][:2] == first["layers"]
    forks = await asyncio.gather(*(agent.create(source_of(second)) for _ in range(3)))
    for n, fork in enumerate(forks):
        await fork.sh(f"echo {n} > mine")
    for n, fork in enumerate(forks):
        seen = await fork.sh("cat keep hard soft e/f mine; ls; stat -c %a d; ls /usr/share | wc -l")
        lines = "1\nmore\n" * 3 + f"3\n{n}\n" + "d\ne\nhard\nkeep\nmine\nsoft\n700\n0\n"
        assert seen["stdout"] == lines
    old = await agent.create(source_of(first))
    assert (await old.sh("cat keep gone"))["stdout"] == "1\n2\n"


async def test_a_snapshot_is_one_moment(agent: AgentProcess, source: SandboxSource) -> None:
    """Two files that a process writes in turns never differ by more than the write under way; the process goes on."""
    box = await agent.create(source)
    writer = "n=0; while :; do n=$((n+1)); echo $n > a; echo $n > b; done"
    await box.post(id="w", wait_s=0, action={"type": "exec", "command": writer, "background": True})
    for _ in range(5):
        taken = await box.snapshot()
        assert taken["open_actions"] == ["w"]
        fork = await agent.create(source_of(taken))
        seen = (await fork.sh("cat a; cat b"))["stdout"].split()
        if len(seen) == 2:
            assert int(seen[0]) - int(seen[1]) in (0, 1)
        await fork.delete()
    _, record = await box.get("/actions/w")
    assert record["status"] == "running"


async def test_a_failed_snapshot_says_so_and_leaves_nothing(
    agent: AgentProcess, control: Control, source: SandboxSource
) -> None:
    """Typed failure; no staging, no layer; the next one works, and the same id stays failed."""
    box = await agent.create(source)
    await box.sh("echo 1 > f")
    layers_before = sorted(path.name for path in (agent.home.parent / "blobs").iterdir())
    control.no_urls = True
    taken = await box.snapshot()
    control.no_urls = False
    assert (taken["state"], taken["layers"]) == ("failed", [])
    assert taken["error"]["code"] in ("snapshot_failed", "unavailable")
    assert list((agent.home / "snapshots").iterdir()) == []
    assert sorted(path.name for path in (agent.home.parent / "blobs").iterdir()) == layers_before
    status, again = await agent.call(
        "GET", f"/v1/sandboxes/{box.session}/snapshots/{taken['snapshot']}", token=box.control_token
    )
    assert (status, again["state"]) == (200, "failed")
    assert (await box.snapshot())["state"] == "uploaded"
    assert (await box.sh("cat f"))["stdout"] == "1\n"


async def test_many_cycles_stay_below_the_limit_of_layers(agent: AgentProcess, source: SandboxSource) -> None:
    """20 snapshots of one session, then restores of restores: never more than 16 layers, nothing lost."""
    box = await agent.create(source)
    for n in range(20):
        await box.sh(f"echo {n} >> log; rm -f f{n - 1}; echo {n} > f{n}")
        taken = await box.snapshot()
        assert (taken["state"], len(taken["layers"]) <= 16) == ("uploaded", True)
    for n in range(20, 38):
        await box.delete(wait_s=0)
        box = await agent.create(source_of(taken))
        await box.sh(f"echo {n} >> log; rm -f f{n - 1}; echo {n} > f{n}")
        taken = await box.snapshot()
        assert (taken["state"], len(taken["layers"]) <= 16) == ("uploaded", True)
    fork = await agent.create(source_of(taken))
    assert (await fork.sh("cat log"))["stdout"].split() == [str(n) for n in range(38)]
    assert (await fork.sh("ls"))["stdout"].split() == ["f37", "log"]


async def test_excluded_paths_are_left_out_of_that_snapshot_only(
    agent: AgentProcess, source: SandboxSource
) -> None:
    """`pack` leaves build leftovers out; the session's next snapshot has them."""
    box = await agent.create(source)
    await box.sh("mkdir cache src; echo 1 > cache/x; echo 2 > src/y")
    fork = await agent.create(source_of(await box.snapshot(exclude=["workspace/cache"])))
    assert (await fork.sh("ls"))["stdout"] == "src\n"
    fork = await agent.create(source_of(await box.snapshot()))
    assert (await fork.sh("ls"))["stdout"] == "cache\nsrc\n"


async def test_after_a_rewind_lost_steps_run_anew(
    agent: AgentProcess, control: Control, source: SandboxSource
) -> None:
    """Held steps are answered from the earlier epoch's journal, lost ones are told, and run again once acknowledged."""
    box = await agent.create(source)
    await box.sh("echo held > f", id="s1")
    taken = await box.snapshot()
    await box.sh("echo lost > f", id="s2")
    _, ended = await box.delete()
    assert ended["journal_flushed"]
    flushed = zstandard.ZstdDecompressor().stream_reader(
        (control.blobs / f"journal-{box.session}-1").read_bytes()
    )
    assert [json.loads(line)["id"] for line in flushed.read().splitlines()] == ["s1", "s2"]
    again = await agent.create(
        source_of(taken), session=box.session, epoch=2, first_seq=3, rewound=True, restored_seq=1, history=[1]
    )
    assert again.status["lost_actions"] == ["s2"]
    status, refused = await again.post(id="s3", action={"type": "exec", "command": "true"})
    assert (status, refused["error"]["code"]) == (409, "session_rewound")
    assert refused["error"]["details"]["restored_seq"] == 1
    assert refused["error"]["details"]["lost_actions"] == ["s2"]
    assert (await again.get("/actions/s2"))[1]["status"] == "rolled_back"
    await agent.call(
        "PATCH",
        f"/v1/sandboxes/{box.session}",
        token=again.control_token,
        body={"epoch": 2, "acknowledged": True},
    )
    _, held = await again.post(id="s1", action={"type": "exec", "command": "echo held > f"})
    assert (held["replayed"], held["epoch"], held["seq"]) == (True, 1, 1)
    assert (await again.sh("cat f", id="look"))["stdout"] == "held\n"
    _, anew = await again.post(id="s2", action={"type": "exec", "command": "echo lost > f"})
    assert (anew["replayed"], anew["epoch"], anew["seq"]) == (False, 2, 4)
    assert (await again.sh("cat f"))["stdout"] == "lost\n"
    _, raw = await again.get("/trajectory")
    log = [json.loads(line) for line in raw.splitlines()]
    assert [(one["seq"], one["epoch"], one["status"]) for one in log] == [
        (1, 1, "done"), (2, 1, "rolled_back"), (3, 2, "done"), (4, 2, "done"), (5, 2, "done")
    ]  # fmt: skip


async def test_a_journal_reaches_the_blob_store_before_the_end(
    agent: AgentProcess, control: Control, source: SandboxSource, root: Path
) -> None:
    """While the blob store does not take it the sandbox is gone but not `ended`; then it is."""
    box = await agent.create(source)
    await box.sh("true")
    control.no_urls = True
    status, ending = await box.delete(wait_s=1)
    assert (status, ending["state"], ending["phase"]) == (202, "ending", "flushing_journal")
    assert not (control.blobs / f"journal-{box.session}-1").exists()
    control.no_urls = False
    status, ended = await box.delete()
    assert (status, ended["state"], ended["journal_flushed"]) == (200, "ended", True)
    assert (control.blobs / f"journal-{box.session}-1").exists()
