"""The whole provisioner over hosts from ECS and from Batch: from zero to what is needed and back, after losses too."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Mapping

import pytest

from provisioner.aws.clients import AwsClients
from provisioner.capacity.batch import BatchCapacity
from provisioner.capacity.ecs import EcsCapacity
from provisioner.capacity.port import Capacity
from provisioner.clock import ManualClock
from shoal.contract.base import SessionId
from shoal.contract.errors import ShoalError
from shoal.contract.host import Register
from shoal.contract.sessions import SessionCreate
from shoal.contract.states import SessionState, Substrate
from tests.aws_capacity import BatchApi, EcsWorld, Hostile, QuickClock
from tests.emulators import aws_clients
from tests.unit.provisioner.world import IMAGE, SHAPE, WHO, World, pool

_ROUNDS = 60


class Cloud:
    """A provider, and what runs on it."""

    capacity: Capacity

    async def step(self) -> None:
        """The provider does what it was asked for."""

    async def running(self) -> Mapping[str, str]:
        """The join tokens of the agents that run, by host."""
        raise NotImplementedError

    async def machines(self) -> int:
        """How many machines (or jobs) are paid for."""
        raise NotImplementedError

    async def lose_one(self) -> None:
        """A machine dies."""
        raise NotImplementedError


class Ecs(Cloud):
    def __init__(self, world: EcsWorld, clock: QuickClock) -> None:
        self.world = world
        self.clients = Hostile(world.clients)
        self.capacity = EcsCapacity(
            self.clients,  # type: ignore[arg-type]
            [world.pool],
            clock=clock,
            chance=random.Random(1),
        )

    async def step(self) -> None:
        await self.world.join()

    async def running(self) -> Mapping[str, str]:
        return {
            task["startedBy"]: task["overrides"]["containerOverrides"][0]["environment"][0]["value"]
            for task in await self.world.tasks()
        }

    async def machines(self) -> int:
        group = await self.world.group()
        return max(len(group["Instances"]), group["DesiredCapacity"])

    async def lose_one(self) -> None:
        await self.world.lose(str((await self.world.tasks())[0]["group"]).rpartition(":")[2])


class Batch(Cloud):
    def __init__(self, api: BatchApi, clock: QuickClock) -> None:
        self.api = api
        self.capacity = BatchCapacity(
            api,  # type: ignore[arg-type]
            [api.pool],
            clock=clock,
            chance=random.Random(1),
        )

    def _jobs(self) -> list[str]:
        live = ("SUBMITTED", "RUNNABLE", "RUNNING")
        return [
            id
            for id, job in self.api.jobs.items()
            if "size" not in job.get("arrayProperties", {}) and job["status"] in live
        ]

    async def step(self) -> None:
        self.api.step()

    async def running(self) -> Mapping[str, str]:
        found = {}
        for id in self._jobs():
            job = self.api.jobs[id]
            tokens = job["container"]["environment"][0]["value"].split()
            token = tokens[job.get("arrayProperties", {}).get("index", 0)]
            if job["status"] == "RUNNING":
                found[token.partition(".")[0]] = token
        return found

    async def machines(self) -> int:
        return len(self._jobs())

    async def lose_one(self) -> None:
        self.api.move(self._jobs()[0], "FAILED", statusReason="Host EC2 (instance i-1) terminated.")


class Breathing:
    """A provisioner over a cloud; each round is a few seconds of everybody's."""

    def __init__(self, cloud: Cloud, clock: QuickClock) -> None:
        self.cloud, self.clock = cloud, clock
        self.world = World()
        #: Agents that never register: how many of those to come, and who they are.
        self.mute = 0
        self.silent: set[str] = set()
        world, counter = self.world, itertools.count(1)
        world.settings = world.settings.model_copy(
            update={
                "pools": (pool(idle_to_zero_s=20, scale_in_cooldown_s=10, max_hosts=4),),
                "host_start_s": 60.0,
            }
        )
        world.services = world.replica(
            "one",
            capacity=cloud.capacity,
            ids=lambda kind: f"{kind}_{next(counter):020d}",
        )

    async def create(self, count: int) -> list[SessionId]:
        body = SessionCreate(image=IMAGE, wait_s=0, on_host_loss="restore")
        return [(await self.world.services.sessions.create(WHO, body)).session.id for _ in range(count)]

    async def round(self) -> None:
        world, services = self.world, self.world.services
        # The driver has time of its own: where it waits, nobody else does.
        self.clock.tick(5)
        await world.clock.advance(5)
        await services.reconciler.tick()
        await services.context.background.idle()
        await self.cloud.step()
        running = await self.cloud.running()
        for id, host in world.agents.hosts.items():
            if id not in running:
                host.reachable = False
                host.sandboxes.clear()
        for id, token in running.items():
            if self.mute and id not in world.agents.hosts:
                self.mute -= 1
                self.silent.add(id)
            if id not in world.agents.hosts and id not in self.silent:
                host = world.agents.add(id, capacity=SHAPE)
                await world.drive(
                    services.hosts.register(
                        Register(
                            join_token=token,
                            boot_id=host.boot_id,
                            address=host.address,
                            capacity=host.capacity,
                            substrates=[Substrate.CONTAINER],
                            version="test",
                        )
                    )
                )
        for id, host in world.agents.hosts.items():
            if host.reachable:
                try:
                    beat = host.heartbeat(world.clock.now())
                    host.obey(await world.drive(services.hosts.heartbeat(id, beat)))
                except ShoalError:
                    continue
        await world.drive(services.pump.drain())
        await world.drive(services.context.background.idle())

    async def states(self, ids: list[SessionId]) -> set[SessionState]:
        return {(await self.world.services.sessions.get(WHO, id)).state for id in ids}

    async def until_running(self, ids: list[SessionId]) -> None:
        for _ in range(_ROUNDS):
            if await self.states(ids) == {SessionState.RUNNING}:
                return
            await self.round()
        raise AssertionError(f"they do not run: {await self.states(ids)}")

    async def until_machines(self, count: int) -> None:
        for _ in range(_ROUNDS):
            if await self.cloud.machines() == count:
                return
            await self.round()
        raise AssertionError(f"{await self.cloud.machines()} machines, not {count}")


