"""The least host-hours that anyone could have paid who knew all that comes: what a run's host-hours are held against.

Definition. Every session holds its room from the moment it is asked for until its hold is over: nobody waits. At every
moment there are as many hosts as the rooms of the sessions then held need when they are poured into hosts without
loss: ceil(sum / capacity) of the scarcest resource, as if sessions could be moved at any time. Each start of a host is
paid with the time that a host takes to come up; a host for which the need pauses is kept when the pause is shorter than
that, else ended and started again, at once and exactly in time. No policy that may not move sessions does better, and
most that is asked of it by long sessions on otherwise empty hosts counts against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from provisioner.placement import Room

#: A session: its room, from when to when (seconds).
Held = tuple[Room, float, float]


def needed(held: Iterable[Held], capacity: Room) -> list[tuple[float, int]]:
    """How many hosts are needed from which moment on."""
    changes: list[tuple[float, int, Room]] = []
    for room, start_s, end_s in held:
        changes += [(start_s, 1, room), (end_s, -1, room)]
    # What ends at a moment makes room for what begins then.
    changes.sort(key=lambda each: (each[0], each[1]))
    cpu = memory = disk = sandboxes = 0
    steps: list[tuple[float, int]] = []
    for at_s, sign, room in changes:
        cpu += sign * room.cpu_millis
        memory += sign * room.memory_mib
        disk += sign * room.disk_mib
        sandboxes += sign * room.sandboxes
        hosts = math.ceil(
            max(
                cpu / max(1, capacity.cpu_millis),
                memory / max(1, capacity.memory_mib),
                disk / max(1, capacity.disk_mib),
                sandboxes / max(1, capacity.sandboxes),
            )
        )
        if steps and steps[-1][0] == at_s:
            steps[-1] = (at_s, hosts)
        elif not steps or steps[-1][1] != hosts:
            steps.append((at_s, hosts))
    return steps


def host_seconds(steps: Sequence[tuple[float, int]], start_s: float, until_s: float) -> float:
    """What those hosts cost at the least, each start costing `start_s`, until the end of the run."""
    total = 0.0
    since: list[float] = []
    ended: dict[int, float] = {}
    for at_s, hosts in steps:
        at_s = min(at_s, until_s)
        while len(since) < hosts:
            level = len(since)
            pause = at_s - ended[level] if level in ended else math.inf
            total += min(pause, start_s)
            since.append(at_s)
        while len(since) > hosts:
            total += at_s - since.pop()
            ended[len(since)] = at_s
    return total + sum(until_s - at_s for at_s in since)
