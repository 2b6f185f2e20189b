"""How many hosts a pool is short of, and which of them it can do without: pure.

Demand is what runs, what waits and what was prepared, less what of the waiting will take the prepared. What does not
fit on the hosts that are there or coming starts more. Scale-in asks for a little more room than scale-out: a host goes
only while the others keep `scale_in_margin` of the demand free, so that a ripple does not start it again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from provisioner.model import PoolState
from provisioner.packing import Packing, by_size, hosts_for, times
from provisioner.placement import Ask, HostView, Room, WarmName, warm_name
from provisioner.plan import HostFacts, PoolPolicy, Recent, Waiting, Wanted
from shoal.contract.base import HostId
from shoal.contract.states import HostState, Substrate

_FIRST_BACKOFF_S = 2.0
_MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a pool must have room for beyond what its hosts hold.

    Attributes:
        asks: What waits and what is prepared, by kind, the largest first.
        headroom: Room kept free for bursts, and `margin` what scale-in leaves free besides.
        shape: What one host takes; None while no host has told.
        typical: What one more sandbox would be; None while nothing is known of demand.
    """

    asks: dict[Ask, int]
    headroom: dict[Ask, int]
    margin: dict[Ask, int]
    shape: Room | None
    typical: Room | None = None


@dataclass(kw_only=True)
class Sizing:
    """How many hosts to start, which to take back, and why there are not more."""

    start: int = 0
    undrain: list[HostId] = field(default_factory=list)
    not_scaling: str | None = None
    unmet: bool = False


def need_of(
    pool: PoolPolicy,
    hosts: Sequence[HostFacts],
    waiting: Sequence[Waiting],
    wanted: Sequence[Wanted],
    recent: Sequence[Recent],
    state: PoolState,
) -> Need:
    """The demand of a pool."""
    shape = _largest(hosts) or pool.host_room or remembered(state)
    asks = by_size([*_waiting(waiting), *_prepared(pool, waiting, wanted)], shape)
    running = sum(host.sessions for host in hosts)
    demand = running + sum(asks.values())
    typical = _typical(pool, hosts, waiting, recent) if demand else None
    headroom = max(pool.headroom_sandboxes, math.ceil(pool.headroom_share * demand))
    margin = math.floor(pool.scale_in_margin * demand)
    if typical is None or (shape is not None and not typical.room.fits(shape)):
        headroom = margin = 0
    return Need(
        asks=asks,
        headroom={typical: headroom} if typical is not None and headroom else {},
        margin={typical: margin} if typical is not None and margin else {},
        shape=shape,
        typical=typical.room if typical is not None else None,
    )


def size(
    pool: PoolPolicy,
    hosts: Sequence[HostFacts],
    need: Need,
    state: PoolState,
    leaving: int,
    now: datetime,
) -> Sizing:
    """How many hosts are short. `leaving`: machines that are being ended and still take one of the pool's places."""
    sizing = Sizing()
    drained = [host for host in hosts if host.state is HostState.DRAINING and host.drain]
    if need.shape is None:
        # Nobody has told yet how large a host is: the first one will.
        if (need.asks or pool.min_hosts) and not hosts:
            sizing.start = max(1, min(pool.min_hosts, pool.max_hosts))
        sizing.unmet = bool(need.asks)
    else:
        packing = Packing(_there(pool, hosts, need.shape))
        left = packing.place_all(need.asks)
        spare = packing.place_all(need.headroom)
        for host in sorted(drained, key=lambda host: (-host.sessions, host.view.id)):
            if not left and not spare:
                break
            packing.add(replace(host.view, open=True))
            left, spare = packing.place_all(left), packing.place_all(spare)
            if packing.taken(host.view.id):
                sizing.undrain.append(host.view.id)
        if any(not ask.room.fits(need.shape) for ask in left):
            sizing.not_scaling = "A request is larger than any host of this pool."
        left = {ask: count for ask, count in left.items() if ask.room.fits(need.shape)}
        sizing.unmet = bool(left)
        sizing.start, _ = hosts_for(_sum(left, spare), need.shape, pool.max_hosts + 1)
        there = len(hosts) - len(drained) + len(sizing.undrain) + sizing.start
        if there < pool.min_hosts:
            sizing.start += pool.min_hosts - there
    _limit(sizing, pool, len(hosts), state, leaving, now)
    if state.failures and need.asks and sizing.not_scaling is None:
        # Others are on their way, and may fare no better: who waits should know.
        sizing.not_scaling = f"Hosts do not come up: {state.last_failure}"
    stuck = [host.instance.detail for host in hosts if host.instance is not None and host.instance.queued]
    if any(stuck) and need.asks and sizing.not_scaling is None:
        sizing.not_scaling = f"Hosts wait for machines: {next(filter(None, stuck))}"
    return sizing


