"""How many hosts, which to drain, who is lost, how many warm ones: pure, the same for the same view.

Demand is what runs, what waits and what was prepared, packed on the hosts as the real placement packs. What does not
fit starts hosts, all at once; what is left over after a cool-down drains them (`sizing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from provisioner.model import PoolState
from provisioner.plan import (
    HostFacts,
    LoseHost,
    Plan,
    Policy,
    StopInstance,
    View,
    Wanted,
)
from provisioner.sizing import need_of, size, surplus, thinned
from provisioner.warmth import levels_for
from shoal.contract.base import HostId
from shoal.contract.states import HostState

#: Seconds that hosts have, once they are there, to make a prepare's sandboxes ready.
FILL_S = 15.0
#: How many of the latest host starts are remembered.
_STARTS = 50
_COMING = frozenset({HostState.STARTING, HostState.READY, HostState.DRAINING})
_OVER = frozenset({HostState.LOST, HostState.GONE})


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
        waiting = [each for each in view.waiting if each.pool == pool.name and each.expires_at > now]
        lead = lead_of(policy, state)
        due = [each for each in view.wanted if each.pool == pool.name and each.expires_at > now]
        wanted = _within(due, lead, now)
        recent = [each for each in view.recent if each.pool == pool.name]
        leaving = sum(
            host.view.pool == pool.name and host.instance is not None
            for host in view.hosts
            if host.state in _OVER or host.view.id in losing
        )
        sizing = size(pool, hosts, need_of(pool, hosts, waiting, wanted, recent, state), state, leaving, now)
        if sizing.start:
            start[pool.name] = sizing.start
        undrain += sizing.undrain
        if not sizing.start and not sizing.undrain and not sizing.unmet:
            # Whoever is about to be needed again is not sent away: a stop and a start take as long as the wait.
            soon = _within(due, 2 * lead, now)
            need = need_of(pool, hosts, waiting, soon, recent, state)
            going = surplus(pool, hosts, need, now)
            quiet = thinned(pool, hosts, need, frozenset(going))
            since = state.surplus_since or now
            if quiet and (now - since).total_seconds() >= pool.scale_in_cooldown_s:
                going, quiet = [*going, *quiet], []
            drain += going
            state = replace(state, surplus_since=since if quiet else None)
        else:
            state = replace(state, surplus_since=None)
        undrained, drained = frozenset(sizing.undrain), frozenset(drain)
        stop += [
            StopInstance(instance=host.instance.id, host=host.view.id, reason="drained")
            for host in hosts
            if host.instance is not None
            and host.state is HostState.DRAINING
            and host.view.id not in undrained
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
            if (host.view.open and host.view.id not in drained) or host.view.id in undrained
        ]
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


def lead_of(policy: Policy, state: PoolState) -> timedelta:
    """How long before a prepare's time its hosts are started: what 19 of 20 hosts took of late, a tick, and the time
    to make its sandboxes. A pool that has measured none yet takes the longest that a start may take."""
    start_s = policy.host_start_s
    if state.start_ms:
        slowest = sorted(state.start_ms)[math.ceil(0.95 * len(state.start_ms)) - 1]
        start_s = min(start_s, slowest / 1000)
    return timedelta(seconds=start_s + policy.tick_s + FILL_S)


def _within(wanted: Sequence[Wanted], lead: timedelta, now: datetime) -> list[Wanted]:
    return [each for each in wanted if each.by is None or each.by - now <= lead]


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
        detail = (
            f"No machine came for it within {policy.host_start_s:g} s."
            if starting
            else "Its machine is gone."
        )
    elif host.instance is not None and not host.instance.alive:
        detail = host.instance.detail or "Its machine has ended."
    elif starting:
        detail = _overdue(host, policy, now)
    else:
        since = host.heard_at or host.created_at
        silent = (now - since).total_seconds()
        if silent > policy.lease_s + policy.lost_margin_s:
            detail = f"It has not been heard of for {silent:.0f} s."
    if detail is None:
        return None
    return LoseHost(host=host.view.id, pool=host.view.pool, detail=detail, failed=starting)


def _overdue(host: HostFacts, policy: Policy, now: datetime) -> str | None:
    """Why a host that starts takes too long; None while it does not. One that stands in its provider's queue has not
    begun to start: giving it up would send it to the queue's end."""
    instance = host.instance
    since, limit_s, what = host.created_at, policy.host_start_s, "It did not register"
    if instance is not None and instance.queued:
        limit_s, what = max(policy.host_queue_s, policy.host_start_s), "Its provider did not run it"
    elif instance is not None and instance.ran_at is not None:
        since = max(since, instance.ran_at)
    if (now - since).total_seconds() <= limit_s:
        return None
    said = f" {instance.detail}" if instance is not None and instance.detail else ""
    return f"{what} within {limit_s:g} s.{said}"


def _state(
    state: PoolState, hosts: list[HostFacts], lose: list[LoseHost], pool: str, now: datetime
) -> PoolState:
    """The pool's memory of failures, of how long hosts take and how large they are, brought up to date."""
    state = _measured(state, hosts)
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


def _measured(state: PoolState, hosts: Iterable[HostFacts]) -> PoolState:
    """What newly registered hosts tell."""
    new = sorted(
        (host.registered_at, host.view.id, host.registered_at - host.created_at, host.view.capacity)
        for host in hosts
        if host.registered_at is not None
        and host.state is not HostState.STARTING
        and host.view.capacity.sandboxes
        and (state.measured_to is None or host.registered_at > state.measured_to)
    )
    if not new:
        return state
    took_ms = tuple(max(0, round(took.total_seconds() * 1000)) for _, _, took, _ in new)
    return replace(
        state,
        host_capacity=new[-1][3].wire(),
        start_ms=(*state.start_ms, *took_ms)[-_STARTS:],
        measured_to=new[-1][0],
    )
