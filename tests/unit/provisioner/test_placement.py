"""Placement: what it never does, what it prefers, and bursts on a stale view."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from provisioner.placement import (
    DISK_CLASSES_MIB,
    LAYERS_WORTH,
    Ask,
    HostView,
    PlacementMemory,
    Room,
    choose,
    disk_class,
)
from shoal.contract.base import HostId
from shoal.contract.states import Substrate

SHAPE = Room(cpu_millis=8000, memory_mib=8192, disk_mib=65_536, sandboxes=100)
ONE = Room(cpu_millis=10, memory_mib=10, disk_mib=256, sandboxes=1)
WARM = ("sha256:a", Substrate.CONTAINER, 256)


def view(id: str, **changes: object) -> HostView:
    about: dict[str, object] = {
        "id": HostId(id),
        "pool": "default",
        "open": True,
        "substrates": frozenset({Substrate.CONTAINER}),
        "capacity": SHAPE,
        "held": Room(),
    }
    return HostView(**(about | changes))  # type: ignore[arg-type]


def ask(**changes: object) -> Ask:
    about: dict[str, object] = {
        "pool": "default",
        "substrate": Substrate.CONTAINER,
        "room": ONE,
        "warm": WARM,
        "layers": frozenset({"l1", "l2"}),
    }
    return Ask(**(about | changes))  # type: ignore[arg-type]


rooms = st.builds(
    Room,
    cpu_millis=st.integers(0, 10_000),
    memory_mib=st.integers(0, 10_000),
    disk_mib=st.integers(0, 100_000),
    sandboxes=st.integers(0, 120),
)
views = st.lists(
    st.builds(
        lambda n, open, pool, held, warm, layers, substrates: view(
            f"h{n}", open=open, pool=pool, held=held, warm={WARM: warm}, layers=layers, substrates=substrates
        ),
        st.integers(0, 50),
        st.booleans(),
        st.sampled_from(["default", "other"]),
        rooms,
        st.integers(0, 3),
        st.frozensets(st.sampled_from(["l1", "l2", "l3"])),
        st.frozensets(st.sampled_from(list(Substrate))),
    ),
    max_size=12,
    unique_by=lambda host: host.id,
)


@given(views, st.integers(0, 2**32), st.integers(1, 4), st.dictionaries(st.sampled_from(["h1", "h2"]), rooms))
def test_only_hosts_that_can_take_it(
    hosts: list[HostView], seed: int, sample: int, more: dict[str, Room]
) -> None:
    """The chosen host is open, of the pool and substrate, has the room with what is on its way, and was not tried."""
    extra = {HostId(id): room for id, room in more.items()}
    chosen = choose(
        ask(), hosts, random.Random(seed), sample=sample, extra=extra, tried=frozenset({HostId("h3")})
    )
    fitting = [
        host
        for host in hosts
        if host.open
        and host.pool == "default"
        and Substrate.CONTAINER in host.substrates
        and host.id != "h3"
        and (host.held + extra.get(host.id, Room()) + ONE).fits(host.capacity)
    ]
    assert (chosen is None) == (not fitting)
    assert chosen is None or chosen in fitting


@given(views, st.integers(0, 2**32))
def test_warm_before_any_then_fill_and_layers(hosts: list[HostView], seed: int) -> None:
    """A host with a warm sandbox is taken before any without, the least filled of them; else the least filled, where
    all the layers are worth a twentieth of a host."""
    chosen = choose(ask(), hosts, random.Random(seed), sample=100)
    if chosen is None:
        return

    def cost(host: HostView) -> tuple[bool, float]:
        cold = host.warm.get(WARM, 0) == 0
        lacks = 1 - len(host.layers & {"l1", "l2"}) / 2
        return (cold, (host.held + ONE).share_of(host.capacity) + (LAYERS_WORTH * lacks if cold else 0.0))

    fitting = [host for host in hosts if choose(ask(), [host], random.Random(0)) is not None]
    assert cost(chosen) == min(cost(host) for host in fitting)


def test_a_burst_from_a_new_image_does_not_fill_the_few_hosts_that_have_it() -> None:
    """Few hosts with the layers draw a small burst; a large one spreads over all."""
    chance = random.Random(5)
    hosts = [view(f"h{n:02d}", layers=frozenset({"l1", "l2"} if n < 2 else ())) for n in range(50)]
    small = ask(room=Room(cpu_millis=10, memory_mib=1, disk_mib=1, sandboxes=0))
    memory = PlacementMemory()
    load: Counter[str] = Counter()
    for n in range(5000):
        chosen = choose(small, hosts, chance, extra=memory.extra())
        assert chosen is not None
        memory.begin(chosen.id, small.room, WARM)
        load[chosen.id] += 1
        if n == 50:
            assert set(load) == {"h00", "h01"}
    # A twentieth of a host is 40 of these.
    assert max(load.values()) <= 100 + 40
    assert len(load) == 50


def test_a_claimed_warm_sandbox_is_not_counted_twice() -> None:
    """Warm ones that this replica took do not attract the next session."""
    hosts = [view("a", warm={WARM: 1}, held=Room(cpu_millis=4000)), view("b")]
    assert choose(ask(), hosts, random.Random(1)).id == "a"  # type: ignore[union-attr]
    claimed = {(HostId("a"), WARM): 1}
    assert choose(ask(), hosts, random.Random(1), claimed=claimed).id == "b"  # type: ignore[union-attr]


def spread(sample: int, *, remember: bool) -> float:
    """Max over mean load after a burst of 5,000 by 10 replicas on one stale view of 50 hosts."""
    chance = random.Random(5)
    hosts = [view(f"h{n:02d}", held=Room(cpu_millis=n)) for n in range(50)]
    memories = [PlacementMemory() for _ in range(10)]
    load: Counter[str] = Counter()
    for n in range(5000):
        memory = memories[n % 10]
        small = ask(room=Room(cpu_millis=10, memory_mib=1, disk_mib=1, sandboxes=0), layers=frozenset())
        chosen = choose(small, hosts, chance, sample=sample, extra=memory.extra() if remember else {})
        assert chosen is not None
        if remember:
            memory.begin(chosen.id, small.room, WARM)
        load[chosen.id] += 1
    return max(load.values()) / (5000 / 50)


def test_a_burst_on_a_stale_view_does_not_herd() -> None:
    """With a few choices and its own placements counted, load stays near the mean; the least loaded of all herds."""
    assert spread(4, remember=True) < 1.3
    assert spread(50, remember=False) > 10


def test_own_placements_count_until_heartbeats_show_them() -> None:
    """A placement counts from its beginning; a refusal not at all; an answer until the second heartbeat after it."""
    memory = PlacementMemory()
    host = HostId("a")
    own, other = memory.begin(host, ONE, WARM), memory.begin(host, ONE, WARM)
    assert memory.extra() == {host: ONE + ONE}
    assert memory.claimed() == {(host, WARM): 2}
    memory.refused(host, other)
    assert memory.extra() == {host: ONE}
    memory.heard(host, 100)
    assert memory.extra() == {host: ONE}
    memory.answered(own, 100)
    memory.heard(host, 101)
    assert memory.extra() == {host: ONE}
    memory.heard(host, 102)
    assert memory.extra() == {}


def test_a_placement_that_was_written_down_is_not_counted_twice() -> None:
    """Once what a host holds was counted after a placement was written down, it counts there and not here."""
    memory = PlacementMemory()
    host = HostId("a")
    own = memory.begin(host, ONE, WARM)
    memory.answered(own, 100)
    memory.counted(host, 5.0)
    assert memory.extra() == {host: ONE}
    memory.confirmed(own, 6.0)
    memory.counted(host, 5.9)
    assert memory.extra() == {host: ONE}
    memory.counted(host, 6.0)
    assert memory.extra() == {}


@given(st.integers(1, 1_048_576))
def test_disk_classes_round_up(disk_mib: int) -> None:
    """A disk's class holds what was asked for, and is one of the few."""
    assert disk_class(disk_mib) >= disk_mib
    assert disk_class(disk_mib) in DISK_CLASSES_MIB
