"""What to do about a pool's machines: pure. `ecs_view` says what is, `ecs` does it.

Words: a machine is *taken* once a task of ours was started on it, ever: it is ended with its host and not used again
(the disk has that host's identity on it). Any other one that counts is *bare*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from provisioner.capacity.ecs_view import GroupView, Machine, Task
from provisioner.capacity.port import HostStart
from shoal.contract.base import HostId


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a start does.

    Attributes:
        desired: The group's desired capacity from now; None leaves it.
        place: Which host's task to start on which machine.
        wait: Hosts whose machine is on order, in the order asked.
        full: Hosts for whom the group has no place: its largest size is reached.
        stuck: Machines to end because they did not join the cluster in time.
        late: Hosts that waited for those: they are given up, so that it is told, and whoever needs hosts asks anew.
        short: Hosts without a machine although the order for it stands: worth asking why.
    """

    desired: int | None
    place: tuple[tuple[HostStart, Machine], ...] = ()
    wait: tuple[HostStart, ...] = ()
    full: tuple[HostStart, ...] = ()
    stuck: tuple[Machine, ...] = ()
    late: tuple[HostStart, ...] = ()
    short: tuple[HostStart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Surplus:
    """What is for nobody: machines to end (each takes the desired capacity down by one), then the capacity to set."""

    end: tuple[Machine, ...] = ()
    desired: int | None = None


def order(
    view: GroupView,
    starts: Sequence[HostStart],
    under_way: Mapping[HostId, str],
    now: datetime,
    *,
    join_s: float,
) -> Order:
    """How to bring up the hosts that are asked for.

    Args:
        under_way: Hosts whose task was started a moment ago on that machine, and need not show yet.
        join_s: Seconds that a machine may take from its launch to join the cluster.
    """
    there = {task.host for task in view.tasks} | under_way.keys()
    pending = [start for start in starts if start.host not in there]
    bare = _bare(view, under_way.values())
    stuck = [each for each in bare if not each.connected and _age(each, now) > join_s]
    ready = [each for each in bare if each.ready]
    coming = len(bare) - len(stuck) - len(ready)
    place = tuple(zip(pending, ready, strict=False))
    rest = pending[len(place) :]
    counting = sum(machine.counts for machine in view.machines.values())
    taken = counting - len(bare)
    # What has been launched, with or without a use for it, stays: giving back is `surplus`'s.
    room = max(0, view.max_size - taken - len(place))
    full = rest[room:]
    rest = rest[:room]
    kept = max(0, len(rest) - len(stuck))
    rest, late = rest[:kept], rest[kept:]
    wanted = taken + len(place) + len(rest)
    after_ending = view.desired - len(stuck)
    return Order(
        desired=wanted if wanted > after_ending else None,
        place=place,
        wait=tuple(rest),
        full=tuple(full),
        stuck=tuple(stuck),
        late=tuple(late),
        short=tuple(rest[coming:]) if wanted <= view.desired and not stuck else (),
    )


def surplus(
    view: GroupView, coming: Collection[HostId], idle: Collection[str], under_way: Mapping[HostId, str]
) -> Surplus:
    """What to give back.

    Args:
        coming: Hosts that are asked for and have not come up.
        idle: Machines that were bare, or whose host was over, for a while: only these are ended, since what is read may
            lag behind what is.
    """
    there = {task.host for task in view.tasks} | under_way.keys()
    pending = sum(host not in there for host in coming)
    bare = _bare(view, under_way.values())
    # Those that are ready are kept first: they are of use soonest.
    bare.sort(key=lambda each: (not each.ready, each.id))
    counting = sum(machine.counts for machine in view.machines.values())
    spent = [each for each in left_over(view) if each.id in idle]
    end = [*spent, *(each for each in bare[pending:] if each.id in idle)]
    needed = counting - len(bare) - len(spent) + max(pending, len(bare) - (len(end) - len(spent)))
    after_ending = view.desired - len(end)
    return Surplus(end=tuple(end), desired=max(needed, view.min_size) if needed < after_ending else None)


def left_over(view: GroupView) -> list[Machine]:
    """Machines whose tasks are over and are of no host that is told of: another task of that host runs elsewhere."""
    shown = {task.machine for task in hosts(view)}
    return [
        each
        for each in view.machines.values()
        if each.counts
        and each.id not in shown
        and any(task.machine == each.id for task in view.tasks)
        and all(task.stopped for task in view.tasks if task.machine == each.id)
    ]


def idle_machines(view: GroupView, under_way: Mapping[HostId, str]) -> set[str]:
    """Machines that are of use to no host as it looks."""
    return {each.id for each in (*_bare(view, under_way.values()), *left_over(view))}


def hosts(view: GroupView) -> list[Task]:
    """The one task that is each host: of several (an answer was lost, and it was started twice) the one that runs, and
    the first of those, since its agent registered."""
    chosen: dict[HostId, Task] = {}
    for task in view.tasks:
        other = chosen.get(task.host)
        if other is None or (other.stopped and not task.stopped):
            chosen[task.host] = task
    return list(chosen.values())


def _bare(view: GroupView, others: Iterable[str]) -> list[Machine]:
    taken = {task.machine for task in view.tasks} | set(others)
    return [each for each in view.machines.values() if each.counts and each.id not in taken]


def _age(machine: Machine, now: datetime) -> float:
    return (now - machine.launched_at).total_seconds() if machine.launched_at is not None else 0.0
