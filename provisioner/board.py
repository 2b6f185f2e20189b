"""Hosts indexed by what placement looks for: the same choice as `placement.choose`, without a look at every host.

`choose` filters all hosts and then draws a few of the best rank. Drawing hosts of that rank until enough of them fit
gives any few of the fitting ones the same chance, and looks at a handful of hosts however many there are; only where
few fit are all of the rank looked at. Pure but for the chance that is handed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from provisioner.placement import Ask, HostView, Room, WarmName, costs, filled
from shoal.contract.base import HostId
from shoal.contract.states import Substrate

#: Draws per host wanted, after which the fitting ones are too rare to be found by chance.
_DRAWS = 8
_NONE = Room()
_Name = TypeVar("_Name")
_Kind = tuple[str, frozenset[Substrate], frozenset[str]]


class Chance(Protocol):
    """Where the draw comes from (`random.Random` fits)."""

    def sample(self, population: Sequence[HostView], k: int) -> list[HostView]: ...

    def randrange(self, stop: int, /) -> int: ...


class _Group:
    """Hosts that are alike, in no order: one is drawn, added and taken away in constant time."""

    __slots__ = ("_place", "hosts")

    def __init__(self) -> None:
        self.hosts: list[HostView] = []
        self._place: dict[HostId, int] = {}

    def put(self, host: HostView) -> None:
        place = self._place.get(host.id)
        if place is None:
            self._place[host.id] = len(self.hosts)
            self.hosts.append(host)
        else:
            self.hosts[place] = host

    def drop(self, id: HostId) -> None:
        place = self._place.pop(id, None)
        if place is None:
            return
        last = self.hosts.pop()
        if last.id != id:
            self.hosts[place] = last
            self._place[last.id] = place


class Board:
    """The hosts that a replica knows of."""

    def __init__(self) -> None:
        self._views: dict[HostId, HostView] = {}
        self._kinds: dict[_Kind, _Group] = {}
        self._warm: dict[WarmName, _Group] = {}

    def put(self, view: HostView) -> None:
        """A host as it is now."""
        before = self._views.get(view.id)
        if before is not None:
            if _kind(before) != _kind(view) or not view.open:
                _leave(self._kinds, _kind(before), view.id)
            for name in before.warm:
                if not view.open or view.warm.get(name, 0) <= 0:
                    _leave(self._warm, name, view.id)
        self._views[view.id] = view
        if view.open:
            self._kinds.setdefault(_kind(view), _Group()).put(view)
            for name, count in view.warm.items():
                if count > 0:
                    self._warm.setdefault(name, _Group()).put(view)

    def drop(self, id: HostId) -> None:
        """A host is gone."""
        view = self._views.pop(id, None)
        if view is not None:
            _leave(self._kinds, _kind(view), id)
            for name in view.warm:
                _leave(self._warm, name, id)

    def get(self, id: HostId) -> HostView | None:
        """A host, or None."""
        return self._views.get(id)

    def views(self) -> list[HostView]:
        """All hosts."""
        return list(self._views.values())

    def choose(
        self,
        ask: Ask,
        chance: Chance,
        *,
        sample: int = 4,
        extra: Mapping[HostId, Room] | None = None,
        claimed: Mapping[tuple[HostId, WarmName], int] | None = None,
        tried: frozenset[HostId] = frozenset(),
        closed: Mapping[HostId, Room] | None = None,
    ) -> HostView | None:
        """As `placement.choose`, over the hosts of the board."""
        extra, claimed, closed = extra or {}, claimed or {}, closed or {}

        def takes(host: HostView) -> bool:
            return (
                host.pool == ask.pool
                and host.id not in tried
                and ask.substrate in host.substrates
                and not (host.id in closed and closed[host.id].fits(ask.room))
                and _fits(host, extra.get(host.id, _NONE), ask.room)
            )

        def is_warm(host: HostView) -> bool:
            return takes(host) and host.warm[ask.warm] > claimed.get((host.id, ask.warm), 0)

        warm = self._warm.get(ask.warm)
        if warm is not None:
            drawn = _draw([warm], is_warm, chance, sample)
            if drawn:
                return min(drawn, key=lambda host: filled(host, ask, extra))
        drawn = []
        ranks = self._ranked(ask)
        while ranks and not drawn:
            drawn = _draw(ranks.pop(0), takes, chance, sample)
        if ranks:
            drawn += _draw([group for rank in ranks for group in rank], takes, chance, sample)
        return min(drawn, key=lambda host: costs(host, ask, extra), default=None)

    def _ranked(self, ask: Ask) -> list[list[_Group]]:
        """The groups that may take it, those with most of its layers first."""
        ranks: dict[int, list[_Group]] = {}
        for (pool, substrates, layers), group in self._kinds.items():
            if pool == ask.pool and ask.substrate in substrates:
                ranks.setdefault(len(ask.layers & layers), []).append(group)
        return [ranks[overlap] for overlap in sorted(ranks, reverse=True)]


def _leave(groups: dict[_Name, _Group], name: _Name, id: HostId) -> None:
    group = groups.get(name)
    if group is not None:
        group.drop(id)
        if not group.hosts:
            del groups[name]


def _kind(view: HostView) -> _Kind:
    return (view.pool, view.substrates, view.layers)


def _fits(host: HostView, extra: Room, room: Room) -> bool:
    held, capacity = host.held, host.capacity
    return (
        held.sandboxes + extra.sandboxes + room.sandboxes <= capacity.sandboxes
        and held.memory_mib + extra.memory_mib + room.memory_mib <= capacity.memory_mib
        and held.cpu_millis + extra.cpu_millis + room.cpu_millis <= capacity.cpu_millis
        and held.disk_mib + extra.disk_mib + room.disk_mib <= capacity.disk_mib
    )


def _draw(
    groups: Sequence[_Group], takes: Callable[[HostView], bool], chance: Chance, sample: int
) -> list[HostView]:
    """Up to `sample` of the hosts that can take it, each with the same chance."""
    ends = list(accumulate(len(group.hosts) for group in groups))
    total = ends[-1]
    if total > _DRAWS * sample:
        found: list[HostView] = []
        seen: set[int] = set()
        for _ in range(_DRAWS * sample):
            place = chance.randrange(total)
            if place in seen:
                continue
            seen.add(place)
            group = bisect_right(ends, place)
            host = groups[group].hosts[place - (ends[group - 1] if group else 0)]
            if takes(host):
                found.append(host)
                if len(found) == sample:
                    return found
    fitting = [host for group in groups for host in group.hosts if takes(host)]
    if len(fitting) <= sample:
        return fitting
    # In an order of their own: the same chance draws the same hosts, however they came onto the board.
    return chance.sample(sorted(fitting, key=lambda host: host.id), sample)