@pytest.fixture(params=["ecs", "batch"])
async def breathing(request: pytest.FixtureRequest) -> AsyncIterator[Breathing]:
    clients: AwsClients | None = None
    cloud: Cloud
    if request.param == "ecs":
        clock = QuickClock()
        url = request.getfixturevalue("moto")
        clients = aws_clients(url)
        cloud = Ecs(await EcsWorld(url, clients, max_size=4).open(), clock)
    else:
        # The planner compares Batch's times with its own, so both begin at the same one; moto's are real.
        clock = QuickClock(ManualClock().now())
        cloud = Batch(BatchApi(clock), clock)
    try:
        made = Breathing(cloud, clock)
        await made.world.open()
        yield made
    finally:
        if clients is not None:
            await clients.close()


async def test_from_zero_to_what_is_needed_and_back(breathing: Breathing) -> None:
    """Sessions for two hosts bring two machines, in one step; with the sessions the machines go, to zero."""
    assert await breathing.cloud.machines() == 0
    ids = await breathing.create(10)
    await breathing.until_running(ids)
    assert await breathing.cloud.machines() == 2
    if isinstance(breathing.cloud, Ecs):
        steps = breathing.cloud.clients.made("set_desired_capacity")
        assert [about["DesiredCapacity"] for about in steps] == [2]
    for id in ids:
        await breathing.world.drive(breathing.world.services.sessions.delete(WHO, id))
    await breathing.until_machines(0)
    assert (await breathing.world.services.counts()).hosts.get("ready", 0) == 0


async def test_a_lost_machine_is_replaced_and_nothing_is_left(breathing: Breathing) -> None:
    """A machine that dies takes no session with it that may start anew; afterwards there are as many machines as
    before, and none once nobody needs one."""
    ids = await breathing.create(10)
    await breathing.until_running(ids)
    await breathing.cloud.lose_one()
    for _ in range(3):
        await breathing.round()
    await breathing.until_running(ids)
    await breathing.until_machines(2)
    for id in ids:
        await breathing.world.drive(breathing.world.services.sessions.delete(WHO, id))
    await breathing.until_machines(0)


async def test_an_agent_that_never_registers_is_replaced_and_told(breathing: Breathing) -> None:
    """A machine runs and its agent is never heard of: who waits is told, it is ended, and another one serves."""
    breathing.mute = 1
    ids = await breathing.create(2)
    told: set[str] = set()
    for _ in range(_ROUNDS):
        await breathing.round()
        told.add((await breathing.world.services.sessions.get(WHO, ids[0])).waiting_for or "")
        if await breathing.states(ids) == {SessionState.RUNNING}:
            break
    assert any("did not register within 60 s" in why for why in told), told
    assert await breathing.states(ids) == {SessionState.RUNNING}
    await breathing.until_machines(1)
    assert breathing.silent.isdisjoint(await breathing.cloud.running())