def _limit(
    sizing: Sizing, pool: PoolPolicy, hosts: int, state: PoolState, leaving: int, now: datetime
) -> None:
    """No more than the pool may have, than one step takes, and none for a while after failures."""
    room_for = max(0, pool.max_hosts - hosts - leaving)
    if sizing.start > room_for:
        sizing.start = room_for
        if sizing.unmet:
            sizing.not_scaling = f"The pool is at its limit of {pool.max_hosts} hosts."
            if leaving:
                sizing.not_scaling = "A host that is being ended still takes the place of the next."
    if pool.max_step is not None:
        sizing.start = min(sizing.start, pool.max_step)
    if sizing.start and state.failures and state.last_failure_at is not None:
        backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(10, state.failures - 1))
        if (now - state.last_failure_at).total_seconds() < backoff:
            sizing.start = 0
            sizing.not_scaling = f"Hosts do not come up: {state.last_failure}"


def surplus(pool: PoolPolicy, hosts: Sequence[HostFacts], need: Need, now: datetime) -> list[HostId]:
    """Idle hosts that are not needed any more, those that have been idle for longest first."""
    ready = [host for host in hosts if host.state is HostState.READY and not host.drain]
    staying = len(ready) + sum(host.state is HostState.STARTING for host in hosts)
    idle = sorted(
        (host for host in ready if host.sessions == 0 and host.sandboxes == 0 and host.view.open),
        key=lambda host: (host.busy_at or host.created_at, host.view.id),
    )
    if not idle:
        return []
    busy = any(host.sessions or host.sandboxes for host in hosts)
    needed = _needed(pool, hosts, idle, need)
    chosen: list[HostId] = []
    for host in idle:
        if staying <= pool.min_hosts:
            break
        quiet = (now - (host.busy_at or host.created_at)).total_seconds()
        last = staying == 1 or not (busy or need.asks)
        # The last hosts stay for `idle_to_zero_s`, the others for the cool-down.
        if quiet < (pool.idle_to_zero_s if last else pool.scale_in_cooldown_s) or host.view.id in needed:
            continue
        chosen.append(host.view.id)
        staying -= 1
    return chosen


def thinned(
    pool: PoolPolicy, hosts: Sequence[HostFacts], need: Need, leaving: frozenset[HostId]
) -> list[HostId]:
    """Busy hosts that the pool can do without once their sessions have ended: the emptiest, as long as the others have
    room for everything that is wanted and for as many sessions as those have. `leaving`: those that go anyway."""
    if (
        not pool.drain_below
        or need.typical is None
        or any(host.state is HostState.STARTING for host in hosts)
    ):
        return []
    open_ = [host for host in hosts if host.view.open and host.view.id not in leaving]
    free = {host.view.id: times(need.typical, host.view.capacity - host.view.held) for host in open_}
    wanted = sum(sum(asks.values()) for asks in (need.asks, need.headroom, need.margin))
    spare = sum(free.values()) - wanted
    busy = sorted(
        (
            (host.view.held.share_of(host.view.capacity), host.view.id, host)
            for host in open_
            if host.sessions
        ),
        key=lambda each: each[:2],
    )
    chosen: list[HostId] = []
    for share, id, host in busy:
        spare -= free[id] + host.sessions
        if share > pool.drain_below or spare < 0 or len(open_) - len(chosen) <= max(1, pool.min_hosts):
            break
        chosen.append(id)
    return chosen


