"""The capacity port's promises, on every adapter; and hosts as real processes of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from provisioner.capacity.fake import FakeCapacity
from provisioner.capacity.local import LocalCapacity
from provisioner.capacity.port import Capacity, CapacityUnavailable, HostStart, NoMoreHosts
from provisioner.capacity.processes import MARK, ProcessName, boot_id, is_alive, marked, name_of
from provisioner.clock import SystemClock
from shoal.contract.base import HostId

# A host that says when it is up, has a child in the same session, and ends in its own time when told to.
HOST = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def end(*_):
    child.kill(); child.wait(); sys.exit(0)
if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, end)
open(sys.argv[1] + "/up", "w").close()
while True:
    time.sleep(600)
"""


ASKED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def command(start: HostStart, home: Path) -> list[str]:
    return [sys.executable, "-c", HOST, str(home), start.join_token]


def local(root: Path, **about: object) -> LocalCapacity:
    options: dict[str, object] = {"command": command, "clock": SystemClock(), "max_hosts": 3, "stop_s": 10.0}
    return LocalCapacity(root, **(options | about))  # type: ignore[arg-type]


ADAPTERS: dict[str, Callable[[Path], Capacity]] = {
    "fake": lambda path: FakeCapacity(SystemClock(), limit=3),
    "local": lambda path: local(path / "hosts"),
}


@pytest.fixture(params=sorted(ADAPTERS))
async def capacity(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Capacity]:
    opened = ADAPTERS[request.param](tmp_path)
    yield opened
    await opened.stop([instance.id for instance in await opened.instances()])
    await opened.close()


def start(n: int) -> HostStart:
    return HostStart(host=HostId(f"hst_{n}"), pool="default", join_token=f"hst_{n}.secret", asked_at=ASKED_AT)


async def test_hosts_come_and_go(capacity: Capacity) -> None:
    """A started host is there and alive until it is stopped; stopping twice, or what is not there, is no failure."""
    assert await capacity.instances() == []
    one, two = await capacity.start([start(1), start(2)])
    assert (one.host, two.host) == ("hst_1", "hst_2")
    assert one.alive
    assert {instance.host for instance in await capacity.instances()} == {"hst_1", "hst_2"}
    await capacity.stop([one.id, "never"])
    await capacity.stop([one.id])
    assert [instance.host for instance in await capacity.instances()] == ["hst_2"]


async def test_starting_again_starts_nothing(capacity: Capacity) -> None:
    """A host that was started is answered as it is."""
    (first,) = await capacity.start([start(1)])
    (again,) = await capacity.start([start(1)])
    assert again.id == first.id
    assert again.started_at == first.started_at
    assert len(await capacity.instances()) == 1


async def test_the_limit_is_typed(capacity: Capacity) -> None:
    """Over the limit is NoMoreHosts; those that were started are there."""
    with pytest.raises(NoMoreHosts):
        await capacity.start([start(n) for n in range(5)])
    assert len(await capacity.instances()) == 3


async def up(home: Path) -> None:
    for _ in range(500):
        if (home / "up").exists():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the host did not come up")


async def test_stop_leaves_nothing(tmp_path: Path) -> None:
    """After a stop no process of the host runs, its children neither, and its directory is gone."""
    capacity = local(tmp_path)
    (instance,) = await capacity.start([start(1)])
    await up(capacity.home("hst_1"))
    assert len(marked("hst_1")) == 2
    await capacity.stop([instance.id])
    assert marked("hst_1") == []
    assert list(tmp_path.iterdir()) == []


async def test_a_stubborn_host_is_killed_with_its_children(tmp_path: Path) -> None:
    """A host that ignores SIGTERM is killed after its time, all that carries its mark with it, and cleaned up after."""
    cleaned = tmp_path / "cleaned"

    def cleanup(host: HostId, home: Path) -> list[str]:
        assert home.exists()
        return ["touch", str(cleaned)]

    capacity = local(
        tmp_path / "hosts",
        stop_s=0.2,
        cleanup=cleanup,
        environment=lambda start, home: {**os.environ, "STUBBORN": "1"},
    )
    (instance,) = await capacity.start([start(1)])
    await up(capacity.home("hst_1"))
    await capacity.stop([instance.id])
    assert marked("hst_1") == []
    assert cleaned.exists()


