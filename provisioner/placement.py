"""Which host a sandbox goes to: filter, sample, score. Pure but for the chance that is handed in.

Of the hosts that can take it, those with a warm sandbox of its kind come first. Among those a few are drawn and the
least filled wins: with stale views of many replicas, the very least filled of all would be everybody's choice at once
(power of k choices, Mitzenmacher 2001). Without a warm one, a few are drawn of those that have most of its layers, and
a few of the others; to have them is worth a twentieth of a host: without a bound, a burst from a new image would fill
the few hosts that have it while others stand empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.contract.base import HostId
from shoal.contract.host import Capacity, WarmKey
from shoal.contract.sessions import Resources
from shoal.contract.states import Substrate

#: Sizes of sandboxes' disks, MiB: what was asked for is rounded up to one, so that warm ones fit many.
DISK_CLASSES_MIB = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
#: By how much fuller a host may be that has all layers of a disk than one that has none: fetching them costs seconds.
LAYERS_WORTH = 0.05
#: Warm sandboxes are interchangeable when these agree: the disk's digest, substrate, disk class.
WarmName = tuple[str, Substrate, int]


def disk_class(disk_mib: int) -> int:
    """The class that a disk of this size belongs to."""
    return next((size for size in DISK_CLASSES_MIB if size >= disk_mib), disk_mib)


def warm_key(digest: str, substrate: Substrate, disk_mib: int) -> WarmKey:
    """What a warm sandbox must be to serve this disk."""
    return WarmKey(digest=digest, substrate=substrate, disk_mib=disk_class(disk_mib))


def warm_name(key: WarmKey) -> WarmName:
    """A key that can be hashed, equal for equal ones."""
    return (key.digest, key.substrate, disk_class(key.disk_mib))


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Amounts of what hosts have: CPU in thousandths of a core, memory and disk in MiB."""

    cpu_millis: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    sandboxes: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(
            cpu_millis=self.cpu_millis + other.cpu_millis,
            memory_mib=self.memory_mib + other.memory_mib,
            disk_mib=self.disk_mib + other.disk_mib,
            sandboxes=self.sandboxes + other.sandboxes,
        )

    def __sub__(self, other: Room) -> Room:
        return Room(
            cpu_millis=self.cpu_millis - other.cpu_millis,
            memory_mib=self.memory_mib - other.memory_mib,
            disk_mib=self.disk_mib - other.disk_mib,
            sandboxes=self.sandboxes - other.sandboxes,
        )

    def fits(self, capacity: Room) -> bool:
        """Whether so much is no more than `capacity`."""
        return (
            self.cpu_millis <= capacity.cpu_millis
            and self.memory_mib <= capacity.memory_mib
            and self.disk_mib <= capacity.disk_mib
            and self.sandboxes <= capacity.sandboxes
        )

    def share_of(self, capacity: Room) -> float:
        """The scarcest part: 0 is empty, 1 is full."""
        return max(
            self.cpu_millis / max(1, capacity.cpu_millis),
            self.memory_mib / max(1, capacity.memory_mib),
            self.disk_mib / max(1, capacity.disk_mib),
            self.sandboxes / max(1, capacity.sandboxes),
        )

    @classmethod
    def of(cls, capacity: Capacity | None) -> Room:
        """From the wire; None is nothing."""
        if capacity is None:
            return cls()
        return cls(
            cpu_millis=capacity.cpu_millis,
            memory_mib=capacity.memory_mib,
            disk_mib=capacity.disk_mib,
            sandboxes=capacity.sandboxes,
        )

    @classmethod
    def for_one(cls, resources: Resources) -> Room:
        """What one sandbox of these resources holds: its disk by class."""
        return cls(
            cpu_millis=resources.cpu_millis,
            memory_mib=resources.memory_mib,
            disk_mib=disk_class(resources.disk_mib),
            sandboxes=1,
        )

    def wire(self) -> Capacity:
        """For the wire and the store."""
        return Capacity(
            cpu_millis=self.cpu_millis,
            memory_mib=self.memory_mib,
            disk_mib=self.disk_mib,
            sandboxes=self.sandboxes,
        )


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A host as placement sees it. `held` is what sessions hold; warm sandboxes give way and do not count.

    Attributes:
        open: Registered, heard of lately, and neither draining nor lost.
        load: What is really used, 0 to 1; breaks ties between equally filled hosts.
    """

    id: HostId
    pool: str
    open: bool
    substrates: frozenset[Substrate]
    capacity: Room
    held: Room
    warm: Mapping[WarmName, int] = field(default_factory=dict)
    layers: frozenset[str] = frozenset()
    load: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A sandbox that wants a place. `layers` are the digests of its disk's layers."""

    pool: str
    substrate: Substrate
    room: Room
    warm: WarmName
    layers: frozenset[str] = frozenset()


