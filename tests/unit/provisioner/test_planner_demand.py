"""The planner's demand: headroom, steps, margins, prepares and what it remembers of a pool."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.model import PoolState, Source
from provisioner.observe import policy_of
from provisioner.placement import HostView, Room, warm_key, warm_name
from provisioner.plan import (
    HostFacts,
    InstanceFacts,
    Plan,
    Policy,
    PoolPolicy,
    Recent,
    View,
    Waiting,
    Wanted,
)
from provisioner.planner import FILL_S, lead_of, plan
from provisioner.settings import ProvisionerSettings
from shoal.contract.base import HostId, SessionId
from shoal.contract.states import HostState, Substrate

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SHAPE = Room(cpu_millis=8000, memory_mib=8192, disk_mib=65_536, sandboxes=8)
ONE = Room(cpu_millis=1000, memory_mib=1024, disk_mib=4096, sandboxes=1)
DIGEST = "sha256:" + "0" * 64
KEY = warm_key(DIGEST, Substrate.CONTAINER, 4096)
SOURCE = Source(digest=DIGEST, image_digest=DIGEST)


def policy(**changes: object) -> Policy:
    about: dict[str, object] = {
        "name": "default",
        "min_hosts": 0,
        "max_hosts": 40,
        "host_room": SHAPE,
        "idle_to_zero_s": 300.0,
        "scale_in_cooldown_s": 60.0,
        "warm_default": 0,
        "warm_max": 0,
        "warm_keep_s": 900.0,
    }
    pool = PoolPolicy(**(about | changes))  # type: ignore[arg-type]
    return Policy(pools=(pool,), lease_s=30, lost_margin_s=10, host_start_s=300, tick_s=2.0)


def ready(id: str, sessions: int = 0, idle_s: float = 0.0, **changes: object) -> HostFacts:
    held = Room(
        cpu_millis=1000 * sessions, memory_mib=1024 * sessions, disk_mib=4096 * sessions, sandboxes=sessions
    )
    about: dict[str, object] = {
        "view": HostView(
            id=HostId(id),
            pool="default",
            open=True,
            substrates=frozenset({Substrate.CONTAINER}),
            capacity=SHAPE,
            held=held,
        ),
        "state": HostState.READY,
        "created_at": NOW - timedelta(hours=1),
        "registered_at": NOW - timedelta(hours=1) + timedelta(seconds=40),
        "heard_at": NOW,
        "busy_at": NOW - timedelta(seconds=idle_s),
        "instance": InstanceFacts(id=f"i-{id}", host=HostId(id), alive=True),
        "sessions": sessions,
        "sandboxes": sessions,
    }
    return HostFacts(**(about | changes))  # type: ignore[arg-type]


def coming(id: str) -> HostFacts:
    view = dataclasses.replace(ready(id).view, open=False, capacity=Room())
    return ready(
        id,
        view=view,
        state=HostState.STARTING,
        created_at=NOW,
        registered_at=None,
        heard_at=None,
        busy_at=None,
    )


def waits(count: int, room: Room = ONE) -> tuple[Waiting, ...]:
    return tuple(
        Waiting(
            session=SessionId(f"s{n}"),
            pool="default",
            substrate=Substrate.CONTAINER,
            room=room,
            warm=warm_name(KEY),
            expires_at=NOW + timedelta(hours=1),
        )
        for n in range(count)
    )


def wanted(count: int, by_s: float | None = None, claimed: int = 0) -> Wanted:
    return Wanted(
        id="p",
        pool="default",
        key=KEY,
        source=SOURCE,
        room=ONE,
        count=count,
        claimed=claimed,
        by=None if by_s is None else NOW + timedelta(seconds=by_s),
        expires_at=NOW + timedelta(hours=2),
    )


def starts(view: View, rules: Policy | None = None, now: datetime = NOW) -> int:
    return plan(view, rules or policy(), now).start.get("default", 0)


def settled(view: View, decided: Plan) -> View:
    """The view once what was started has come."""
    new = tuple(ready(f"new{n}") for n in range(decided.start.get("default", 0)))
    states = {**view.pools, **{state.name: state for state in decided.pools}}
    return dataclasses.replace(view, hosts=(*view.hosts, *new), pools=states)


# -- headroom, steps, margin --


def test_headroom_is_kept_beside_demand_and_not_without() -> None:
    """So many sandboxes, or that share of what runs and waits, are kept free while there is demand; none at rest."""
    few = policy(headroom_sandboxes=8)
    assert starts(View(waiting=waits(8)), few) == 2
    share = policy(headroom_share=0.5)
    assert starts(View(waiting=waits(16)), share) == 3
    busy = View(hosts=(ready("a", 8), ready("b", 8)))
    assert starts(busy, share) == 1
    assert starts(busy, policy()) == 0
    assert plan(View(), policy(headroom_sandboxes=8, headroom_share=1.0), NOW).empty


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 5), st.integers(0, 20), st.sampled_from([0.0, 0.1, 0.5]))
def test_headroom_is_there_once_the_hosts_are(waiting: int, busy: int, number: int, share: float) -> None:
    """With the hosts that a plan starts, there is room for what waits and the headroom; the next starts none."""
    rules = policy(headroom_sandboxes=number, headroom_share=share)
    view = View(hosts=tuple(ready(f"h{n}", n % 9) for n in range(busy)), waiting=waits(waiting))
    decided = plan(view, rules, NOW)
    after = settled(view, decided)
    free = sum(8 - each.sessions for each in after.hosts)
    running = sum(each.sessions for each in after.hosts)
    demand = running + waiting
    spare = max(number, share * demand) if demand else 0
    assert free >= waiting + spare
    assert starts(after, rules) == 0


def test_a_step_is_no_larger_than_it_may_be() -> None:
    """Hosts are started in one step, or in steps of `max_step`; the next look goes on."""
    assert starts(View(waiting=waits(80)), policy()) == 10
    rules = policy(max_step=4)
    view = View(waiting=waits(80))
    assert starts(view, rules) == 4
    more = dataclasses.replace(view, hosts=tuple(coming(f"c{n}") for n in range(4)))
    assert starts(more, rules) == 4
    most = dataclasses.replace(view, hosts=tuple(coming(f"c{n}") for n in range(8)))
    assert starts(most, rules) == 2


def test_scale_in_leaves_a_margin() -> None:
    """An idle host goes only when the others keep a tenth of the demand free: the next ripple needs no start."""
    rules = policy(scale_in_margin=0.1)
    tight = View(hosts=(*(ready(f"h{n}", 8) for n in range(5)), ready("idle", 0, idle_s=100)))
    assert plan(tight, rules, NOW).drain == ()
    assert plan(tight, policy(), NOW).drain == ("idle",)
    loose = View(hosts=(*(ready(f"h{n}", 6) for n in range(5)), ready("idle", 0, idle_s=100)))
    assert plan(loose, rules, NOW).drain == ("idle",)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 59.0, 61.0, 299.0, 301.0])), max_size=8))
def test_drained_hosts_are_exactly_the_idle_ones(about: list[tuple[int, float]]) -> None:
    """Hosts without sessions that have been idle for the cool-down (all: for `idle_to_zero_s` when nothing runs) are
    drained, and no others, where nothing else is wanted; but for the last one while there is no other."""
    hosts = tuple(ready(f"h{n}", sessions, idle_s=idle_s) for n, (sessions, idle_s) in enumerate(about))
    drained = set(plan(View(hosts=hosts), policy(), NOW).drain)
    busy = any(host.sessions for host in hosts)
    limit_s = 60 if busy else 300
    expected = {
        host.view.id
        for host, (sessions, idle_s) in zip(hosts, about, strict=True)
        if not sessions and idle_s >= limit_s
    }
    assert drained == expected


def test_a_steady_stream_does_not_keep_idle_hosts() -> None:
    """Somebody always waits in a pool that is in use; hosts that this needs not go all the same."""
    hosts = (ready("a", 1), ready("b", 1), *(ready(f"i{n}", 0, idle_s=100) for n in range(3)))
    assert set(plan(View(hosts=hosts, waiting=waits(3)), policy(), NOW).drain) == {"i0", "i1", "i2"}
    # What waits needs 26 places, and the two have 14: two of the three stay, those that were busy last.
    hosts = (*hosts[:4], ready("i2", 0, idle_s=200))
    assert plan(View(hosts=hosts, waiting=waits(26)), policy(), NOW).drain == ("i2",)


def test_a_pool_that_empties_slowly_closes_its_emptiest_hosts() -> None:
    """Where it is allowed, hosts that the others can stand in for take no newcomers after a cool-down: the emptiest, as
    many as leave room for their sessions and the margin. Where it is not, and while a host starts, busy hosts stay."""
    rules = policy(drain_below=0.5, scale_in_margin=0.1)
    heard_at = NOW + timedelta(seconds=30)
    counts = {"a": 6, "b": 4, "c": 2, "d": 1}
    view = View(hosts=tuple(ready(id, count, heard_at=heard_at) for id, count in counts.items()))
    first = plan(view, rules, NOW)
    assert first.drain == ()
    pools = {state.name: state for state in first.pools}
    view = dataclasses.replace(view, pools=pools)
    assert plan(view, rules, NOW + timedelta(seconds=59)).drain == ()
    # Free: a 2, b 4, c 6. Without d and c there is room for their three and the margin of one; not without b as well.
    assert plan(view, rules, NOW + timedelta(seconds=60)).drain == ("d", "c")
    assert plan(view, policy(), NOW + timedelta(seconds=60)).drain == ()
    growing = dataclasses.replace(view, hosts=(*view.hosts, coming("e")))
    assert plan(growing, rules, NOW + timedelta(seconds=60)).drain == ()
    # Demand takes them back, the one with most sessions first, before a host is started.
    closed = [
        dataclasses.replace(
            host, state=HostState.DRAINING, drain=True, view=dataclasses.replace(host.view, open=False)
        )
        for host in view.hosts[2:]
    ]
    busier = View(hosts=(*view.hosts[:2], *closed), waiting=waits(8), pools=pools)
    decided = plan(busier, rules, NOW)
    assert (decided.undrain, decided.start) == (("c",), {})


# -- prepares --


def test_who_waits_for_a_prepared_sandbox_is_not_counted_twice() -> None:
    """A burst into a prepared pool needs the hosts that were prepared, and no more."""
    assert starts(View(wanted=(wanted(40),))) == 5
    assert starts(View(wanted=(wanted(40),), waiting=waits(40))) == 5
    assert starts(View(wanted=(wanted(40),), waiting=waits(56))) == 7
    assert starts(View(wanted=(wanted(40, claimed=16),), waiting=waits(24))) == 3


@pytest.mark.parametrize(("measured_s", "lead_s"), [((), 300.0), ((38.0, 40.0, 46.0), 46.0)])
def test_a_prepare_starts_its_hosts_as_late_as_measured_starts_allow(
    measured_s: tuple[float, ...], lead_s: float
) -> None:
    """Hosts are started so long before its time as hosts took of late, with a tick and the filling; before any was
    measured, as a start may take at the most. Not a second sooner, and no sandbox is made ready sooner either."""
    lead_s += 2.0 + FILL_S
    took_ms = tuple(round(each * 1000) for each in measured_s)
    pools = {"default": PoolState(name="default", start_ms=took_ms, measured_to=NOW)}
    early = View(hosts=(ready("a"),), wanted=(wanted(24, by_s=lead_s + 1),), pools=pools)
    decided = plan(early, policy(), NOW)
    assert (decided.start, decided.levels) == ({}, ())
    due = dataclasses.replace(early, wanted=(wanted(24, by_s=lead_s),))
    decided = plan(due, policy(), NOW)
    assert decided.start == {"default": 2}
    assert sum(level.count for each in decided.levels for level in each.levels) == 8


def test_a_prepare_does_not_wait_for_a_look_that_comes_rarely() -> None:
    """Where only a schedule wakes the reconciler, hosts are started so much sooner."""
    for about, tick_s in (
        (ProvisionerSettings(reconcile_s=3.0), 3.0),
        (ProvisionerSettings(reconcile_s=3.0, look_s=60.0), 60.0),
    ):
        rules = policy_of(about)
        state = PoolState(name="default", start_ms=(40_000,), measured_to=NOW)
        assert lead_of(rules, state).total_seconds() == 40 + tick_s + FILL_S


def test_hosts_are_not_sent_away_before_a_prepare_that_needs_them() -> None:
    """An idle host stays when a prepare will need it within twice the time that a start takes, and goes otherwise."""
    state = PoolState(name="default", start_ms=(40_000,), measured_to=NOW)
    lead_s = 40 + 2 + FILL_S
    for by_s, goes in ((2 * lead_s, False), (2 * lead_s + 1, True)):
        view = View(hosts=(ready("a", idle_s=400),), wanted=(wanted(4, by_s=by_s),), pools={"default": state})
        assert bool(plan(view, policy(), NOW).drain) is goes


# -- what it remembers --


def test_it_remembers_how_long_hosts_take_and_how_large_they_are() -> None:
    """Registrations are measured once each, the latest fifty are kept; a pool at rest knows what its hosts are."""
    first = tuple(
        ready(f"h{n:02d}", created_at=NOW - timedelta(seconds=100 + n), registered_at=NOW - timedelta(seconds=50))
        for n in range(60)
    )  # fmt: skip
    (state,) = plan(View(hosts=first), policy(max_hosts=100), NOW).pools
    assert len(state.start_ms) == 50
    assert state.start_ms[-1] == 109_000
    assert state.host_capacity == SHAPE.wire()
    view = View(hosts=first, pools={"default": state})
    assert plan(view, policy(max_hosts=100), NOW).pools == ()
    later = (*first, ready("x", created_at=NOW - timedelta(seconds=30), registered_at=NOW))
    (again,) = plan(View(hosts=later, pools={"default": state}), policy(max_hosts=100), NOW).pools
    assert again.start_ms == (*state.start_ms[1:], 30_000)
    # Zero hosts, no shape in the settings: what was remembered sizes the first step.
    cold = View(waiting=waits(24), pools={"default": state})
    assert starts(cold, policy(host_room=None)) == 3
    assert starts(View(waiting=waits(24)), policy(host_room=None)) == 1


def test_what_a_host_tells_goes_before_what_the_settings_say() -> None:
    """Settings are a first guess."""
    small = dataclasses.replace(SHAPE, sandboxes=4, memory_mib=4096)
    host = ready("a", view=dataclasses.replace(ready("a").view, capacity=small))
    assert starts(View(hosts=(host,), waiting=waits(12))) == 2


# -- warm sandboxes --


def test_warm_orders_stay_where_they_are_while_they_are_even_enough() -> None:
    """A session more or less on a host moves no warm sandbox; a host that comes takes its share."""
    rules = policy(warm_max=16)
    recent = Recent(pool="default", key=KEY, source=SOURCE, room=ONE, last_at=NOW, busiest=40)
    hosts = [ready(f"h{n}") for n in range(4)]
    decided = plan(View(hosts=tuple(hosts), recent=(recent,)), rules, NOW)
    assert sorted(each.levels[0].count for each in decided.levels) == [3, 3, 3, 3]
    levels = {each.host: each.levels for each in decided.levels}
    kept = [dataclasses.replace(host, levels=levels[host.view.id]) for host in hosts]
    state = {state.name: state for state in decided.pools}
    busier = [
        dataclasses.replace(kept[0], view=ready("h0", 3).view, sessions=3, sandboxes=3),
        *kept[1:],
    ]
    assert plan(View(hosts=tuple(busier), recent=(recent,), pools=state), rules, NOW).levels == ()
    more = plan(View(hosts=(*kept, ready("new")), recent=(recent,), pools=state), rules, NOW)
    assert more.levels == ()
    fresh = [ready(f"n{n:02d}") for n in range(12)]
    spread = plan(View(hosts=(*kept, *fresh), recent=(recent,), pools=state), rules, NOW).levels
    counts = {host.view.id: 3 for host in kept}
    counts |= {each.host: sum(level.count for level in each.levels) for each in spread}
    assert sum(counts.values()) == 12
    assert sorted(counts.values()) == [1, 1, 1, 1, 2, 2, 2, 2]
