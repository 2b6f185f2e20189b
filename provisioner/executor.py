"""Carries out a plan, step by step; it decides nothing. Every step may be repeated, and one that fails leaves the
others to be done: the next tick plans what is still missing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from provisioner import keys, roster
from provisioner.auth import hash_secret
from provisioner.capacity.port import Capacity, CapacityError, HostStart, NoMoreHosts, Settles
from provisioner.context import Context, log
from provisioner.departure import Departure
from provisioner.join_tokens import JoinTokens
from provisioner.lifecycle import HOST, move
from provisioner.model import Host, HostOrders, PoolState, dump, load, replace
from provisioner.plan import Plan, SetLevels
from provisioner.sessions import Sessions, records
from provisioner.store.port import Absent, Check, ConditionFailed, Delete, Put, VersionIs
from shoal.contract.base import HostId, SessionId
from shoal.contract.errors import ShoalError
from shoal.contract.states import EndReason, HostState


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A step that failed."""

    step: str
    reason: str


class Executor:
    """Applies plans.

    Attributes:
        fence: What must hold for hosts to be started or stopped: the lease of whoever reconciles, where several may.
    """

    def __init__(
        self, context: Context, capacity: Capacity, sessions: Sessions, departure: Departure
    ) -> None:
        self._context = context
        self._capacity = capacity
        self._sessions = sessions
        self._departure = departure
        self._tokens = JoinTokens(context.store)
        self._stopping: set[str] = set()
        self._stops: set[asyncio.Task[None]] = set()
        self.fence: tuple[Check, ...] = ()

    async def execute(self, plan: Plan) -> list[Failure]:
        """Do all of it; answers what failed."""
        failures: list[Failure] = []

        async def step(name: str, work: Awaitable[object]) -> None:
            try:
                await work
            except (ShoalError, CapacityError, ConditionFailed) as error:
                log.warning("plan.step_failed", step=name, reason=str(error))
                failures.append(Failure(step=name, reason=str(error)))

        for state in plan.pools:
            await step("pool", self._pool(state))
        for lost in plan.lose:
            await step("lose", self._departure.gone(lost.host, lost.detail))
        for host in plan.drain:
            await step("drain", self._drain(host, drain=True))
        for host in plan.undrain:
            await step("undrain", self._drain(host, drain=False))
        for levels in plan.levels:
            await step("levels", self._levels(levels))
        for pool in dict.fromkeys((*plan.resume, *plan.start)):
            await step("start", self._start(pool, plan.start.get(pool, 0), plan.resume.get(pool, ())))
        stops = [stop for stop in plan.stop if stop.instance not in self._stopping]
        if stops and not await self._holds(self.fence):
            return [*failures, Failure(step="stop", reason="the lease is another's")]
        if stops:
            for stop in stops:
                log.info("host.stopping", host_id=stop.host, reason=stop.reason)
            # Ending a host takes seconds; nothing else waits for it.
            ended = self._stop([(stop.instance, stop.host) for stop in stops], self.fence)
            task = self._context.background.start(ended, "stop hosts")
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)
        for host in plan.forget:
            await step("forget", self._departure.forget(host))
        for session in plan.expire:
            await step("expire", self._expire(session))
        for pool, id in plan.drop:
            await step("drop", self._context.store.transact([Delete(key=keys.prepare(pool, id))]))
        return failures

    async def cease(self) -> None:
        """Give up ending hosts whose end was not seen yet: whoever reconciles next finds them and plans it again.

        For a process that gives its lease back and is frozen then: thawed, it would go on ending machines that another
        may have plans for by now.
        """
        stops = list(self._stops)
        for task in stops:
            task.cancel()
        await asyncio.gather(*stops, return_exceptions=True)

    async def _pool(self, state: PoolState) -> None:
        await self._context.store.transact([Put(key=keys.pool(state.name), item=dump(state))])

    async def settle(self) -> None:
        """Let the driver give back what it holds or has ordered for nobody.

        Raises:
            CapacityError, ShoalError: Some is left; the next time tries again.
        """
        if not isinstance(self._capacity, Settles):
            return
        hosts = await roster.hosts(self._context.store)
        await self._capacity.settle({host.id for host in hosts if host.state is HostState.STARTING})

    async def _start(self, pool: str, count: int, resume: Sequence[HostId] = ()) -> None:
        """Ask for `count` new hosts, and again for those of `resume` that the driver still owes."""
        context = self._context
        starts = await self._owed(resume)
        for _ in range(count):
            id = HostId(context.ids("hst"))
            token = await self._tokens.token(id)
            host = Host(
                id=id,
                pool=pool,
                state=HostState.STARTING,
                instance="",
                created_at=context.clock.now(),
                join_hash=hash_secret(token),
            )
            # The record first: a machine without one is an orphan, and is ended.
            await context.store.transact([*roster.enlist(host), *self.fence])
            starts.append(HostStart(host=id, pool=pool, join_token=token, asked_at=host.created_at))
        if not starts:
            return
        log.info("hosts.starting", pool=pool, count=count, owed=len(starts) - count)
        try:
            await self._capacity.start(starts)
        except CapacityError as error:
            await self._give_up(starts, resume, error)
            await self._note_failure(pool, error.reason)
            raise

    async def _owed(self, hosts: Sequence[HostId]) -> list[HostStart]:
        """What the driver was asked for before, as it was."""
        starts: list[HostStart] = []
        for stored in await self._context.store.get_many([keys.host(id) for id in hosts]):
            host = load(Host, stored.item) if stored else None
            if host is None or host.state is not HostState.STARTING:
                continue
            token = await self._tokens.token(host.id)
            starts.append(HostStart(host=host.id, pool=host.pool, join_token=token, asked_at=host.created_at))
        return starts

    async def _give_up(
        self, starts: Sequence[HostStart], resumed: Sequence[HostId], error: CapacityError
    ) -> None:
        """Forget the hosts that will not come."""
        there = {instance.host for instance in await self._capacity.instances()}
        for start in starts:
            if isinstance(error, NoMoreHosts):
                refused = error.refused is None or start.host in error.refused
            else:
                # Whether it happened is not known: what was on order before stays so, until its time is over.
                refused = start.host not in resumed
            if refused and start.host not in there:
                await self._departure.forget(start.host)

    async def _note_failure(self, pool: str, reason: str) -> None:
        store = self._context.store
        stored = await store.get(keys.pool(pool))
        state = load(PoolState, stored.item) if stored else PoolState(name=pool)
        await self._pool(
            replace(
                state,
                failures=state.failures + 1,
                last_failure_at=self._context.clock.now(),
                last_failure=reason,
            )
        )

    async def _stop(self, instances: list[tuple[str, HostId]], fence: tuple[Check, ...]) -> None:
        names = [instance for instance, _ in instances]
        self._stopping.update(names)
        try:
            await self._capacity.stop(names)
        except CapacityError as error:
            log.warning("plan.step_failed", step="stop", reason=error.reason)
            return
        finally:
            self._stopping.difference_update(names)
        if not await self._holds(fence):
            return
        for _, host in instances:
            await self._departure.gone(host, "Its machine was ended.", state=HostState.GONE)
        self._context.wake_reconciler.set()

    async def _holds(self, fence: tuple[Check, ...]) -> bool:
        """Whether the lease is ours still. A check alone: whoever took over may want the machines to be ended."""
        try:
            if fence:
                await self._context.store.transact(fence)
        except ConditionFailed:
            log.warning("plan.step_failed", step="stop", reason="the lease is another's")
            return False
        return True

    async def _drain(self, id: HostId, *, drain: bool) -> None:
        context = self._context
        for _ in range(5):
            stored, ordered = await context.store.get_many([keys.host(id), keys.orders(id)])
            if stored is None:
                return
            host = load(Host, stored.item)
            wanted = HostState.DRAINING if drain else HostState.READY
            if host.state is wanted or host.state not in (HostState.DRAINING, HostState.READY):
                return
            orders = load(HostOrders, ordered.item) if ordered else HostOrders(host=id)
            new = replace(host, state=move(HOST, host.state, wanted), drain=drain)
            try:
                await context.store.transact(
                    [
                        Put(key=stored.key, item=dump(new), conditions=(VersionIs(version=stored.version),)),
                        Put(key=keys.orders(id), item=dump(replace(orders, drain=drain))),
                    ]
                )
            except ConditionFailed:
                continue
            context.fleet.stale()
            context.wake_queue.set()
            log.info("host.draining" if drain else "host.ready", host_id=id)
            return

    async def _levels(self, change: SetLevels) -> None:
        key = keys.orders(change.host)
        stored = await self._context.store.get(key)
        orders = load(HostOrders, stored.item) if stored else HostOrders(host=change.host)
        condition = VersionIs(version=stored.version) if stored else Absent()
        new = replace(orders, warm=change.levels)
        await self._context.store.transact([Put(key=key, item=dump(new), conditions=(condition,))])

    async def _expire(self, id: SessionId) -> None:
        found = await records.read(self._context.store, id)
        if found is not None and found.session.expires_at <= self._context.clock.now():
            await self._sessions.ending.end(
                found, EndReason.TTL, "Its time ended while it waited for capacity."
            )
