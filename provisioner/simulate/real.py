"""The use cases themselves in virtual time: what the lean model is held against, for as many sessions as that bears.

Everything of the control plane is real (`build_services`): creating, placing, queue, heartbeats, reconciler, driver.
Store, blobs and agents are the fakes that pass the ports' contract suites, with the scenario's latencies before them;
the store counts request units per partition as DynamoDB would.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from provisioner.agents.fake import FakeAgents, FakeHost
from provisioner.agents.port import HostRef
from provisioner.auth import DEFAULT_TENANT, Principal
from provisioner.aws.clients import AwsClients
from provisioner.aws.settings import EcsPool
from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.capacity.ecs import EcsCapacity
from provisioner.manifests import digest_of
from provisioner.route_tokens import RouteSigner
from provisioner.services import Services, build_services
from provisioner.settings import ProvisionerSettings
from provisioner.simulate import loop
from provisioner.simulate.aws import SimulatedAws
from provisioner.simulate.loop import LoopClock
from provisioner.simulate.measures import percentiles
from provisioner.simulate.scenario import Arrival, Scenario, arrivals
from provisioner.store.fake import FakeStore
from provisioner.store.port import StoreError
from provisioner.store.units import Consumed, MeteredStore
from shoal.contract.base import HostId, KeyId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Register, SandboxStart, SandboxStatus
from shoal.contract.images import ImageManifest, ImagePut, Layer, LayersSource
from shoal.contract.sessions import ResourcesAsked, SessionCreate
from shoal.contract.states import Scope, SessionState, Substrate

_WHO = Principal(tenant=DEFAULT_TENANT, key=KeyId("key_simulated"), scopes=frozenset({Scope.ADMIN}))
_WAIT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """What came of it.

    Attributes:
        waits_s: Seconds from the request until it ran, of every session that did.
        refused: Starts that hosts refused.
        spreads: (moment, largest and mean number of sessions on a host, hosts).
        host_seconds: What EC2 bills.
        consumed: Request units of DynamoDB.
        hottest: The most write and read units that one partition key bore within a second, and its name.
    """

    waits_s: list[float]
    hosts_started: int
    refused: int
    spreads: list[tuple[float, int, float, int]]
    host_seconds: float
    consumed: Consumed
    hottest: dict[str, tuple[str, float]]


class _SlowStore(FakeStore):
    """Every call takes its time."""

    def __init__(self, clock: Callable[[], datetime], seconds: float) -> None:
        super().__init__(clock=clock)
        self._seconds = seconds

    async def _begin(self, call: str) -> StoreError | None:
        await asyncio.sleep(self._seconds)
        return await super()._begin(call)


class _SlowAgents(FakeAgents):
    """Starts take their time; refusals are counted."""

    def __init__(self, rtt_s: float, start_s: float) -> None:
        super().__init__()
        self._rtt_s = rtt_s
        self._start_s = start_s
        self.refused = 0

    async def start(self, host: HostRef, start: SandboxStart) -> SandboxStatus:
        await asyncio.sleep(self._rtt_s)
        try:
            status = await super().start(host, start)
        except ShoalError as error:
            self.refused += error.code is ErrorCode.HOST_REFUSED
            raise
        await asyncio.sleep(self._start_s)
        return status


class _World:
    def __init__(self, scenario: Scenario) -> None:
        running = asyncio.get_running_loop()
        self.scenario = scenario
        self.clock = LoopClock(running)
        self.chance = random.Random(f"{scenario.seed} real")
        self.store = MeteredStore(_SlowStore(self.clock.now, scenario.agent.write_s))
        self.blobs = FakeBlobs()
        self.agents = _SlowAgents(scenario.agent.rtt_s, scenario.agent.cold_s)
        self.aws = SimulatedAws(
            self.clock,
            scenario.hosts,
            random.Random(f"{scenario.seed} aws"),
            max_size=scenario.pool.max_hosts,
            started=self._started,
            ended=self._ended,
        )
        pool = EcsPool(
            pool=scenario.pool.name, cluster="c", auto_scaling_group="g", task_definition="agent:1"
        )
        self.capacity = EcsCapacity(
            cast(AwsClients, self.aws), [pool], clock=self.clock, chance=random.Random(f"{scenario.seed} ecs")
        )
        self.settings = ProvisionerSettings(
            pools=(scenario.pool,), reconcile_s=scenario.reconcile_s, host_start_s=scenario.host_start_s
        )
        self.replicas = [self._replica(n) for n in range(scenario.replicas)]
        self.spreads: list[tuple[float, int, float, int]] = []
        self.waits_s: list[float] = []
        self.hottest: dict[str, tuple[str, float]] = {"write": ("", 0.0), "read": ("", 0.0)}
        self._tasks: set[asyncio.Task[None]] = set()

    def _replica(self, number: int) -> Services:
        ids = itertools.count(1)
        return build_services(
            store=self.store,
            blobs=self.blobs,
            agents=self.agents,
            capacity=self.capacity,
            clock=self.clock,
            signer=RouteSigner(self.store, self.clock, key_life_s=86_400),
            settings=self.settings,
            replica=f"r{number}",
            ids=lambda kind: f"{kind}_{number}{next(ids):06d}",
            chance=random.Random(f"{self.scenario.seed} replica {number}"),
            reconciler_elsewhere=number > 0,
        )

    async def run(self) -> RealRun:
        first = self.replicas[0]
        await first.signer.refresh()
        await first.auth.bootstrap()
        for image in {each.image for each in self.scenario.load}:
            await self._image(first, image)
        for number, services in enumerate(self.replicas):
            await services.start(reconciles=number == 0)
        self.store.consumed = Consumed()
        self._go(self._heat())
        running = asyncio.get_running_loop()
        began_s = running.time()
        for at_s in self.scenario.spread_at_s:
            running.call_at(began_s + at_s, self._spread)
        for arrival in arrivals(self.scenario):
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - running.time()))
            self._go(self._session(arrival))
        await asyncio.sleep(max(0.0, began_s + self.scenario.duration_s - running.time()))
        end_s = running.time()
        consumed = self.store.consumed
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for services in self.replicas:
            await services.close()
        return RealRun(
            waits_s=self.waits_s,
            hosts_started=len(self.agents.hosts),
            refused=self.agents.refused,
            spreads=self.spreads,
            host_seconds=sum(
                (each.ended_s if each.ended_s is not None else end_s) - each.launched_s
                for each in self.aws.history
            ),
            consumed=consumed,
            hottest=self.hottest,
        )

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _image(self, services: Services, name: str) -> None:
        data = f"layer of {name}".encode()
        digest = digest_of(data)
        self.blobs.objects[names.layer(digest)] = data
        layer = Layer(digest=digest, diff_id=digest, size_bytes=len(data))
        manifest = ImageManifest(architecture="amd64", layers=[layer])
        await services.images.put(_WHO, name, "1", ImagePut(source=LayersSource(manifest=manifest), wait_s=0))
        await services.context.background.idle()

    async def _session(self, arrival: Arrival) -> None:
        about = self.scenario.load[arrival.load]
        services = self.chance.choice(self.replicas)
        body = SessionCreate(
            image=f"{about.image}:1",
            resources=ResourcesAsked(
                cpu_millis=about.cpu_millis, memory_mib=about.memory_mib, disk_mib=about.disk_mib
            ),
            ttl_s=86_400,
            wait_s=0,
        )
        session = (await services.sessions.create(_WHO, body)).session
        while session.state is not SessionState.RUNNING:
            session = await services.sessions.get(_WHO, session.id, wait_s=_WAIT_S)
            if session.state is SessionState.ENDED:
                return
        assert session.ready_at is not None
        self.waits_s.append((session.ready_at - session.created_at).total_seconds())
        await asyncio.sleep(arrival.hold_s)
        await services.sessions.delete(_WHO, session.id)

    # -- hosts -----------------------------------------------------------------------------------------------------

    def _started(self, id: str, token: str, instance: str) -> None:
        self._go(self._host(HostId(id), token))

    def _ended(self, id: str) -> None:
        host = self.agents.hosts.get(HostId(id))
        if host is not None:
            host.reachable = False
            host.sandboxes.clear()

    async def _host(self, id: HostId, token: str) -> None:
        shape = self.scenario.pool.host_capacity
        assert shape is not None
        host: FakeHost = self.agents.add(id, capacity=shape)
        await self.chance.choice(self.replicas).hosts.register(
            Register(
                join_token=token,
                boot_id=host.boot_id,
                address=host.address,
                capacity=shape,
                substrates=[Substrate.CONTAINER],
                version="simulated",
            )
        )
        while host.reachable:
            services = self.chance.choice(self.replicas)
            try:
                host.obey(await services.hosts.heartbeat(id, host.heartbeat(self.clock.now())))
            except (ShoalError, StoreError):
                # An agent goes on without an answer, and reports again.
                pass
            await asyncio.sleep(self.scenario.agent.heartbeat_s)

    async def _heat(self) -> None:
        before: dict[str, dict[str, float]] = {"write": {}, "read": {}}
        while True:
            await asyncio.sleep(1.0)
            now = {
                "write": dict(self.store.consumed.writes_by_partition),
                "read": dict(self.store.consumed.reads_by_partition),
            }
            for kind, units in now.items():
                for name, count in units.items():
                    grown = count - before[kind].get(name, 0.0)
                    if grown > self.hottest[kind][1]:
                        self.hottest[kind] = (name, grown)
            before = now

    def _spread(self) -> None:
        loads = [len(host.live()) for host in self.agents.hosts.values() if host.reachable]
        if sum(loads):
            now_s = asyncio.get_running_loop().time()
            self.spreads.append((now_s, max(loads), sum(loads) / len(loads), len(loads)))


async def _run(scenario: Scenario) -> RealRun:
    return await _World(scenario).run()


def simulate_real(scenario: Scenario) -> RealRun:
    """Run it with the use cases themselves."""
    return loop.run(_run(scenario))


def real_results(scenario: Scenario) -> dict[str, Any]:
    """The same as plain data."""
    run = simulate_real(scenario)
    sessions = max(1, len(run.waits_s))
    return {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "ran": len(run.waits_s),
        "queue_s": percentiles(run.waits_s),
        "hosts_started": run.hosts_started,
        "host_hours": round(run.host_seconds / 3600, 2),
        "refused": run.refused,
        "max_over_mean": round(max((top / mean for _, top, mean, _ in run.spreads), default=0.0), 3),
        "dynamodb": {
            "write_units_per_session": round(run.consumed.write / sessions, 1),
            "read_units_per_session": round(run.consumed.read / sessions, 1),
            **{
                f"hottest_{kind}": {"partition": name, "units_per_s": round(units, 1)}
                for kind, (name, units) in run.hottest.items()
            },
        },
    }
