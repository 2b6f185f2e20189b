"""Counting and indexing give what the placement gives that looks at every host for every sandbox."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.board import Board
from provisioner.packing import Packing, by_size, hosts_for
from provisioner.placement import Ask, HostView, Own, PlacementMemory, Room, choose
from shoal.contract.base import HostId
from shoal.contract.states import Substrate

SHAPE = Room(cpu_millis=8000, memory_mib=8192, disk_mib=65_536, sandboxes=6)
KINDS = [(f"sha256:{name}", Substrate.CONTAINER, 256) for name in "abc"]


class _First:
    """No chance at all."""

    def sample(self, population: Sequence[HostView], k: int) -> list[HostView]:
        return list(population[:k])


rooms = st.builds(
    Room,
    cpu_millis=st.integers(0, 4000),
    memory_mib=st.integers(0, 4000),
    disk_mib=st.sampled_from([256, 1024, 16_384]),
    sandboxes=st.just(1),
)
substrates = st.sampled_from([Substrate.CONTAINER, Substrate.GVISOR])
asks = st.builds(
    lambda substrate, room, warm: Ask(pool="default", substrate=substrate, room=room, warm=warm),
    substrates,
    rooms,
    st.sampled_from(KINDS),
)
hosts = st.lists(
    st.builds(
        lambda n, open, pool, held, warm, layers, kinds, load: HostView(
            id=HostId(f"h{n:02d}"),
            pool=pool,
            open=open,
            substrates=frozenset(kinds),
            capacity=SHAPE,
            held=held,
            warm=warm,
            layers=layers,
            load=load,
        ),
        st.integers(0, 40),
        st.booleans(),
        st.sampled_from(["default", "default", "other"]),
        rooms,
        st.dictionaries(st.sampled_from(KINDS), st.integers(0, 2)),
        st.frozensets(st.sampled_from(["l1", "l2", "l3"])),
        st.sets(substrates, min_size=1),
        st.sampled_from([0.0, 0.5]),
    ),
    max_size=12,
    unique_by=lambda host: host.id,
)


def one_by_one(hosts: list[HostView], asks: Mapping[Ask, int]) -> tuple[dict[Ask, int], Counter[str]]:
    """What is left, and how many went to each host, by the real placement with a look at every host."""
    views = {host.id: host for host in hosts}
    left: Counter[Ask] = Counter()
    taken: Counter[str] = Counter()
    for ask, count in asks.items():
        for _ in range(count):
            chosen = choose(ask, views.values(), _First(), sample=len(views) or 1)
            if chosen is None:
                left[ask] += 1
            else:
                views[chosen.id] = replace(chosen, held=chosen.held + ask.room)
                taken[chosen.id] += 1
    return dict(left), taken


@settings(deadline=None)
@given(hosts, st.lists(st.tuples(asks, st.integers(1, 9)), max_size=5), hosts)
def test_counting_places_as_asking_one_by_one(
    first: list[HostView], wanted: list[tuple[Ask, int]], later: list[HostView]
) -> None:
    """Equal asks packed by count land on the hosts where the placement puts them one by one, also on hosts that are
    added afterwards."""
    kinds = by_size(wanted, SHAPE)
    packing = Packing(first)
    left = packing.place_all(kinds)
    expected, taken = one_by_one(first, kinds)
    assert left == expected
    assert {host.id: packing.taken(host.id) for host in first if packing.taken(host.id)} == taken
    added = [replace(host, id=HostId(f"new{host.id}")) for host in later]
    for host in added:
        packing.add(host)
    assert packing.place_all(left) == one_by_one(added, left)[0]


@settings(deadline=None)
@given(st.lists(st.tuples(asks, st.integers(1, 60)), max_size=5), st.integers(0, 40))
def test_new_hosts_are_filled_one_after_the_other(wanted: list[tuple[Ask, int]], limit: int) -> None:
    """As many hosts as it takes when each new one takes what fits, no more than the limit; the rest is told."""
    kinds = by_size(wanted, SHAPE)
    left, started = dict(kinds), 0
    while left and started < limit:
        empty = HostView(
            id=HostId("new"),
            pool="default",
            open=True,
            substrates=frozenset(Substrate),
            capacity=SHAPE,
            held=Room(),
        )
        rest, taken = one_by_one([empty], left)
        if not taken:
            break
        left, started = rest, started + 1
    number, remaining = hosts_for(kinds, SHAPE, limit)
    assert number == started
    assert sum(remaining.values()) == sum(left.values())
    rooms_left: Counter[Room] = Counter()
    for ask, count in left.items():
        rooms_left[ask.room] += count
    for ask, count in remaining.items():
        rooms_left[ask.room] -= count
    assert not any(rooms_left.values())


@settings(deadline=None)
@given(
    hosts,
    asks,
    st.frozensets(st.sampled_from(["l1", "l2"])),
    st.dictionaries(st.sampled_from(["h01", "h02", "h03"]), rooms),
    st.dictionaries(st.sampled_from(["h01", "h02", "h03"]), st.integers(0, 2)),
    st.dictionaries(st.sampled_from(["h05", "h06"]), rooms),
    st.lists(hosts, max_size=2),
)
def test_the_board_chooses_as_the_placement(
    now: list[HostView],
    ask: Ask,
    layers: frozenset[str],
    more: dict[str, Room],
    taken: dict[str, int],
    refused: dict[str, Room],
    before: list[list[HostView]],
) -> None:
    """Whatever was on the board before, its choice with every host compared is that of the placement."""
    board = Board()
    for past in before:
        for host in past:
            board.put(host)
    for host in board.views():
        if host.id not in {each.id for each in now}:
            board.drop(host.id)
    for host in now:
        board.put(host)
    ask = replace(ask, layers=layers)
    extra = {HostId(id): room for id, room in more.items()}
    claimed = {(HostId(id), ask.warm): count for id, count in taken.items()}
    tried = frozenset({HostId("h04")})
    closed = {HostId(id): room for id, room in refused.items()}
    found = board.choose(
        ask, random.Random(1), sample=100, extra=extra, claimed=claimed, tried=tried, closed=closed
    )
    expected = choose(
        ask, now, _First(), sample=100, extra=extra, claimed=claimed, tried=tried, closed=closed
    )
    assert found == expected


def test_the_board_draws_evenly_among_hosts_that_fit() -> None:
    """Every host that fits is chosen about as often, wherever it stands, and none that does not fit."""
    board = Board()
    for n in range(100):
        held = SHAPE if n % 2 else Room()
        board.put(
            HostView(
                id=HostId(f"h{n:02d}"),
                pool="default",
                open=True,
                substrates=frozenset({Substrate.CONTAINER}),
                capacity=SHAPE,
                held=held,
            )
        )
    room = Room(cpu_millis=10, memory_mib=10, disk_mib=256, sandboxes=1)
    ask = Ask(pool="default", substrate=Substrate.CONTAINER, room=room, warm=KINDS[0])
    chance = random.Random(3)
    chosen: Counter[str] = Counter()
    for _ in range(5000):
        host = board.choose(ask, chance, sample=1)
        assert host is not None
        chosen[host.id] += 1
    assert set(chosen) == {f"h{n:02d}" for n in range(0, 100, 2)}
    assert max(chosen.values()) < 1.5 * 100
    assert min(chosen.values()) > 0.5 * 100


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "refused", "answered", "confirmed", "heard", "counted", "forget"]),
                  st.integers(0, 3), rooms),
        max_size=40,
    )
)  # fmt: skip
def test_totals_are_the_sum_of_the_placements(steps: list[tuple[str, int, Room]]) -> None:
    """What counts on top of the views is at every moment the sum over the placements that are remembered."""
    memory = PlacementMemory()
    begun: list[tuple[HostId, Own]] = []
    for moment, (step, n, room) in enumerate(steps):
        host = HostId(f"h{n % 2}")
        if step == "begin":
            begun.append((host, memory.begin(host, room, KINDS[n % 2])))
        elif step == "heard":
            memory.heard(host, moment)
        elif step == "counted":
            memory.counted(host, moment)
        elif step == "forget":
            memory.forget(host)
        elif begun:
            host, own = begun[n % len(begun)]
            if step == "refused":
                memory.refused(host, own)
            elif step == "answered":
                memory.answered(own, moment)
            else:
                memory.confirmed(own, moment)
        totals: dict[HostId, Room] = {}
        claimed: Counter[tuple[HostId, object]] = Counter()
        for host, mine in memory._own.items():
            for own in mine:
                totals[host] = totals.get(host, Room()) + own.room
                claimed[(host, own.warm)] += 1
        assert memory.extra() == totals
        assert memory.claimed() == dict(claimed)


def test_a_host_that_refused_is_not_asked_for_as_much_until_it_is_heard_of() -> None:
    """After a refusal a host is left alone for sandboxes as large; smaller ones may be tried; a heartbeat opens it."""
    memory, id = PlacementMemory(), HostId("a")
    host = HostView(
        id=id,
        pool="default",
        open=True,
        substrates=frozenset({Substrate.CONTAINER}),
        capacity=SHAPE,
        held=Room(),
    )
    board = Board()
    board.put(host)

    def takes(memory_mib: int) -> bool:
        room = Room(cpu_millis=10, memory_mib=memory_mib, disk_mib=256, sandboxes=1)
        ask = Ask(pool="default", substrate=Substrate.CONTAINER, room=room, warm=KINDS[0])
        return board.choose(ask, random.Random(1), closed=memory.closed()) is not None

    own = memory.begin(id, Room(cpu_millis=10, memory_mib=500, disk_mib=256, sandboxes=1), KINDS[0])
    memory.turned_away(id, own, 7)
    assert (takes(500), takes(600), takes(400)) == (False, False, True)
    memory.heard(id, 7)
    assert not takes(500)
    memory.heard(id, 8)
    assert takes(500)
