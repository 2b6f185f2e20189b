"""Pools: what they are, and capacity made ready before it is needed."""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import timedelta

from provisioner import keys, roster, spread
from provisioner.auth import Principal
from provisioner.context import Context
from provisioner.manifests import canonical, merge_resources
from provisioner.model import Assignment, Host, PoolState, Prepare, dump, load
from provisioner.observe import claimed, held_kinds, prepare_key, read_prepares
from provisioner.placement import warm_name
from provisioner.sessions.create import execution_off
from provisioner.settings import PoolSettings
from provisioner.store.port import Absent, ConditionFailed, Delete, Put
from shoal.contract import pools as wire
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import HostState

_GONE = frozenset({HostState.LOST, HostState.GONE})
# Inside the class, `list` is a method.
Hosts = list[Host]
Held = list[Assignment]
Errors = list[str]


class Pools:
    """What routes call."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def list(self, who: Principal) -> wire.PoolPage:
        """All pools, by name."""
        names = sorted(pool.name for pool in self._context.settings.pools)
        return wire.PoolPage(pools=[await self.get(who, name) for name in names])

    async def get(self, who: Principal, name: str) -> wire.Pool:
        """A pool now.

        Raises:
            ShoalError: NOT_FOUND.
        """
        settings = self._settings(name)
        hosts = await self._hosts(name)
        stored = await self._context.store.get(keys.pool(name))
        state = load(PoolState, stored.item) if stored else PoolState(name=name)
        pending = len(await spread.queue(self._context.store, name))
        return wire.Pool(
            name=name,
            min_hosts=settings.min_hosts,
            max_hosts=settings.max_hosts,
            hosts=dict(Counter(host.state.value for host in hosts)),
            substrates=[*settings.substrates],
            busy=sum(host.sessions for host in hosts),
            warm=sum(report.ready for host in hosts for report in host.warm),
            pending=pending,
            not_scaling=state.not_scaling,
        )

    async def prepare(
        self, who: Principal, pool: str, body: wire.Prepare, *, idempotency_key: str | None = None
    ) -> wire.Prepared:
        """Have warm sandboxes made ready; waits up to `body.wait_s`.

        Raises:
            ShoalError: NOT_FOUND for a pool that is not; IDEMPOTENCY_CONFLICT; NO_CAPACITY while execution is off;
                those of `Pins.resolve`.
        """
        context = self._context
        settings = self._settings(pool)
        if body.substrate not in settings.substrates:
            raise ShoalError(
                ErrorCode.SUBSTRATE_UNAVAILABLE, f"Pool {pool} has no {body.substrate.value} hosts."
            )
        hashed = hashlib.sha256(canonical(body.model_copy(update={"wait_s": 0.0}))).hexdigest()
        key = idempotency_key
        id = context.ids("prp") if key is None else keys.derived_id("prp", who.tenant, key)
        place = keys.prepare(pool, id)
        stored = await context.store.get(place)
        if stored is None:
            if not context.execution_enabled:
                raise execution_off()
            resolved = await context.pins.resolve(who.tenant, body.run, body.image, body.snapshot)
            now = context.clock.now()
            record = Prepare(
                id=id,
                tenant=who.tenant,
                pool=pool,
                sandboxes=body.sandboxes,
                source=resolved.source,
                resources=merge_resources(body.resources, resolved.resources),
                substrate=body.substrate,
                created_at=now,
                expires_at=max(body.by or now, now) + timedelta(seconds=body.ttl_s),
                run=body.run,
                by=body.by,
                request_hash=hashed,
            )
            try:
                await context.store.transact([Put(key=place, item=dump(record), conditions=(Absent(),))])
            except ConditionFailed as error:
                stored = error.current
            context.wake_reconciler.set()
        if stored is not None and load(Prepare, stored.item).request_hash != hashed:
            raise ShoalError(
                ErrorCode.IDEMPOTENCY_CONFLICT,
                "This idempotency key was used with another body; use another key.",
            )
        return await self.prepared(who, pool, id, wait_s=body.wait_s)

    async def prepared(self, who: Principal, pool: str, id: str, *, wait_s: float = 0.0) -> wire.Prepared:
        """How far a prepare is; `wait_s` waits for it to be done.

        Raises:
            ShoalError: NOT_FOUND, also once it has expired.
        """

        async def read() -> wire.Prepared:
            return await self._tell(await self._read(who, pool, id))

        return await self._context.waiters.until(id, read, lambda now: now.done, wait_s)

    async def prepares(self, who: Principal, pool: str) -> wire.PreparedPage:
        """The prepares of a pool that have not expired.

        Raises:
            ShoalError: NOT_FOUND for a pool that is not.
        """
        self._settings(pool)
        now = self._context.clock.now()
        found = [
            each
            for each in await read_prepares(self._context.store, pool)
            if each.tenant == who.tenant and each.expires_at > now
        ]
        return wire.PreparedPage(prepared=[await self._tell(each) for each in found])

    async def release(self, who: Principal, pool: str, id: str) -> None:
        """Give up a prepare; repeatable.

        Raises:
            ShoalError: NOT_FOUND for a pool that is not.
        """
        self._settings(pool)
        place = keys.prepare(pool, id)
        stored = await self._context.store.get(place)
        if stored is not None and load(Prepare, stored.item).tenant == who.tenant:
            await self._context.store.transact([Delete(key=place)])
            self._context.wake_reconciler.set()

    def _settings(self, name: str) -> PoolSettings:
        settings = self._context.settings.pool(name)
        if settings is None:
            raise ShoalError(ErrorCode.NOT_FOUND, f"There is no pool {name}.")
        return settings

    async def _read(self, who: Principal, pool: str, id: str) -> Prepare:
        self._settings(pool)
        stored = await self._context.store.get(keys.prepare(pool, id))
        prepare = load(Prepare, stored.item) if stored else None
        if prepare is None or prepare.tenant != who.tenant or prepare.expires_at <= self._context.clock.now():
            raise ShoalError(ErrorCode.NOT_FOUND, f"Pool {pool} has no prepare {id}.")
        return prepare

    async def _hosts(self, pool: str) -> Hosts:
        hosts = await roster.hosts(self._context.store, pool)
        return [host for host in hosts if host.state not in _GONE]

    async def _tell(self, prepare: Prepare) -> wire.Prepared:
        hosts = await self._hosts(prepare.pool)
        name = warm_name(prepare_key(prepare))
        reports = [report for host in hosts for report in host.warm if warm_name(report.key) == name]
        held: Held = await held_kinds(self._context.store, [host.id for host in hosts])
        # Sandboxes of its kind that sessions have taken since were made ready, too.
        ready = min(prepare.sandboxes, sum(report.ready for report in reports) + claimed(prepare, held))
        done = ready >= prepare.sandboxes
        waiting_for: str | None = None
        if not done:
            waiting_for = await self._missing(
                prepare, hosts, [report.error for report in reports if report.error]
            )
        return wire.Prepared(
            id=prepare.id,
            pool=prepare.pool,
            sandboxes=prepare.sandboxes,
            ready=ready,
            hosts=sum(host.state is HostState.READY for host in hosts),
            image=prepare.source.image if prepare.source.snapshot is None else None,
            snapshot=prepare.source.snapshot,
            substrate=prepare.substrate,
            run=prepare.run,
            by=prepare.by,
            expires_at=prepare.expires_at,
            done=done,
            waiting_for=waiting_for,
        )

    async def _missing(self, prepare: Prepare, hosts: Hosts, errors: Errors) -> str:
        if errors:
            return f"sandboxes do not start: {errors[0]}"
        stored = await self._context.store.get(keys.pool(prepare.pool))
        state = load(PoolState, stored.item) if stored else None
        if state is not None and state.not_scaling:
            return state.not_scaling
        if not any(host.state is HostState.READY for host in hosts):
            return "hosts to come up"
        return "sandboxes to start"