def _needed(
    pool: PoolPolicy, hosts: Sequence[HostFacts], idle: Sequence[HostFacts], need: Need
) -> frozenset[HostId]:
    """The idle hosts without which there would be too little room: those that were busy last."""
    resting = {host.view.id for host in idle}
    shape = need.shape or Room()
    packing = Packing(view for view in _there(pool, hosts, shape) if view.id not in resting)
    left = packing.place_all(_sum(need.asks, _sum(need.headroom, need.margin)))
    needed: set[HostId] = set()
    for host in reversed(idle):
        if not left:
            break
        packing.add(host.view)
        left = packing.place_all(left)
        if packing.taken(host.view.id):
            needed.add(host.view.id)
    return frozenset(needed)


def _there(pool: PoolPolicy, hosts: Sequence[HostFacts], shape: Room) -> list[HostView]:
    """Where sandboxes can go, now or soon."""
    coming = [host for host in hosts if host.state is HostState.STARTING]
    return [
        *(host.view for host in hosts if host.view.open),
        *(
            HostView(
                id=host.view.id,
                pool=pool.name,
                open=True,
                substrates=frozenset(Substrate),
                capacity=shape,
                held=Room(),
            )
            for host in coming
        ),
    ]


def remembered(state: PoolState) -> Room | None:
    """How large the pool's hosts were when there were any."""
    return Room.of(state.host_capacity) if state.host_capacity is not None else None


def _largest(hosts: Iterable[HostFacts]) -> Room | None:
    known = [host.view.capacity for host in hosts if host.view.capacity.sandboxes]
    return max(known, key=lambda room: (room.memory_mib, room.cpu_millis), default=None)


def _waiting(waiting: Sequence[Waiting]) -> list[tuple[Ask, int]]:
    counts = Counter((each.pool, each.substrate, each.room, each.warm) for each in waiting)
    return [
        (Ask(pool=pool, substrate=substrate, room=room, warm=warm), count)
        for (pool, substrate, room, warm), count in counts.items()
    ]


def _prepared(
    pool: PoolPolicy, waiting: Sequence[Waiting], wanted: Sequence[Wanted]
) -> list[tuple[Ask, int]]:
    """What is prepared and neither taken nor about to be: who waits for such a sandbox will take one."""
    coming: Counter[WarmName] = Counter(each.warm for each in waiting)
    found: list[tuple[Ask, int]] = []
    for each in wanted:
        name = warm_name(each.key)
        free = max(0, each.count - each.claimed)
        taken = min(free, coming[name])
        coming[name] -= taken
        ask = Ask(pool=pool.name, substrate=each.key.substrate, room=each.room, warm=name)
        found.append((ask, free - taken))
    return found


def _typical(
    pool: PoolPolicy, hosts: Sequence[HostFacts], waiting: Sequence[Waiting], recent: Sequence[Recent]
) -> Ask | None:
    """The sandbox that the next burst will probably want: the one asked for most of late, else what waits or runs."""
    if recent:
        most = max(recent, key=lambda each: (each.busiest, each.last_at, warm_name(each.key)))
        return Ask(pool=pool.name, substrate=most.key.substrate, room=most.room, warm=warm_name(most.key))
    asked = Counter((each.substrate, each.room, each.warm) for each in waiting)
    if asked:
        (substrate, room, warm), _ = max(
            asked.items(), key=lambda item: (item[1], item[0][1].memory_mib, item[0][2])
        )
        return Ask(pool=pool.name, substrate=substrate, room=room, warm=warm)
    sessions = sum(host.sessions for host in hosts)
    if not sessions:
        return None
    held = [host.view.held for host in hosts if host.sessions]
    room = Room(
        cpu_millis=math.ceil(sum(each.cpu_millis for each in held) / sessions),
        memory_mib=math.ceil(sum(each.memory_mib for each in held) / sessions),
        disk_mib=math.ceil(sum(each.disk_mib for each in held) / sessions),
        sandboxes=1,
    )
    return Ask(pool=pool.name, substrate=Substrate.CONTAINER, room=room, warm=("", Substrate.CONTAINER, 0))


def _sum(one: dict[Ask, int], other: dict[Ask, int]) -> dict[Ask, int]:
    total = dict(one)
    for ask, count in other.items():
        total[ask] = total.get(ask, 0) + count
    return total
