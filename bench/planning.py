"""What the decisions cost: a tick of the planner, and the choice of a host. CPU time, since both only compute.

`python -m bench.planning` prints them alone.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from provisioner.board import Board
from provisioner.placement import Ask, HostView, PlacementMemory, Room
from provisioner.plan import HostFacts, InstanceFacts, Policy, PoolPolicy, View, Waiting
from provisioner.planner import plan
from shoal.contract.base import HostId, SessionId
from shoal.contract.states import HostState, Substrate

_NOW = datetime(2026, 1, 1, tzinfo=UTC)
_SHAPE = Room(cpu_millis=64_000, memory_mib=131_072, disk_mib=1 << 20, sandboxes=100)


def planning() -> dict[str, object]:
    """Seconds of CPU of a tick, by hosts, waiting sessions and kinds of those; microseconds of one placement."""
    ticks = {
        f"{hosts} hosts, {waiting} waiting, {kinds} kinds": _tick_s(hosts, waiting, kinds)
        for hosts, waiting, kinds in ((1000, 20_000, 1), (1000, 20_000, 50), (5000, 50_000, 50))
    }
    return {
        "plan_cpu_s": ticks,
        "place_cpu_us": {f"{hosts} hosts": _place_us(hosts) for hosts in (100, 1000, 5000)},
    }


def _host(number: int) -> HostFacts:
    sessions = number % 50
    id = HostId(f"h{number:05d}")
    return HostFacts(
        view=_view(id, sessions),
        state=HostState.READY,
        created_at=_NOW - timedelta(hours=1),
        registered_at=_NOW - timedelta(minutes=59),
        heard_at=_NOW,
        busy_at=_NOW,
        instance=InstanceFacts(id=f"i-{id}", host=id, alive=True),
        sessions=sessions,
        sandboxes=sessions,
    )


def _view(id: HostId, sessions: int) -> HostView:
    return HostView(
        id=id,
        pool="default",
        open=True,
        substrates=frozenset({Substrate.CONTAINER}),
        capacity=_SHAPE,
        held=Room(
            cpu_millis=100 * sessions,
            memory_mib=1024 * sessions,
            disk_mib=4096 * sessions,
            sandboxes=sessions,
        ),
    )


def _waiting(number: int, kinds: int) -> Waiting:
    return Waiting(
        session=SessionId(f"s{number:06d}"),
        pool="default",
        substrate=Substrate.CONTAINER,
        room=Room(cpu_millis=100, memory_mib=1024 + number % kinds, disk_mib=4096, sandboxes=1),
        warm=(f"sha256:{number % kinds}", Substrate.CONTAINER, 4096),
        expires_at=_NOW + timedelta(hours=1),
    )


def _tick_s(hosts: int, waiting: int, kinds: int) -> float:
    pool = PoolPolicy(
        name="default",
        min_hosts=0,
        max_hosts=20_000,
        host_room=_SHAPE,
        idle_to_zero_s=300,
        scale_in_cooldown_s=60,
        warm_default=2,
        warm_max=16,
        warm_keep_s=900,
        headroom_share=0.1,
        scale_in_margin=0.1,
    )
    policy = Policy(pools=(pool,), lease_s=30, lost_margin_s=10, host_start_s=300, tick_s=2)
    view = View(
        hosts=tuple(_host(number) for number in range(hosts)),
        waiting=tuple(_waiting(number, kinds) for number in range(waiting)),
    )
    return round(_least(lambda: plan(view, policy, _NOW)), 3)


def _place_us(hosts: int) -> float:
    board, memory, chance = Board(), PlacementMemory(), random.Random(1)
    for number in range(hosts):
        board.put(_view(HostId(f"h{number:05d}"), number % 50))
    room = Room(cpu_millis=1, memory_mib=1, disk_mib=1, sandboxes=0)
    ask = Ask(pool="default", substrate=Substrate.CONTAINER, room=room, warm=("", Substrate.CONTAINER, 0))

    def burst() -> None:
        for _ in range(1000):
            host = board.choose(ask, chance, extra=memory.extra(), claimed=memory.claimed())
            assert host is not None
            memory.begin(host.id, room, ask.warm)

    return round(_least(burst) * 1000, 1)


def _least(work: Callable[[], object], times: int = 3) -> float:
    """The least CPU time of a few tries, in seconds."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


if __name__ == "__main__":
    print(json.dumps(planning(), indent=2))
