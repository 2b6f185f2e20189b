"""How many hosts, which to drain, who is lost, how many warm ones: pure, the same for the same view.

Demand is what runs, what waits and what was prepared, packed on the hosts by the real placement. What does not fit
starts hosts, all at once; what is left over after a cool-down drains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from provisioner.model import PoolState
from provisioner.placement import Ask, HostView, Room, choose
from provisioner.plan import (
    HostFacts,
    LoseHost,
    Plan,
    Policy,
    PoolPolicy,
    StopInstance,
    View,
    Wanted,
)
from provisioner.warmth import levels_for
from shoal.contract.base import HostId
from shoal.contract.states import HostState, Substrate

#: Seconds before a prepare's time at which its hosts are started.
LEAD_S = 120.0
_FIRST_BACKOFF_S = 2.0
_MAX_BACKOFF_S = 60.0
_COMING = frozenset({HostState.STARTING, HostState.READY, HostState.DRAINING})
_OVER = frozenset({HostState.LOST, HostState.GONE})


class _First:
    """No chance at all: the same plan for the same view."""

    def sample(self, population: Sequence[HostView], k: int) -> list[HostView]:
        return list(population[:k])


def plan(view: View, policy: Policy, now: datetime) -> Plan:
    """What to do now."""
    start: dict[str, int] = {}
    resume: dict[str, tuple[HostId, ...]] = {}
    lose = [lost for host in view.hosts if (lost := _lost(host, policy, now)) is not None]
    losing = {each.host for each in lose}
    stop = [
        StopInstance(instance=orphan.id, host=orphan.host, reason="no record of it")
        for orphan in view.orphans
    ]
    forget: list[HostId] = []
    drain: list[HostId] = []
    undrain: list[HostId] = []
    pools: list[PoolState] = []
    for host in view.hosts:
        if host.state in _OVER:
            if host.instance is not None:
                stop.append(
                    StopInstance(instance=host.instance.id, host=host.view.id, reason=host.state.value)
                )
            else:
                forget.append(host.view.id)
    expire = tuple(each.session for each in view.waiting if each.expires_at <= now)
    drop = tuple((each.pool, each.id) for each in view.wanted if each.expires_at <= now)
    levels = []
    for pool in policy.pools:
        hosts = [
            host
            for host in view.hosts
            if host.view.pool == pool.name and host.state in _COMING and host.view.id not in losing
        ]
        if ordered := _ordered(hosts):
            resume[pool.name] = ordered
        state = _state(view.pools.get(pool.name, PoolState(name=pool.name)), hosts, lose, pool.name, now)
        asks = [
            Ask(pool=pool.name, substrate=each.substrate, room=each.room, warm=each.warm)
            for each in view.waiting
            if each.pool == pool.name and each.expires_at > now
        ]
        wanted = [
            each
            for each in view.wanted
            if each.pool == pool.name
            and each.expires_at > now
            and (each.by is None or each.by - now <= _lead(policy))
        ]
        leaving = sum(
            host.view.pool == pool.name and host.instance is not None
            for host in view.hosts
            if host.state in _OVER or host.view.id in losing
        )
        sizing = _size(pool, hosts, asks, wanted, state, leaving, now)
        if sizing.start:
            start[pool.name] = sizing.start
        undrain += sizing.undrain
        if not sizing.start and not sizing.undrain and not asks:
            drain += _scale_in(pool, hosts, wanted, now)
        stop += [
            StopInstance(instance=host.instance.id, host=host.view.id, reason="drained")
            for host in hosts
            if host.instance is not None
            and host.state is HostState.DRAINING
            and host.view.id not in sizing.undrain
            and host.draining
            and host.sessions == 0
            and host.sandboxes == 0
        ]
        state = replace(state, not_scaling=sizing.not_scaling)
        if state != view.pools.get(pool.name, PoolState(name=pool.name)):
            pools.append(state)
        warming = [
            host
            for host in hosts
            if (host.view.open and host.view.id not in drain) or host.view.id in sizing.undrain
        ]
        recent = [each for each in view.recent if each.pool == pool.name]
        levels += levels_for(pool, hosts, warming, wanted, recent, now)
    return Plan(
        start=start,
        resume=resume,
        lose=tuple(lose),
        drain=tuple(drain),
        undrain=tuple(undrain),
        stop=tuple(stop),
        forget=tuple(forget),
        levels=tuple(levels),
        expire=expire,
        drop=drop,
        pools=tuple(pools),
    )


def _lead(policy: Policy) -> timedelta:
    return timedelta(seconds=max(LEAD_S, policy.host_start_s))


def _ordered(hosts: Iterable[HostFacts]) -> tuple[HostId, ...]:
    """Hosts that were ordered and have no machine yet, oldest first."""
    found = [host for host in hosts if host.state is HostState.STARTING and host.instance is None]
    return tuple(host.view.id for host in sorted(found, key=lambda host: (host.created_at, host.view.id)))


def _lost(host: HostFacts, policy: Policy, now: datetime) -> LoseHost | None:
    """Why a host must be declared lost; None when it need not."""
    if host.state not in _COMING:
        return None
    starting = host.state is HostState.STARTING
    detail: str | None = None
    if host.instance is None and (now - host.created_at).total_seconds() > policy.host_start_s:
        detail = "Its machine is gone."
    elif host.instance is not None and not host.instance.alive:
        detail = host.instance.detail or "Its machine has ended."
    elif starting and (now - host.created_at).total_seconds() > policy.host_start_s:
        detail = f"It did not register within {policy.host_start_s:g} s."
    elif not starting:
        since = host.heard_at or host.created_at
        silent = (now - since).total_seconds()
        if silent > policy.lease_s + policy.lost_margin_s:
            detail = f"It has not been heard of for {silent:.0f} s."
    if detail is None:
        return None
    return LoseHost(host=host.view.id, pool=host.view.pool, detail=detail, failed=starting)


def _state(
    state: PoolState, hosts: list[HostFacts], lose: list[LoseHost], pool: str, now: datetime
) -> PoolState:
    """The pool's memory of failures, brought up to date."""
    failed = [each for each in lose if each.failed and each.pool == pool]
    if failed:
        return replace(
            state,
            failures=state.failures + len(failed),
            last_failure_at=now,
            last_failure=failed[-1].detail,
        )
    since = state.last_failure_at
    if since is not None and any(host.registered_at and host.registered_at > since for host in hosts):
        return replace(state, failures=0, last_failure_at=None, last_failure=None)
    return state


