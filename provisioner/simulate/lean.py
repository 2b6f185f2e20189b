"""The lean model: the real planner, placement and capacity driver; sessions, agents and records as a few numbers each.

What of the use cases it keeps, in the same order and with the same constants: a create is written, then placed by the
replica that took it, unless others wait there; a refusal goes elsewhere; without room it queues and wakes the
reconciler; every replica pumps the queue, oldest first, 32 at a time, and claims an entry before it places it. What the
store would say is there at once for who reads it; a heartbeat is known to the replica that took it, and to the others
when they read again. `tests/unit/provisioner/test_simulate.py` holds it against the use cases themselves.
"""

from __future__ import annotations

import asyncio
import random
from typing import cast

from provisioner.aws.clients import AwsClients
from provisioner.aws.settings import EcsPool
from provisioner.capacity.ecs import EcsCapacity
from provisioner.model import PoolState, Source
from provisioner.placement import Ask, HostView, Own, Room, WarmName, warm_key, warm_name
from provisioner.simulate.aws import SimulatedAws
from provisioner.simulate.fleet import SUBSTRATES, Kind, LeanHost, LeanSession, Replica
from provisioner.simulate.loop import LoopClock
from provisioner.simulate.measures import Measures
from provisioner.simulate.scenario import Scenario, arrivals
from shoal.contract.base import HostId, SessionId
from shoal.contract.states import HostState, Substrate

#: Of the queue's pump (`provisioner.sessions.queue`).
_MISFITS = 50
_PUMP_S = 1.0
#: `ProvisionerSettings.start_wait_s`.
_START_WAIT_S = 2.0
_SAMPLE = 4


def kinds_of(scenario: Scenario) -> list[Kind]:
    """What the sessions of each load are."""
    found: list[Kind] = []
    for load in scenario.load:
        digest = "sha256:" + load.image.encode().hex().ljust(64, "0")[:64]
        key = warm_key(digest, Substrate.CONTAINER, load.disk_mib)
        ask = Ask(
            pool=scenario.pool.name,
            substrate=Substrate.CONTAINER,
            room=load.room,
            warm=warm_name(key),
            layers=frozenset({digest}),
        )
        found.append(Kind(ask=ask, key=key, source=Source(digest=digest, image_digest=digest)))
    return found


