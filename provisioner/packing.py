"""What the real placement would do with many equal asks, counted instead of asked one by one: pure.

`Packing.place` puts each sandbox where `placement.choose` puts it when it compares every host: the best rank first, of
those the least filled. A test holds the two against each other. Rooms only fill here, so how full a host was when it
was last looked at is a lower bound, and a heap of those finds the least filled one without looking at the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from provisioner.placement import Ask, HostView, Room, WarmName
from shoal.contract.base import HostId
from shoal.contract.states import Substrate

#: Asks of one kind are alike for every host without a warm sandbox for them.
Shape = tuple[str, Substrate, Room]
_Entry = tuple[float, float, HostId, "_Bin", int]


class _Bin:
    """A host that is being filled: plain numbers, since millions of comparisons are made."""

    __slots__ = ("capacity", "cpu", "disk", "memory", "sandboxes", "taken", "view")

    def __init__(self, view: HostView) -> None:
        self.view = view
        self.capacity = view.capacity
        self.cpu = view.held.cpu_millis
        self.memory = view.held.memory_mib
        self.disk = view.held.disk_mib
        self.sandboxes = view.held.sandboxes
        self.taken = 0

    def share_with(self, room: Room) -> float | None:
        """How full it is with that on it (`Room.share_of`); None when it does not fit."""
        capacity = self.capacity
        cpu, memory = self.cpu + room.cpu_millis, self.memory + room.memory_mib
        disk, sandboxes = self.disk + room.disk_mib, self.sandboxes + room.sandboxes
        if (
            cpu > capacity.cpu_millis
            or memory > capacity.memory_mib
            or disk > capacity.disk_mib
            or sandboxes > capacity.sandboxes
        ):
            return None
        return max(
            cpu / (capacity.cpu_millis or 1),
            memory / (capacity.memory_mib or 1),
            disk / (capacity.disk_mib or 1),
            sandboxes / (capacity.sandboxes or 1),
        )

    def take(self, room: Room) -> None:
        self.cpu += room.cpu_millis
        self.memory += room.memory_mib
        self.disk += room.disk_mib
        self.sandboxes += room.sandboxes
        self.taken += 1


class Packing:
    """Hosts being filled, on a copy."""

    def __init__(self, hosts: Iterable[HostView] = ()) -> None:
        self._bins: dict[HostId, _Bin] = {}
        self._warm: dict[WarmName, list[_Bin]] = {}
        self._heaps: dict[Shape, list[_Entry]] = {}
        for host in hosts:
            self.add(host)

    def add(self, host: HostView) -> None:
        """One more host."""
        bin = self._bins[host.id] = _Bin(host)
        for name, count in host.warm.items():
            if count > 0:
                self._warm.setdefault(name, []).append(bin)
        for (pool, substrate, room), heap in self._heaps.items():
            if (entry := _entry(bin, pool, substrate, room)) is not None:
                heapq.heappush(heap, entry)

    def taken(self, host: HostId) -> int:
        """How many sandboxes were put on a host."""
        return self._bins[host].taken

    def place(self, ask: Ask, count: int = 1) -> int:
        """Put `count` of them on the hosts; answers how many do not fit."""
        warm = self._warm.get(ask.warm)
        if warm:
            count = _fill(_heap(warm, ask.pool, ask.substrate, ask.room), ask.room, count)
        if count:
            shape = (ask.pool, ask.substrate, ask.room)
            heap = self._heaps.get(shape)
            if heap is None:
                heap = self._heaps[shape] = _heap(self._bins.values(), *shape)
            count = _fill(heap, ask.room, count)
        return count

    def place_all(self, asks: Mapping[Ask, int]) -> dict[Ask, int]:
        """Put all of them on the hosts, kind after kind; answers what does not fit."""
        left = {ask: self.place(ask, count) for ask, count in asks.items()}
        return {ask: count for ask, count in left.items() if count}


def _entry(bin: _Bin, pool: str, substrate: Substrate, room: Room) -> _Entry | None:
    view = bin.view
    if not view.open or view.pool != pool or substrate not in view.substrates:
        return None
    share = bin.share_with(room)
    return None if share is None else (share, view.load, view.id, bin, bin.taken)


def _heap(bins: Iterable[_Bin], pool: str, substrate: Substrate, room: Room) -> list[_Entry]:
    heap = [entry for bin in bins if (entry := _entry(bin, pool, substrate, room)) is not None]
    heapq.heapify(heap)
    return heap


def _fill(heap: list[_Entry], room: Room, count: int) -> int:
    while count and heap:
        _, load, id, bin, taken = heap[0]
        if taken == bin.taken:
            bin.take(room)
            count -= 1
        share = bin.share_with(room)
        if share is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (share, load, id, bin, bin.taken))
    return count


def by_size(asks: Iterable[tuple[Ask, int]], shape: Room | None) -> dict[Ask, int]:
    """Equal asks together, the largest first: those that are hard to fit find the hosts emptier."""
    counts: dict[Ask, int] = {}
    for ask, count in asks:
        if count > 0:
            counts[ask] = counts.get(ask, 0) + count

    def size(item: tuple[Ask, int]) -> tuple[float, int, int, int, str, WarmName]:
        ask, room = item[0], item[0].room
        share = room.share_of(shape) if shape is not None else 0.0
        return (
            -share,
            -room.memory_mib,
            -room.cpu_millis,
            -room.disk_mib,
            ask.substrate.value,
            ask.warm,
        )

    return dict(sorted(counts.items(), key=size))


def hosts_for(asks: Mapping[Ask, int], shape: Room, limit: int) -> tuple[int, dict[Ask, int]]:
    """How many empty hosts of a shape take these, `limit` at the most, and what is left.

    Each host takes what fits in the order given. Asks that no host is large enough for are left.
    """
    left: dict[tuple[Room, Substrate], int] = {}
    for ask, count in asks.items():
        kind = (ask.room, ask.substrate)
        left[kind] = left.get(kind, 0) + count
    hosts = 0
    while hosts < limit:
        loaded = _load(left, shape)
        if not loaded:
            break
        # As long as there is enough of every kind, the next hosts are filled just like this one.
        alike = min(left[kind] // count for kind, count in loaded.items())
        alike = max(1, min(alike, limit - hosts))
        for kind, count in loaded.items():
            left[kind] -= alike * count
        hosts += alike
    rest: dict[Ask, int] = {}
    for ask, count in reversed(list(asks.items())):
        kind = (ask.room, ask.substrate)
        of_this = min(count, left[kind])
        left[kind] -= of_this
        if of_this:
            rest[ask] = of_this
    return hosts, dict(reversed(rest.items()))


def _load(left: Mapping[tuple[Room, Substrate], int], shape: Room) -> dict[tuple[Room, Substrate], int]:
    """What one empty host takes."""
    held = Room()
    loaded: dict[tuple[Room, Substrate], int] = {}
    for kind, count in left.items():
        count = min(count, times(kind[0], shape - held))
        if count:
            loaded[kind] = count
            held = held + _scaled(kind[0], count)
    return loaded


def times(room: Room, free: Room) -> int:
    """How many of a room fit into what is free; what needs nothing at all fits once."""
    counts = [
        has // needs
        for needs, has in (
            (room.cpu_millis, free.cpu_millis),
            (room.memory_mib, free.memory_mib),
            (room.disk_mib, free.disk_mib),
            (room.sandboxes, free.sandboxes),
        )
        if needs
    ]
    return max(0, min(counts, default=1))


def _scaled(room: Room, count: int) -> Room:
    return Room(
        cpu_millis=room.cpu_millis * count,
        memory_mib=room.memory_mib * count,
        disk_mib=room.disk_mib * count,
        sandboxes=room.sandboxes * count,
    )
