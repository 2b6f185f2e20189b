"""The capacity port's promises, on every adapter; and hosts as real processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from provisioner.aws.clients import AwsClients
from provisioner.capacity.batch import BatchCapacity
from provisioner.capacity.ecs import EcsCapacity
from provisioner.capacity.fake import FakeCapacity
from provisioner.capacity.local import LocalCapacity
from provisioner.capacity.port import (
    Capacity,
    CapacityUnavailable,
    HostStart,
    Instance,
    NoMoreHosts,
    Settles,
)
from provisioner.capacity.processes import MARK, ProcessName, boot_id, is_alive, marked, name_of
from provisioner.clock import SystemClock
from shoal.contract.base import HostId
from tests.aws_capacity import BatchApi, EcsWorld, Hostile, QuickClock, client_error
from tests.emulators import aws_clients

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


SEED = int(os.environ.get("SHOAL_TEST_SEED", "3"))
_TRIES = 60
ASKED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def command(start: HostStart, home: Path) -> list[str]:
    return [sys.executable, "-c", HOST, str(home), start.join_token]


def local(root: Path, **about: object) -> LocalCapacity:
    options: dict[str, object] = {"command": command, "clock": SystemClock(), "max_hosts": 3, "stop_s": 10.0}
    return LocalCapacity(root, **(options | about))  # type: ignore[arg-type]


class Bench:
    """A driver under test, and the world around it."""

    #: How many hosts there may be at once; None: the driver knows no limit.
    limit: int | None = 3

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity

    async def step(self) -> None:
        """Time passes, and the provider does what it is asked for."""

    async def kill(self, instance: Instance) -> None:
        """A host dies by itself."""
        raise NotImplementedError

    async def close(self) -> None:
        """All is stopped: nothing may be left."""

    async def up(self, *starts: HostStart) -> list[Instance]:
        """Ask until all are there, as the reconciler does."""
        for _ in range(_TRIES):
            try:
                found = await self.capacity.start(starts)
            except CapacityUnavailable:
                found = []
            if len(found) == len(starts):
                return found
            await self.step()
        raise AssertionError("the hosts did not come up")

    async def down(self, *instances: str) -> None:
        """Ask until none of them is there."""
        for _ in range(_TRIES):
            try:
                await self.capacity.stop(instances)
                if not {each.id for each in await self.capacity.instances()} & set(instances):
                    return
            except CapacityUnavailable:
                pass
            await self.step()
        raise AssertionError("the hosts did not end")

    async def there(self) -> list[Instance]:
        """All that exist."""
        for _ in range(_TRIES):
            try:
                return await self.capacity.instances()
            except CapacityUnavailable:
                continue
        raise AssertionError("no answer")


class FakeBench(Bench):
    async def kill(self, instance: Instance) -> None:
        assert isinstance(self.capacity, FakeCapacity)
        self.capacity.kill(instance.id)


class LocalBench(Bench):
    def __init__(self, root: Path) -> None:
        super().__init__(local(root))

    async def step(self) -> None:
        await asyncio.sleep(0.02)

    async def kill(self, instance: Instance) -> None:
        assert isinstance(self.capacity, LocalCapacity)
        await up(self.capacity.home(instance.host))
        for process in marked(instance.host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


class EcsBench(Bench):
    def __init__(self, world: EcsWorld, clients: Hostile | AwsClients, clock: QuickClock) -> None:
        super().__init__(EcsCapacity(clients, [world.pool], clock=clock, chance=random.Random(1)))  # type: ignore[arg-type]
        self.world, self.clock = world, clock

    async def step(self) -> None:
        self.clock.tick(70)
        await self.world.join()

    async def kill(self, instance: Instance) -> None:
        (task,) = [task for task in await self.world.tasks() if task["startedBy"] == instance.host]
        await self.world.lose(task["group"].rpartition(":")[2])

    async def close(self) -> None:
        assert isinstance(self.capacity, Settles)
        for _ in range(_TRIES):
            group = await self.world.group()
            if not group["Instances"] and group["DesiredCapacity"] == 0:
                return
            with contextlib.suppress(CapacityUnavailable):
                await self.capacity.settle(())
            await self.step()
        raise AssertionError(f"instances are left: {group}")


class BatchBench(Bench):
    limit = None

    def __init__(self, api: BatchApi, clients: Hostile | BatchApi, clock: QuickClock) -> None:
        super().__init__(BatchCapacity(clients, [api.pool], clock=clock, chance=random.Random(1)))  # type: ignore[arg-type]
        self.api, self.clock = api, clock

    async def step(self) -> None:
        self.clock.tick(70)
        self.api.step()

    async def kill(self, instance: Instance) -> None:
        self.api.move(instance.id, "FAILED", statusReason="Host EC2 (instance i-1) terminated.")

    async def close(self) -> None:
        left = {id for id, job in self.api.jobs.items() if job["status"] not in ("SUCCEEDED", "FAILED")}
        assert not left


def hostile(inner: object, seed: int) -> Hostile:
    """Clients that throttle, lose answers and answer what was so before, each now and then."""
    clients, chance = Hostile(inner), random.Random(seed)
    clients.fail = lambda operation: (
        client_error("ThrottlingException", "Rate exceeded") if chance.random() < 0.15 else None
    )
    clients.lose = lambda operation: chance.random() < 0.15
    clients.stale = lambda operation: chance.random() < 0.15
    return clients


BENCHES = ("fake", "local", "batch", "ecs", "batch in bad times", "ecs in bad times")


@pytest.fixture(params=BENCHES)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    kind, _, bad = request.param.partition(" ")
    clock = QuickClock()
    clients: AwsClients | None = None
    opened: Bench
    if kind == "fake":
        opened = FakeBench(FakeCapacity(SystemClock(), limit=3))
    elif kind == "local":
        opened = LocalBench(tmp_path / "hosts")
    elif kind == "batch":
        api = BatchApi(clock)
        opened = BatchBench(api, hostile(api, SEED) if bad else api, clock)
    else:
        url = request.getfixturevalue("moto")
        clients = aws_clients(url)
        world = await EcsWorld(url, clients).open()
        opened = EcsBench(world, hostile(clients, SEED) if bad else clients, clock)
    try:
        yield opened
        await opened.down(*[instance.id for instance in await opened.there()])
        await opened.close()
        await opened.capacity.close()
    finally:
        if clients is not None:
            await clients.close()


def start(n: int) -> HostStart:
    return HostStart(host=HostId(f"hst_{n}"), pool="default", join_token=f"hst_{n}.secret", asked_at=ASKED_AT)


async def test_hosts_come_and_go(bench: Bench) -> None:
    """A host that is asked for until it is there is there, and alive, until it is stopped; stopping twice, or what is
    not there, is no failure."""
    assert await bench.there() == []
    one, two = await bench.up(start(1), start(2))
    assert (one.host, two.host) == ("hst_1", "hst_2")
    assert one.alive
    assert one.pool == "default"
    assert {instance.host for instance in await bench.there()} == {"hst_1", "hst_2"}
    await bench.down(one.id, "never")
    await bench.down(one.id)
    assert [instance.host for instance in await bench.there()] == ["hst_2"]


async def test_starting_again_starts_nothing(bench: Bench) -> None:
    """A host that was started is answered as it is, alone or among others."""
    (first,) = await bench.up(start(1))
    (again,) = await bench.up(start(1))
    assert again.id == first.id
    assert again.host == first.host
    both = await bench.up(start(2), start(1))
    assert [instance.host for instance in both] == ["hst_2", "hst_1"]
    assert both[1].id == first.id
    assert len(await bench.there()) == 2


async def test_the_limit_is_typed(bench: Bench) -> None:
    """Over the limit is NoMoreHosts, which says who is refused; those that were started are there."""
    if bench.limit is None:
        pytest.skip("this driver's provider queues what it has no room for")
    refused: frozenset[HostId] | None = None
    for _ in range(_TRIES):
        try:
            await bench.capacity.start([start(n) for n in range(5)])
        except NoMoreHosts as error:
            refused = error.refused
            if len(await bench.there()) == bench.limit:
                break
        except CapacityUnavailable:
            pass
        await bench.step()
    there = {instance.host for instance in await bench.there()}
    assert len(there) == bench.limit
    assert refused is None or refused == {start(n).host for n in range(5)} - there


async def test_a_dead_host_is_told_until_it_is_stopped(bench: Bench) -> None:
    """A host that dies by itself is not alive, with a reason, and is there until somebody stops it; others live on."""
    one, _ = await bench.up(start(1), start(2))
    await bench.kill(one)
    await bench.step()
    for _ in range(_TRIES):
        (seen,) = [instance for instance in await bench.there() if instance.host == "hst_1"]
        if not seen.alive:
            break
        await bench.step()
    assert not seen.alive
    assert seen.detail
    (other,) = [instance for instance in await bench.there() if instance.host == "hst_2"]
    assert other.alive
    await bench.down(seen.id)
    assert [instance.host for instance in await bench.there()] == ["hst_2"]


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


async def test_a_host_that_does_not_come_up_says_what_it_complains_of(tmp_path: Path) -> None:
    """An agent that fails while its holder keeps starting it is alive; what it says last is told all the same."""
    program = (
        "import sys, time; print('no user namespaces here', file=sys.stderr, flush=True); "
        "print('holder: the agent ended with 1; starting it again', file=sys.stderr, flush=True); time.sleep(600)"
    )
    capacity = local(tmp_path, command=lambda start, home: [sys.executable, "-c", program])
    (instance,) = await capacity.start([start(1)])
    for _ in range(500):
        (instance,) = await capacity.instances()
        if "user namespaces" in (instance.detail or ""):
            break
        await asyncio.sleep(0.02)
    assert instance.alive
    assert "no user namespaces here" in (instance.detail or "")
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
