"""How many warm sandboxes of which kind each host keeps: pure.

Prepares come first, then kinds by how lately they were asked for. Warm sandboxes give way to sessions, so what
sessions hold bounds them, and they never make a host be started; prepares do that themselves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from provisioner.model import Source, WarmLevel
from provisioner.packing import times
from provisioner.placement import Room, WarmName, warm_name
from provisioner.plan import HostFacts, PoolPolicy, Recent, SetLevels, Wanted
from shoal.contract.base import HostId
from shoal.contract.host import WarmKey

#: Warm sandboxes for so many seconds of the busiest demand of late: about what refilling takes.
_REFILL_S = 3.0
#: Seconds per bucket in which demand is counted (`demand.BUCKET_S`).
_BUCKET_S = 10.0


@dataclass
class _Kind:
    key: WarmKey
    source: Source
    room: Room
    count: int


def demand_level(pool: PoolPolicy, busiest: int) -> int:
    """How many warm ones recent demand of a kind is worth."""
    return min(pool.warm_max, max(pool.warm_default, math.ceil(busiest * _REFILL_S / _BUCKET_S)))


def levels_for(
    pool: PoolPolicy,
    hosts: Sequence[HostFacts],
    warming: Sequence[HostFacts],
    wanted: Sequence[Wanted],
    recent: Sequence[Recent],
    now: datetime,
) -> list[SetLevels]:
    """The warm orders that change. What is ordered stays where it is while that is even enough.

    Args:
        hosts: All hosts of the pool that are there.
        warming: Those of them that may hold warm sandboxes.
    """
    kinds = _kinds(pool, wanted, recent, now)
    free = {
        host.view.id: host.view.capacity - host.view.held
        for host in sorted(warming, key=lambda host: host.view.id)
    }
    present: dict[WarmName, dict[HostId, int]] = {}
    for host in warming:
        for level in host.levels:
            present.setdefault(warm_name(level.key), {})[host.view.id] = level.count
    counts: dict[HostId, dict[WarmName, int]] = {host.view.id: {} for host in hosts}
    full: set[Room] = set()
    for name, kind in kinds.items():
        for id, count in _spread(kind, present.get(name, {}), free, full).items():
            counts[id][name] = count
    changes: list[SetLevels] = []
    for host in hosts:
        levels = tuple(
            WarmLevel(key=kinds[name].key, source=kinds[name].source, count=count)
            for name, count in sorted(counts[host.view.id].items())
        )
        if levels != host.levels:
            changes.append(SetLevels(host=host.view.id, levels=levels))
    return changes


def _spread(
    kind: _Kind, present: dict[HostId, int], free: dict[HostId, Room], full: set[Room]
) -> dict[HostId, int]:
    """How many of a kind each host keeps; takes their room out of `free`. `full`: rooms that fit nowhere any more."""
    even = math.ceil(kind.count / max(1, len(free)))
    kept: dict[HostId, int] = {}
    for id, count in sorted(present.items()):
        # A little more than an even share is not worth ending sandboxes for.
        if count := min(count, even + max(1, even // 4), times(kind.room, free[id])):
            kept[id] = count
            free[id] = free[id] - _scaled(kind.room, count)
    over = sum(kept.values()) - kind.count
    if over > 0:
        _trim(kind, kept, free, over)
    left = -min(0, over)
    if left == 0 or kind.room in full:
        return kept
    # Evenly: the host with the fewest of this kind, then the emptiest.
    heap = [(kept.get(id, 0), -room.memory_mib, id) for id, room in free.items() if kind.room.fits(room)]
    heapq.heapify(heap)
    while left and heap:
        _, _, id = heap[0]
        kept[id] = kept.get(id, 0) + 1
        free[id] = free[id] - kind.room
        left -= 1
        if kind.room.fits(free[id]):
            heapq.heapreplace(heap, (kept[id], -free[id].memory_mib, id))
        else:
            heapq.heappop(heap)
    if left:
        full.add(kind.room)
    return kept


def _trim(kind: _Kind, kept: dict[HostId, int], free: dict[HostId, Room], over: int) -> None:
    """Take away what is too much: from those that keep most, then from the fullest, whose warm ones were taken."""
    heap = [(-count, free[id].memory_mib, id) for id, count in kept.items()]
    heapq.heapify(heap)
    for _ in range(over):
        _, _, id = heap[0]
        kept[id] -= 1
        free[id] = free[id] + kind.room
        if kept[id]:
            heapq.heapreplace(heap, (-kept[id], free[id].memory_mib, id))
        else:
            del kept[id]
            heapq.heappop(heap)


def _kinds(
    pool: PoolPolicy, wanted: Sequence[Wanted], recent: Sequence[Recent], now: datetime
) -> dict[WarmName, _Kind]:
    kinds: dict[WarmName, _Kind] = {}

    def add(key: WarmKey, source: Source, room: Room, count: int, *, most: bool) -> None:
        name = warm_name(key)
        found = kinds.get(name)
        if found is None:
            if count > 0:
                kinds[name] = _Kind(key, source, room, count)
        else:
            found.count = max(found.count, count) if most else found.count + count
            found.room = _largest(found.room, room)

    for each in sorted(wanted, key=lambda each: (each.expires_at, each.id)):
        add(each.key, each.source, each.room, max(0, each.count - each.claimed), most=False)
    for latest in sorted(recent, key=lambda each: (-each.last_at.timestamp(), warm_name(each.key))):
        if (now - latest.last_at).total_seconds() <= pool.warm_keep_s:
            add(latest.key, latest.source, latest.room, demand_level(pool, latest.busiest), most=True)
    return kinds


def _largest(one: Room, other: Room) -> Room:
    return Room(
        cpu_millis=max(one.cpu_millis, other.cpu_millis),
        memory_mib=max(one.memory_mib, other.memory_mib),
        disk_mib=max(one.disk_mib, other.disk_mib),
        sandboxes=max(one.sandboxes, other.sandboxes),
    )


def _scaled(room: Room, count: int) -> Room:
    return Room(
        cpu_millis=room.cpu_millis * count,
        memory_mib=room.memory_mib * count,
        disk_mib=room.disk_mib * count,
        sandboxes=room.sandboxes * count,
    )