class LeanWorld:
    """Everything but the reconciler (`control`)."""

    def __init__(self, scenario: Scenario, policy: str = "shoal") -> None:
        loop = asyncio.get_running_loop()
        self.scenario = scenario
        self.loop = loop
        self.clock = LoopClock(loop)
        self.kinds = kinds_of(scenario)
        self.rooms: dict[WarmName, Room] = {kind.ask.warm: kind.ask.room for kind in self.kinds}
        self.capacity_room = Room.of(scenario.pool.host_capacity)
        self.hosts: dict[HostId, LeanHost] = {}
        self.queue: dict[SessionId, LeanSession] = {}
        self.state = PoolState(name=scenario.pool.name)
        self.asked: dict[WarmName, dict[int, int]] = {}
        self.wake_reconciler = asyncio.Event()
        self.measures = Measures()
        self._log: list[HostId] = []
        self._chance = random.Random(f"{scenario.seed} world")
        self.replicas = [
            Replica(random.Random(f"{scenario.seed} replica {n}"), policy, _SAMPLE)
            for n in range(scenario.replicas)
        ]
        self.aws = SimulatedAws(
            self.clock,
            scenario.hosts,
            random.Random(f"{scenario.seed} aws"),
            max_size=scenario.pool.max_hosts,
            started=self._registers,
            ended=self._dies,
        )
        pool = EcsPool(
            pool=scenario.pool.name, cluster="c", auto_scaling_group="g", task_definition="agent:1"
        )
        self.capacity = EcsCapacity(
            cast(AwsClients, self.aws), [pool], clock=self.clock, chance=random.Random(f"{scenario.seed} ecs")
        )

    # -- the run ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let the load come, and everything happen, until the end."""
        pumps = [asyncio.create_task(self._pump(replica)) for replica in self.replicas]
        tasks = [*pumps, asyncio.create_task(self._sample())]
        for spot in self.scenario.spot:
            self.loop.call_at(spot.at_s, self._take_back, spot.share)
        for at_s in self.scenario.spread_at_s:
            self.loop.call_at(at_s, self._spread)
        for number, arrival in enumerate(arrivals(self.scenario)):
            if arrival.at_s > self.loop.time():
                await asyncio.sleep(arrival.at_s - self.loop.time())
            self._create(number, arrival.hold_s, self.kinds[arrival.load])
        await asyncio.sleep(max(0.0, self.scenario.duration_s - self.loop.time()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take_back(self, share: float) -> None:
        self.measures.spot_lost += len(self.aws.lose(share))

    def _spread(self) -> None:
        loads = [len(host.sessions) for host in self.hosts.values() if host.alive and not host.drain]
        self.measures.spread(self.loop.time(), loads)

    async def _sample(self) -> None:
        while True:
            there = sum(machine.ended_s is None for machine in self.aws.machines.values())
            ready = sum(host.state is HostState.READY for host in self.hosts.values())
            self.measures.sample(self.loop.time(), self.measures.alive, len(self.queue), there, ready)
            await asyncio.sleep(1.0)

    # -- sessions --------------------------------------------------------------------------------------------------

    def _create(self, number: int, hold_s: float, kind: Kind) -> None:
        now_s = self.loop.time()
        session = LeanSession(
            SessionId(f"s{number:07d}"), kind, hold_s, now_s, now_s < self.scenario.first_wave_s
        )
        buckets = self.asked.setdefault(kind.ask.warm, {})
        buckets[int(now_s) // 10] = buckets.get(int(now_s) // 10, 0) + 1
        replica = self._chance.choice(self.replicas)
        session.leased = not replica.blocked
        self.loop.call_later(self.scenario.agent.write_s, self._created, replica, session)

    def _created(self, replica: Replica, session: LeanSession) -> None:
        self.measures.created(self.loop.time())
        self.queue[session.id] = session
        if session.leased:
            self._place(replica, session, frozenset(), None)

    def _place(
        self,
        replica: Replica,
        session: LeanSession,
        tried: frozenset[HostId],
        pumped: asyncio.Semaphore | None,
    ) -> None:
        taken = self._take(replica, session.kind.ask, tried)
        if taken is None:
            session.leased = False
            replica.blocked = True
            self.wake_reconciler.set()
            if pumped is not None:
                pumped.release()
            return
        self._ask(replica, session, tried, pumped, *taken)

    def _take(
        self, replica: Replica, ask: Ask, tried: frozenset[HostId] = frozenset()
    ) -> tuple[HostView, Own] | None:
        self._refresh(replica)
        view = replica.choose(ask, tried)
        return None if view is None else (view, replica.memory.begin(view.id, ask.room, ask.warm))

    def _ask(
        self,
        replica: Replica,
        session: LeanSession,
        tried: frozenset[HostId],
        pumped: asyncio.Semaphore | None,
        view: HostView,
        own: Own,
    ) -> None:
        model = self.scenario.agent
        now_s = self.loop.time() + model.rtt_s / 2
        host = self.hosts.get(view.id)
        self.measures.asked += 1
        if host is None or not host.admits(session.kind.ask.room):
            self.loop.call_at(
                now_s + model.rtt_s / 2, self._refused, replica, session, tried, pumped, view, own
            )
            return
        runs_s = host.start(session.kind.ask, now_s, model)
        host.sessions[session] = None
        session.host = host
        # A start that takes longer is answered as such, and written down.
        answered_s = min(runs_s, now_s + _START_WAIT_S) + model.rtt_s / 2
        self.loop.call_at(answered_s, self._answered, replica, session, pumped, host, own, runs_s)

    def _refused(
        self,
        replica: Replica,
        session: LeanSession,
        tried: frozenset[HostId],
        pumped: asyncio.Semaphore | None,
        view: HostView,
        own: Own,
    ) -> None:
        self.measures.refused += 1
        host = self.hosts.get(view.id)
        replica.memory.turned_away(view.id, own, host.beat if host is not None else 0)
        self._place(replica, session, tried | {view.id}, pumped)

    def _answered(
        self,
        replica: Replica,
        session: LeanSession,
        pumped: asyncio.Semaphore | None,
        host: LeanHost,
        own: Own,
        runs_s: float,
    ) -> None:
        replica.memory.answered(own, host.beat)
        if session.host is not host:
            # Its host was lost meanwhile; the session waits again.
            if pumped is not None:
                pumped.release()
            return
        session.ran_s = runs_s
        self.loop.call_later(
            self.scenario.agent.write_s, self._confirmed, replica, session, pumped, host, own
        )

    def _confirmed(
        self,
        replica: Replica,
        session: LeanSession,
        pumped: asyncio.Semaphore | None,
        host: LeanHost,
        own: Own,
    ) -> None:
        if pumped is not None:
            pumped.release()
        replica.memory.confirmed(own, self.loop.time())
        if session.host is not host:
            return
        assert session.ran_s is not None
        self.queue.pop(session.id, None)
        session.confirmed = True
        host.assigned = host.assigned + session.kind.ask.room
        host.changed = True
        self.measures.ran(
            session.ran_s - session.asked_s, session.first_wave, session.restored, session.ran_s
        )
        session.ends = self.loop.call_at(session.ran_s + session.hold_s, self._ends, session)

    def _ends(self, session: LeanSession) -> None:
        host = session.host
        if host is None:
            return
        session.host = None
        del host.sessions[session]
        host.held = host.held - session.kind.ask.room
        host.assigned = host.assigned - session.kind.ask.room
        host.changed = True
        self.measures.ended()

    # -- the queue -------------------------------------------------------------------------------------------------

    async def _pump(self, replica: Replica) -> None:
        while True:
            await self._look(replica)
            try:
                await asyncio.wait_for(replica.wake.wait(), _PUMP_S)
            except TimeoutError:
                pass
            replica.wake.clear()

    async def _look(self, replica: Replica) -> None:
        entries = [session for session in self.queue.values() if not session.leased]
        misfits: set[Ask] = set()
        waiting = 0
        for session in entries:
            ask = session.kind.ask
            taken = None if ask in misfits else self._take(replica, ask)
            if taken is None:
                misfits.add(ask)
                waiting += 1
                if waiting >= _MISFITS:
                    break
                continue
            await replica.limit.acquire()
            # A read and a conditional write: whoever comes second leaves it alone.
            self.loop.call_later(2 * self.scenario.agent.write_s, self._claim, replica, session, *taken)
        if waiting:
            replica.blocked = True
            self.wake_reconciler.set()
        else:
            replica.blocked = False

    def _claim(self, replica: Replica, session: LeanSession, view: HostView, own: Own) -> None:
        if session.leased or session.id not in self.queue:
            self.measures.collided += 1
            replica.memory.refused(view.id, own)
            replica.limit.release()
            return
        session.leased = True
        self._ask(replica, session, frozenset(), replica.limit, view, own)

    # -- hosts -----------------------------------------------------------------------------------------------------

    def _refresh(self, replica: Replica) -> None:
        now_s = self.loop.time()
        if now_s - replica.read_s < self.scenario.refresh_s:
            return
        replica.read_s = now_s
        for id in dict.fromkeys(self._log[replica.read_to :]):
            host = self.hosts.get(id)
            if host is None or host.view is None:
                replica.board.drop(id)
                replica.memory.forget(id)
            else:
                replica.board.put(host.view)
                replica.memory.heard(id, host.beat)
        replica.read_to = len(self._log)

    def write(self, host: HostId) -> None:
        """A host's record has changed."""
        self._log.append(host)

    def _registers(self, id: str, token: str, instance: str) -> None:
        host = self.hosts.get(HostId(id))
        if host is None or host.state is not HostState.STARTING:
            return
        now = self.clock.now()
        host.state, host.alive = HostState.READY, True
        host.registered_at = host.heard_at = host.busy_at = now
        host.show(self.scenario.pool.name)
        self.write(host.id)
        self.measures.host_starts_s.append((now - host.created_at).total_seconds())
        replica = self._chance.choice(self.replicas)
        replica.wake.set()
        self.wake_reconciler.set()
        self.loop.call_later(self._chance.uniform(0, self.scenario.agent.heartbeat_s), self._beats, host)

    def _beats(self, host: LeanHost) -> None:
        if not host.alive or self.hosts.get(host.id) is not host:
            return
        model = self.scenario.agent
        late_s = self._chance.uniform(0, model.late_s) if model.late_s else 0.0
        host.refill(round(model.refill_per_s * model.heartbeat_s), self.rooms)
        replica = self._chance.choice(self.replicas)
        if late_s:
            self.loop.call_later(late_s, self._heard, host, replica)
        else:
            self._heard(host, replica)
        self.loop.call_later(model.heartbeat_s, self._beats, host)

    def _heard(self, host: LeanHost, replica: Replica) -> None:
        if self.hosts.get(host.id) is not host or host.state in (HostState.LOST, HostState.GONE):
            return
        changed = host.changed
        fewer = host.assigned.sandboxes < host.told_sessions
        host.report(self.clock.now(), self.scenario.pool.name)
        if host.drain and not host.draining:
            host.draining = changed = True
        elif host.draining and not host.drain:
            host.draining, changed = False, True
        if changed:
            host.show(self.scenario.pool.name)
            self.write(host.id)
            self.measures.beats_written += 1
        assert host.view is not None
        replica.board.put(host.view)
        replica.memory.heard(host.id, host.beat)
        replica.memory.counted(host.id, self.loop.time())
        if fewer:
            replica.wake.set()

    def _dies(self, id: str) -> None:
        host = self.hosts.get(HostId(id))
        if host is not None:
            host.alive = False

    def lose(self, host: LeanHost) -> None:
        """A host is declared lost: its sessions wait for another place."""
        host.state, host.alive, host.view = HostState.LOST, False, None
        self.write(host.id)
        now_s = self.loop.time()
        for session in list(host.sessions):
            if session.confirmed:
                if session.ends is not None:
                    session.hold_s = max(0.0, session.ends.when() - now_s)
                    session.ends.cancel()
                self.measures.ended()
            session.host, session.confirmed, session.leased, session.restored = None, False, False, True
            session.asked_s = now_s
            self.queue[session.id] = session
            self.measures.moved += 1
        host.sessions.clear()
        host.assigned = host.held = Room()


__all__ = ["SUBSTRATES", "LeanWorld"]