class Chance(Protocol):
    """Where the draw comes from (`random.Random` fits)."""

    def sample(self, population: Sequence[HostView], k: int) -> list[HostView]: ...


def candidates(
    ask: Ask,
    hosts: Iterable[HostView],
    extra: Mapping[HostId, Room],
    tried: frozenset[HostId] = frozenset(),
    closed: Mapping[HostId, Room] | None = None,
) -> list[HostView]:
    """The hosts that can take it, counting `extra` on top of what they hold."""
    closed = closed or {}
    return [
        host
        for host in hosts
        if host.open
        and host.id not in tried
        and host.pool == ask.pool
        and ask.substrate in host.substrates
        and not (host.id in closed and closed[host.id].fits(ask.room))
        and (host.held + extra.get(host.id, Room()) + ask.room).fits(host.capacity)
    ]


def choose(
    ask: Ask,
    hosts: Iterable[HostView],
    chance: Chance,
    *,
    sample: int = 4,
    extra: Mapping[HostId, Room] | None = None,
    claimed: Mapping[tuple[HostId, WarmName], int] | None = None,
    tried: frozenset[HostId] = frozenset(),
    closed: Mapping[HostId, Room] | None = None,
) -> HostView | None:
    """The host for it, or None when none of them can take it.

    Args:
        sample: How many are drawn: of the warm ones, or of those with most layers and of the others each.
        extra: What was placed on hosts that their views do not show yet.
        claimed: Warm sandboxes taken that the views do not show yet.
        tried: Hosts that refused.
        closed: What hosts refused of late: they are not asked for as much again.
    """
    extra, claimed = extra or {}, claimed or {}
    fitting = candidates(ask, hosts, extra, tried, closed)
    if not fitting:
        return None

    def draw(some: list[HostView]) -> list[HostView]:
        some = sorted(some, key=lambda host: host.id)
        return chance.sample(some, sample) if len(some) > sample else some

    warm = [host for host in fitting if host.warm.get(ask.warm, 0) > claimed.get((host.id, ask.warm), 0)]
    if warm:
        return min(draw(warm), key=lambda host: filled(host, ask, extra))
    most = max(len(ask.layers & host.layers) for host in fitting)
    drawn = draw([host for host in fitting if len(ask.layers & host.layers) == most])
    drawn += draw([host for host in fitting if len(ask.layers & host.layers) < most])
    return min(drawn, key=lambda host: costs(host, ask, extra))


def costs(host: HostView, ask: Ask, extra: Mapping[HostId, Room]) -> tuple[float, float, str]:
    """How full a host is with that on it, and the worth of the layers it lacks: less is better."""
    share, load, id = filled(host, ask, extra)
    lacks = 1 - len(ask.layers & host.layers) / len(ask.layers) if ask.layers else 0.0
    return (share + LAYERS_WORTH * lacks, load, id)


def filled(host: HostView, ask: Ask, extra: Mapping[HostId, Room]) -> tuple[float, float, str]:
    """How full a host is with that on it: less is better."""
    held = host.held + extra.get(host.id, Room()) + ask.room
    return (held.share_of(host.capacity), host.load, host.id)