class _Sizing:
    """How many hosts are short."""

    def __init__(self) -> None:
        self.start = 0
        self.undrain: list[HostId] = []
        self.not_scaling: str | None = None


def _size(
    pool: PoolPolicy,
    hosts: list[HostFacts],
    asks: list[Ask],
    wanted: list[Wanted],
    state: PoolState,
    leaving: int,
    now: datetime,
) -> _Sizing:
    """How many hosts are short. `leaving`: machines that are being ended, and still take one of the pool's places."""
    sizing = _Sizing()
    shape = pool.host_room or _largest(hosts)
    everything = [*asks, *_prepared(pool, wanted)]
    packed = [host.view for host in hosts if host.view.open]
    coming = [host for host in hosts if host.state is HostState.STARTING]
    drained = [host for host in hosts if host.state is HostState.DRAINING and host.drain]
    if shape is None:
        # Nobody has told yet how large a host is: the first one will.
        if (everything or pool.min_hosts) and not hosts:
            sizing.start = max(1, min(pool.min_hosts, pool.max_hosts))
    else:
        packed += [_empty(host.view.id, pool, shape) for host in coming]
        left, packed = _pack(everything, packed)
        for host in drained:
            if not left:
                break
            left, packed = _pack(left, [replace(host.view, open=True)])
            sizing.undrain.append(host.view.id)
        too_large = [ask for ask in left if not ask.room.fits(shape)]
        left = [ask for ask in left if ask.room.fits(shape)]
        if too_large:
            sizing.not_scaling = "A request is larger than any host of this pool."
        while left:
            before = len(left)
            left, _ = _pack(left, [_empty(HostId("new"), pool, shape)])
            if len(left) == before:
                break
            sizing.start += 1
            if len(hosts) + sizing.start > pool.max_hosts:
                break
        there = len(hosts) - len(drained) + len(sizing.undrain) + sizing.start
        if there < pool.min_hosts:
            sizing.start += pool.min_hosts - there
    room_for = max(0, pool.max_hosts - len(hosts) - leaving)
    if sizing.start > room_for:
        sizing.start = room_for
        sizing.not_scaling = f"The pool is at its limit of {pool.max_hosts} hosts."
        if leaving:
            sizing.not_scaling = "A host that is being ended still takes the place of the next."
    if sizing.start and state.failures and state.last_failure_at is not None:
        backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(10, state.failures - 1))
        if (now - state.last_failure_at).total_seconds() < backoff:
            sizing.start = 0
            sizing.not_scaling = f"Hosts do not come up: {state.last_failure}"
    return sizing


