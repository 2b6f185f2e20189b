"""The reconciler of the lean model: looks at its records, asks the real planner, does what it says by the real driver.

The order of things is that of `observe` and `executor`: machines are asked first; records are written before a driver
is asked; what was ordered and did not come is asked for again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from datetime import timedelta

from provisioner.capacity.port import CapacityError, HostStart, Instance
from provisioner.model import PoolState
from provisioner.observe import policy_of
from provisioner.placement import HostView, Room
from provisioner.plan import HostFacts, InstanceFacts, Plan, Recent, View, Waiting, Wanted
from provisioner.planner import plan
from provisioner.settings import ProvisionerSettings
from provisioner.simulate.fleet import SUBSTRATES, LeanHost, LeanSession
from provisioner.simulate.lean import LeanWorld
from provisioner.simulate.loop import START
from provisioner.simulate.scenario import PrepareModel
from shoal.contract.base import HostId
from shoal.contract.states import HostState

#: As in `provisioner.reconcile`.
_AT_LEAST_S = 0.1
_CHORES_S = 15.0
_BUCKETS = 30
_NEVER = START + timedelta(days=365)
_OVER = (HostState.LOST, HostState.GONE)


class Control:
    """Ticks until it is cancelled."""

    def __init__(self, world: LeanWorld) -> None:
        self._world = world
        scenario = world.scenario
        self._settings = ProvisionerSettings(
            pools=(scenario.pool,), reconcile_s=scenario.reconcile_s, host_start_s=scenario.host_start_s
        )
        self._policy = policy_of(self._settings)
        self._ids = itertools.count(1)
        self._stopping: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._settled_s = 0.0

    async def run(self) -> None:
        """Tick, when woken and now and then."""
        world = self._world
        while True:
            began_s = world.loop.time()
            try:
                await self.tick()
            except CapacityError:
                world.measures.tick_failures += 1
            world.measures.ticks += 1
            world.measures.tick_s.append(world.loop.time() - began_s)
            await asyncio.sleep(_AT_LEAST_S)
            try:
                await asyncio.wait_for(world.wake_reconciler.wait(), self._settings.reconcile_s)
            except TimeoutError:
                pass
            world.wake_reconciler.clear()

    async def tick(self) -> None:
        """Observe, plan, execute once."""
        world = self._world
        instances = await world.capacity.instances()
        decided = plan(self._view(instances), self._policy, world.clock.now())
        if not decided.empty:
            await self._execute(decided)
        if world.loop.time() - self._settled_s >= _CHORES_S:
            self._settled_s = world.loop.time()
            coming = {host.id for host in world.hosts.values() if host.state is HostState.STARTING}
            await world.capacity.settle(coming)

    # -- what is ---------------------------------------------------------------------------------------------------

    def _view(self, instances: Sequence[Instance]) -> View:
        world = self._world
        by_host = {
            each.host: InstanceFacts(id=each.id, host=each.host, alive=each.alive, detail=each.detail)
            for each in instances
        }
        return View(
            hosts=tuple(self._facts(host, by_host.get(host.id)) for host in world.hosts.values()),
            orphans=tuple(facts for id, facts in by_host.items() if id not in world.hosts),
            waiting=tuple(_waiting(session) for session in world.queue.values()),
            wanted=tuple(self._wanted()),
            recent=tuple(self._recent()),
            pools={world.scenario.pool.name: world.state},
        )

    def _facts(self, host: LeanHost, instance: InstanceFacts | None) -> HostFacts:
        view = host.view or HostView(
            id=host.id,
            pool=self._world.scenario.pool.name,
            open=False,
            substrates=SUBSTRATES,
            capacity=Room() if host.registered_at is None else host.capacity,
            held=Room(),
        )
        return HostFacts(
            view=view,
            state=host.state,
            created_at=host.created_at,
            registered_at=host.registered_at,
            heard_at=host.heard_at,
            busy_at=host.busy_at,
            instance=instance,
            sessions=host.told_sessions,
            sandboxes=host.told_sandboxes,
            drain=host.drain,
            draining=host.draining,
            levels=host.levels,
        )

    def _wanted(self) -> list[Wanted]:
        world = self._world
        now_s = world.loop.time()
        found: list[Wanted] = []
        for number, prepare in enumerate(world.scenario.prepare):
            expires_s = max(prepare.by_s or 0.0, prepare.at_s) + prepare.ttl_s
            if prepare.at_s <= now_s < expires_s:
                kind = world.kinds[prepare.load]
                found.append(
                    Wanted(
                        id=f"p{number}",
                        pool=kind.ask.pool,
                        key=kind.key,
                        source=kind.source,
                        room=kind.ask.room,
                        count=prepare.sandboxes,
                        expires_at=START + timedelta(seconds=expires_s),
                        by=START + timedelta(seconds=prepare.by_s) if prepare.by_s is not None else None,
                        claimed=self._claimed(prepare),
                    )
                )
        return found

    def _claimed(self, prepare: PrepareModel) -> int:
        world = self._world
        warm = world.kinds[prepare.load].ask.warm
        return sum(
            session.confirmed and session.kind.ask.warm == warm and (session.ran_s or 0.0) >= prepare.at_s
            for host in world.hosts.values()
            for session in host.sessions
        )

    def _recent(self) -> list[Recent]:
        world = self._world
        oldest = int(world.loop.time()) // 10 - _BUCKETS
        found: list[Recent] = []
        for kind in {kind.ask.warm: kind for kind in world.kinds}.values():
            buckets = world.asked.get(kind.ask.warm)
            if buckets:
                recent = [count for bucket, count in buckets.items() if bucket > oldest]
                found.append(
                    Recent(
                        pool=kind.ask.pool,
                        key=kind.key,
                        source=kind.source,
                        room=kind.ask.room,
                        last_at=START + timedelta(seconds=10 * max(buckets)),
                        busiest=max(recent, default=0),
                    )
                )
        return found

    # -- what to do ------------------------------------------------------------------------------------------------

    async def _execute(self, decided: Plan) -> None:
        world = self._world
        for state in decided.pools:
            world.state = state
        for lost in decided.lose:
            world.lose(world.hosts[lost.host])
        for id in decided.drain:
            self._drain(world.hosts[id], drain=True)
        for id in decided.undrain:
            self._drain(world.hosts[id], drain=False)
        for levels in decided.levels:
            world.hosts[levels.host].levels = levels.levels
            world.measures.orders_written += 1
        for pool in dict.fromkeys((*decided.resume, *decided.start)):
            await self._start(pool, decided.start.get(pool, 0), decided.resume.get(pool, ()))
        stops = [stop for stop in decided.stop if stop.instance not in self._stopping]
        if stops:
            task = asyncio.create_task(self._stop([(stop.instance, stop.host) for stop in stops]))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        for id in decided.forget:
            world.hosts.pop(id, None)
            world.write(id)

    def _drain(self, host: LeanHost, *, drain: bool) -> None:
        host.state = HostState.DRAINING if drain else HostState.READY
        host.drain = drain
        host.show(self._world.scenario.pool.name)
        self._world.write(host.id)

    async def _start(self, pool: str, count: int, resume: Sequence[HostId]) -> None:
        world = self._world
        hosts = [world.hosts[id] for id in resume if id in world.hosts]
        for _ in range(count):
            id = HostId(f"hst_{next(self._ids):06d}")
            host = LeanHost(id=id, capacity=world.capacity_room, created_at=world.clock.now())
            world.hosts[id] = host
            hosts.append(host)
        starts = [
            HostStart(host=host.id, pool=pool, join_token=host.id, asked_at=host.created_at) for host in hosts
        ]
        if not starts:
            return
        try:
            await world.capacity.start(starts)
        except CapacityError as error:
            there = {instance.host for instance in await world.capacity.instances()}
            refused = getattr(error, "refused", None)
            for host in hosts:
                if host.id not in there and refused is not None and host.id in refused:
                    world.hosts.pop(host.id, None)
            world.state = _noted(world.state, error.reason, world)

    async def _stop(self, stops: list[tuple[str, HostId]]) -> None:
        world = self._world
        names = [instance for instance, _ in stops]
        self._stopping.update(names)
        try:
            await world.capacity.stop(names)
        except CapacityError:
            world.measures.tick_failures += 1
            return
        finally:
            self._stopping.difference_update(names)
        for _, id in stops:
            host = world.hosts.get(id)
            if host is not None and host.state not in _OVER:
                world.lose(host)
                host.state = HostState.GONE
        world.wake_reconciler.set()


def _waiting(session: LeanSession) -> Waiting:
    """Its entry in the queue, made once: the planner looks at tens of thousands at every tick."""
    if session.entry is None:
        ask = session.kind.ask
        session.entry = Waiting(
            session=session.id,
            pool=ask.pool,
            substrate=ask.substrate,
            room=ask.room,
            warm=ask.warm,
            expires_at=_NEVER,
        )
    return session.entry


def _noted(state: PoolState, reason: str, world: LeanWorld) -> PoolState:
    from provisioner.model import replace

    return replace(state, failures=state.failures + 1, last_failure_at=world.clock.now(), last_failure=reason)