@dataclass(slots=True, eq=False)
class Own:
    """One placement of this replica, until the host's heartbeats show it."""

    room: Room
    warm: WarmName
    gone_with_beat: int | None = None
    confirmed_at: float | None = None
    settled: bool = False


class PlacementMemory:
    """A replica's own placements that heartbeats do not show yet.

    A placement counts from `begin`. Once the host has answered, a heartbeat built after that shows it: the second one
    that arrives was certainly built after the first was answered, so it is forgotten then. A placement that is written
    down is forgotten as soon as what the host holds has been counted after that. A placement that did not come about is
    forgotten at once; a host that refused one is taken to be full for the like until it is heard of again: others
    have filled it, and its view is old.
    """

    def __init__(self) -> None:
        self._own: dict[HostId, deque[Own]] = {}
        self._extra: dict[HostId, Room] = {}
        self._claimed: dict[tuple[HostId, WarmName], int] = {}
        self._closed: dict[HostId, Room] = {}
        self._closed_at: dict[HostId, int] = {}

    def begin(self, host: HostId, room: Room, warm: WarmName) -> Own:
        """A placement is on its way to the host."""
        own = Own(room, warm)
        self._own.setdefault(host, deque()).append(own)
        self._extra[host] = self._extra.get(host, Room()) + room
        self._claimed[(host, warm)] = self._claimed.get((host, warm), 0) + 1
        return own

    def refused(self, host: HostId, own: Own) -> None:
        """It did not come about."""
        own.settled = True
        mine = self._own.get(host)
        if mine is not None and own in mine:
            self._keep(host, lambda other: other is not own)

    def turned_away(self, host: HostId, own: Own, last_beat: int) -> None:
        """The host refused it; `last_beat` is the number of its last heartbeat seen."""
        self.refused(host, own)
        self._closed[host] = own.room
        self._closed_at[host] = last_beat

    def answered(self, own: Own, last_beat: int) -> None:
        """The host took it; `last_beat` is the number of its last heartbeat seen."""
        own.settled = True
        own.gone_with_beat = last_beat + 2

    def confirmed(self, own: Own, moment: float) -> None:
        """It was written down before this moment (monotonic)."""
        own.confirmed_at = moment

    def counted(self, host: HostId, moment: float) -> None:
        """What the host holds was read from the records at this moment or later."""
        self._keep(host, lambda own: own.confirmed_at is None or own.confirmed_at > moment)

    def heard(self, host: HostId, beat: int) -> None:
        """A heartbeat arrived."""
        if beat > self._closed_at.get(host, beat):
            del self._closed[host], self._closed_at[host]
        self._keep(host, lambda own: own.gone_with_beat is None or own.gone_with_beat > beat)

    def _keep(self, host: HostId, wanted: Callable[[Own], bool]) -> None:
        mine = self._own.get(host)
        if mine is None:
            return
        left = deque(own for own in mine if wanted(own))
        if len(left) < len(mine):
            self._uncount(host, [own for own in mine if not wanted(own)])
            if left:
                self._own[host] = left
            else:
                del self._own[host]

    def _uncount(self, host: HostId, gone: Iterable[Own]) -> None:
        """Take these out of the totals; totals that reach zero are not kept."""
        total = self._extra.get(host, Room())
        for own in gone:
            total = total - own.room
            name = (host, own.warm)
            self._claimed[name] -= 1
            if not self._claimed[name]:
                del self._claimed[name]
        if total == Room():
            self._extra.pop(host, None)
        else:
            self._extra[host] = total

    def forget(self, host: HostId) -> None:
        """The host is gone."""
        self._keep(host, lambda own: False)
        self._closed.pop(host, None)
        self._closed_at.pop(host, None)

    def extra(self) -> Mapping[HostId, Room]:
        """What counts on top of the views, as it is now and becomes."""
        return self._extra

    def closed(self) -> Mapping[HostId, Room]:
        """What hosts refused since they were last heard of, as it is now and becomes."""
        return self._closed

    def claimed(self) -> Mapping[tuple[HostId, WarmName], int]:
        """Warm sandboxes taken that the views still show, as it is now and becomes."""
        return self._claimed
