"""How many warm sandboxes of which kind each host keeps: pure.

Prepares come first, then kinds by how lately they were asked for. Warm sandboxes give way to sessions, so what
sessions hold bounds them, and they never make a host be started; prepares do that themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from provisioner.model import Source, WarmLevel
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
    """The warm orders that change.

    Args:
        hosts: All hosts of the pool that are there.
        warming: Those of them that may hold warm sandboxes.
    """
    kinds = _kinds(pool, wanted, recent, now)
    free = {
        host.view.id: _minus(host.view.capacity, host.view.held)
        for host in sorted(warming, key=lambda host: host.view.id)
    }
    counts: dict[HostId, dict[WarmName, int]] = {host.view.id: {} for host in hosts}
    for name, kind in kinds.items():
        for _ in range(kind.count):
            fitting = [id for id, room in free.items() if kind.room.fits(room)]
            if not fitting:
                break
            # Evenly: the host with the fewest of this kind, then the emptiest.
            id = min(fitting, key=lambda id: (counts[id].get(name, 0), -free[id].memory_mib, id))
            free[id] = _minus(free[id], kind.room)
            counts[id][name] = counts[id].get(name, 0) + 1
    changes: list[SetLevels] = []
    for host in hosts:
        levels = tuple(
            WarmLevel(key=kinds[name].key, source=kinds[name].source, count=count)
            for name, count in sorted(counts[host.view.id].items())
        )
        if levels != host.levels:
            changes.append(SetLevels(host=host.view.id, levels=levels))
    return changes


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


def _minus(one: Room, other: Room) -> Room:
    return Room(
        cpu_millis=one.cpu_millis - other.cpu_millis,
        memory_mib=one.memory_mib - other.memory_mib,
        disk_mib=one.disk_mib - other.disk_mib,
        sandboxes=one.sandboxes - other.sandboxes,
    )
