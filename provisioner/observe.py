"""What is: the records and the machines, as the planner's view."""

from __future__ import annotations

from datetime import timedelta

from provisioner import keys, roster, spread
from provisioner.capacity.port import Capacity, Instance
from provisioner.context import Context
from provisioner.demand import read_demand
from provisioner.fleet import view
from provisioner.model import Assignment, Demand, PoolState, Prepare, Queued, load
from provisioner.placement import Room, WarmName, warm_key, warm_name
from provisioner.plan import (
    HostFacts,
    InstanceFacts,
    Policy,
    PoolPolicy,
    Recent,
    View,
    Waiting,
    Wanted,
)
from provisioner.settings import ProvisionerSettings
from provisioner.store.steady import SteadyStore
from shoal.contract.base import HostId
from shoal.contract.host import WarmKey


def policy_of(settings: ProvisionerSettings) -> Policy:
    """The settings, as the planner takes them."""
    return Policy(
        pools=tuple(
            PoolPolicy(
                name=pool.name,
                min_hosts=pool.min_hosts,
                max_hosts=pool.max_hosts,
                host_room=Room.of(pool.host_capacity) if pool.host_capacity else None,
                idle_to_zero_s=pool.idle_to_zero_s,
                scale_in_cooldown_s=pool.scale_in_cooldown_s,
                warm_default=pool.warm_default,
                warm_max=pool.warm_max,
                warm_keep_s=pool.warm_keep_s,
                max_step=pool.max_step,
                headroom_sandboxes=pool.headroom_sandboxes,
                headroom_share=pool.headroom_share,
                scale_in_margin=pool.scale_in_margin,
                drain_below=pool.drain_below,
            )
            for pool in settings.pools
        ),
        lease_s=settings.lease_s,
        lost_margin_s=settings.lost_margin_s,
        host_start_s=settings.host_start_s,
        host_queue_s=settings.host_queue_s,
        tick_s=settings.look_s or settings.reconcile_s,
    )


async def observe(context: Context, capacity: Capacity) -> View:
    """Read everything once. Machines are asked first: one that is started meanwhile then has a record for certain."""
    store, now = context.store, context.clock.now()
    instances = {instance.host: instance for instance in await capacity.instances()}
    records = {host.id: host for host in await roster.hosts(store)}
    orders = await roster.orders(store, list(records))
    silence = timedelta(seconds=context.settings.lease_s / 2)
    hosts = tuple(
        HostFacts(
            view=view(
                host,
                context.settings,
                heard=host.heard_at is not None and now - host.heard_at <= silence,
            ),
            state=host.state,
            created_at=host.created_at,
            registered_at=host.registered_at,
            heard_at=host.heard_at,
            busy_at=host.busy_at,
            instance=_facts(instances.get(host.id)),
            sessions=host.sessions,
            sandboxes=host.sandboxes,
            drain=host.drain,
            draining=host.draining,
            levels=orders[host.id].warm if host.id in orders else (),
        )
        for host in records.values()
    )
    orphans = tuple(
        InstanceFacts(id=instance.id, host=host, alive=instance.alive)
        for host, instance in instances.items()
        if host not in records
    )
    waiting: list[Waiting] = []
    wanted: list[Wanted] = []
    recent: list[Recent] = []
    for pool in context.settings.pools:
        for item in await spread.queue(store, pool.name):
            entry = load(Queued, item.item)
            waiting.append(
                Waiting(
                    session=entry.session,
                    pool=pool.name,
                    substrate=entry.key.substrate,
                    room=Room.for_one(entry.resources),
                    warm=warm_name(entry.key),
                    expires_at=entry.expires_at,
                    leased=entry.placer_until is not None and entry.placer_until > now,
                    since=entry.created_at,
                )
            )
        prepares = await read_prepares(store, pool.name)
        held = await held_kinds(store, list(records)) if prepares else []
        wanted += [_wanted(prepare, held) for prepare in prepares]
        demands = await read_demand(store, context.clock, pool.name, pool.warm_keep_s)
        recent += [_recent(demand) for demand in demands]
    states = {item.key.sk: load(PoolState, item.item) for item in await store.query_all(keys.POOLS)}
    return View(
        hosts=hosts,
        orphans=orphans,
        waiting=tuple(waiting),
        wanted=tuple(wanted),
        recent=tuple(recent),
        pools=states,
    )


async def read_prepares(store: SteadyStore, pool: str) -> list[Prepare]:
    """A pool's prepares, expired ones included."""
    return [load(Prepare, item.item) for item in await store.query_all(f"PREPARE#{pool}")]


async def held_kinds(store: SteadyStore, hosts: list[HostId]) -> list[Assignment]:
    """What sessions hold on these hosts."""
    found: list[Assignment] = []
    for host in hosts:
        found += [load(Assignment, item.item) for item in await store.query_all(f"ON#{host}")]
    return found


def prepare_key(prepare: Prepare) -> WarmKey:
    """The kind of sandbox that a prepare keeps warm."""
    return warm_key(prepare.source.digest, prepare.substrate, prepare.resources.disk_mib)


def claimed(prepare: Prepare, held: list[Assignment]) -> int:
    """How many sandboxes of a prepare's kind sessions took since it was made, and still hold."""
    name: WarmName = warm_name(prepare_key(prepare))
    return sum(warm_name(each.key) == name and each.since >= prepare.created_at for each in held)


def _facts(instance: Instance | None) -> InstanceFacts | None:
    if instance is None:
        return None
    return InstanceFacts(
        id=instance.id,
        host=instance.host,
        alive=instance.alive,
        detail=instance.detail,
        queued=instance.queued,
        ran_at=instance.ran_at,
    )


def _wanted(prepare: Prepare, held: list[Assignment]) -> Wanted:
    return Wanted(
        id=prepare.id,
        pool=prepare.pool,
        key=prepare_key(prepare),
        source=prepare.source,
        room=Room.for_one(prepare.resources),
        count=prepare.sandboxes,
        expires_at=prepare.expires_at,
        by=prepare.by,
        claimed=claimed(prepare, held),
    )


def _recent(demand: Demand) -> Recent:
    return Recent(
        pool=demand.pool,
        key=demand.key,
        source=demand.source,
        room=Room.for_one(demand.resources),
        last_at=demand.last_at,
        busiest=max(demand.counts.values(), default=0),
    )