async def test_a_failed_cleanup_is_tried_again(tmp_path: Path) -> None:
    """A host whose cleaning failed stays known, as dead; the next stop cleans again."""
    flag = tmp_path / "ok"
    capacity = local(tmp_path / "hosts", cleanup=lambda host, home: ["test", "-e", str(flag)])
    (instance,) = await capacity.start([start(1)])
    await up(capacity.home("hst_1"))
    with pytest.raises(CapacityUnavailable):
        await capacity.stop([instance.id])
    (left,) = await capacity.instances()
    assert not left.alive
    flag.touch()
    await capacity.stop([instance.id])
    assert await capacity.instances() == []


async def test_another_control_plane_finds_the_hosts(tmp_path: Path) -> None:
    """Hosts outlive the driver: the next one knows them, alive, and can stop them."""
    first = local(tmp_path)
    (instance,) = await first.start([start(1)])
    await up(first.home("hst_1"))
    await first.close()
    second = local(tmp_path)
    (found,) = await second.instances()
    assert found == instance
    await second.stop([found.id])
    assert marked("hst_1") == []


async def test_a_start_cut_off_before_its_pid_was_written_is_found(tmp_path: Path) -> None:
    """A driver that dies between the process's start and its note of it loses nothing."""
    first = local(tmp_path)
    await first.start([start(1)])
    await up(first.home("hst_1"))
    path = tmp_path / "hst_1" / "instance.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "process": None}))
    (found,) = await local(tmp_path).instances()
    assert found.alive
    assert json.loads(path.read_text())["process"] == about["process"]
    await first.stop([found.id])
    assert marked("hst_1") == []


async def test_a_dead_host_says_its_last_words(tmp_path: Path) -> None:
    """An agent that ended by itself is not alive, and its log's last line says why."""
    capacity = local(
        tmp_path,
        command=lambda start, home: [sys.executable, "-c", "raise SystemExit('no runc on this machine')"],
    )
    (instance,) = await capacity.start([start(1)])
    for _ in range(500):
        (instance,) = await capacity.instances()
        if not instance.alive:
            break
        await asyncio.sleep(0.02)
    assert not instance.alive
    assert "no runc on this machine" in (instance.detail or "")
    await capacity.stop([instance.id])


async def test_a_program_that_is_not_there_is_typed(tmp_path: Path) -> None:
    """A command that cannot be started is an error of its own, and leaves nothing."""
    capacity = local(tmp_path, command=lambda start, home: ["/nonexistent/agent"])
    with pytest.raises(CapacityUnavailable):
        await capacity.start([start(1)])
    assert await capacity.instances() == []


async def test_a_pid_is_never_mistaken(tmp_path: Path) -> None:
    """A pid that now belongs to another process, or to another boot, is not the host; stopping leaves it alone."""
    capacity = local(tmp_path)
    (instance,) = await capacity.start([start(1)])
    await up(capacity.home("hst_1"))
    own = name_of(os.getpid())
    assert own is not None
    path = tmp_path / "hst_1" / "instance.json"
    about = json.loads(path.read_text())
    for other in (
        {"pid": own.pid, "started": own.started - 1, "boot": own.boot},
        {"pid": own.pid, "started": own.started, "boot": "another"},
    ):
        path.write_text(json.dumps({**about, "process": other}))
        (seen,) = await capacity.instances()
        assert not seen.alive
    await capacity.stop([instance.id])
    assert marked("hst_1") == []
    assert is_alive(own)


async def test_the_environment_carries_the_mark(tmp_path: Path) -> None:
    """All of a host's processes are found by the mark in their environment; nobody else's are."""
    capacity = local(tmp_path)
    (instance,) = await capacity.start([start(1)])
    await up(capacity.home("hst_1"))
    names = marked("hst_1")
    assert all(isinstance(name, ProcessName) and name.boot == boot_id() for name in names)
    environment = Path(f"/proc/{names[0].pid}/environ").read_bytes()
    assert f"{MARK}=hst_1".encode() in environment
    assert marked("hst_") == []
    os.kill(names[0].pid, signal.SIGKILL)
    await capacity.stop([instance.id])
    assert marked("hst_1") == []