def _largest(hosts: Iterable[HostFacts]) -> Room | None:
    known = [host.view.capacity for host in hosts if host.view.capacity.sandboxes]
    return max(known, key=lambda room: (room.memory_mib, room.cpu_millis), default=None)


def _empty(id: HostId, pool: PoolPolicy, shape: Room) -> HostView:
    return HostView(
        id=id, pool=pool.name, open=True, substrates=frozenset(Substrate), capacity=shape, held=Room()
    )


def _prepared(pool: PoolPolicy, wanted: list[Wanted]) -> list[Ask]:
    return [
        Ask(
            pool=pool.name,
            substrate=each.key.substrate,
            room=each.room,
            warm=(each.key.digest, each.key.substrate, each.key.disk_mib),
        )
        for each in wanted
        for _ in range(max(0, each.count - each.claimed))
    ]


def _pack(asks: Iterable[Ask], hosts: Iterable[HostView]) -> tuple[list[Ask], list[HostView]]:
    """What does not fit on these hosts, and the hosts with the rest on them."""
    filled = {host.id: host for host in hosts}
    left: list[Ask] = []
    full: set[tuple[Room, Substrate]] = set()
    for ask in asks:
        kind = (ask.room, ask.substrate)
        chosen = None if kind in full else choose(ask, filled.values(), _First(), sample=len(filled) or 1)
        if chosen is None:
            full.add(kind)
            left.append(ask)
        else:
            filled[chosen.id] = replace(chosen, held=chosen.held + ask.room)
    return left, list(filled.values())


def _scale_in(pool: PoolPolicy, hosts: list[HostFacts], wanted: list[Wanted], now: datetime) -> list[HostId]:
    """Hosts that are not needed any more."""
    ready = [host for host in hosts if host.state is HostState.READY and not host.drain]
    staying = len(ready) + sum(host.state is HostState.STARTING for host in hosts)
    idle = sorted(
        (host for host in ready if host.sessions == 0 and host.sandboxes == 0 and host.view.open),
        key=lambda host: (host.busy_at or host.created_at, host.view.id),
    )
    prepared = _prepared(pool, wanted)
    busy = any(host.sessions or host.sandboxes for host in hosts)
    chosen: list[HostId] = []
    for host in idle:
        if staying <= pool.min_hosts:
            break
        quiet = (now - (host.busy_at or host.created_at)).total_seconds()
        last = staying == 1 or not (busy or prepared)
        # The last hosts stay for `idle_to_zero_s`, the others for the cool-down.
        if quiet < (pool.idle_to_zero_s if last else pool.scale_in_cooldown_s):
            continue
        rest = [each.view for each in ready if each.view.id not in (*chosen, host.view.id)]
        if prepared and _pack(prepared, rest)[0]:
            continue
        chosen.append(host.view.id)
        staying -= 1
    return chosen
