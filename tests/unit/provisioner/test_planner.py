"""The planner: rules that hold for every view, and how a pool breathes over time."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.model import PoolState, Source, WarmLevel
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
from provisioner.planner import plan
from shoal.contract.base import HostId, SessionId
from shoal.contract.states import HostState, Substrate

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SHAPE = Room(cpu_millis=8000, memory_mib=8192, disk_mib=65_536, sandboxes=8)
ONE = Room(cpu_millis=1000, memory_mib=1024, disk_mib=4096, sandboxes=1)


def policy(**changes: object) -> Policy:
    about: dict[str, object] = {
        "name": "default",
        "min_hosts": 0,
        "max_hosts": 4,
        "host_room": SHAPE,
        "idle_to_zero_s": 300.0,
        "scale_in_cooldown_s": 60.0,
        "warm_default": 2,
        "warm_max": 16,
        "warm_keep_s": 900.0,
    }
    pool = PoolPolicy(**(about | changes))  # type: ignore[arg-type]
    return Policy(pools=(pool,), lease_s=30, lost_margin_s=10, host_start_s=60)


def key(n: int = 0):  # type: ignore[no-untyped-def]
    return warm_key(f"sha256:{n:064d}", Substrate.CONTAINER, 4096)


def source(n: int = 0) -> Source:
    digest = f"sha256:{n:064d}"
    return Source(digest=digest, image_digest=digest)


def host(id: str, **changes: object) -> HostFacts:
    state = changes.get("state", HostState.READY)
    held = changes.pop("held", Room())
    about: dict[str, object] = {
        "view": HostView(
            id=HostId(id),
            pool="default",
            open=state is HostState.READY,
            substrates=frozenset({Substrate.CONTAINER}),
            capacity=SHAPE if state is not HostState.STARTING else Room(),
            held=held,  # type: ignore[arg-type]
        ),
        "state": state,
        "created_at": NOW - timedelta(hours=1) if state is not HostState.STARTING else NOW,
        "registered_at": NOW - timedelta(hours=1),
        "heard_at": NOW,
        "busy_at": NOW,
        "instance": InstanceFacts(id=f"i-{id}", host=HostId(id), alive=True),
    }
    return HostFacts(**(about | changes))  # type: ignore[arg-type]


def waiting(n: int, room: Room = ONE, **changes: object) -> Waiting:
    about: dict[str, object] = {
        "session": SessionId(f"s{n}"),
        "pool": "default",
        "substrate": Substrate.CONTAINER,
        "room": room,
        "warm": warm_name(key()),
        "expires_at": NOW + timedelta(hours=1),
    }
    return Waiting(**(about | changes))  # type: ignore[arg-type]


def wanted(count: int, **changes: object) -> Wanted:
    about: dict[str, object] = {
        "id": "p",
        "pool": "default",
        "key": key(),
        "source": source(),
        "room": ONE,
        "count": count,
        "expires_at": NOW + timedelta(hours=1),
    }
    return Wanted(**(about | changes))  # type: ignore[arg-type]


def applied(view: View, decided: Plan, now: datetime) -> View:
    """The view after a plan was carried out, before anything else happens."""
    lost = {each.host for each in decided.lose}
    stopped = {each.instance for each in decided.stop}
    levels = {each.host: each.levels for each in decided.levels}
    hosts = []
    for each in view.hosts:
        id = each.view.id
        if id in decided.forget:
            continue
        if id in lost:
            each = dataclasses.replace(
                each, state=HostState.LOST, view=dataclasses.replace(each.view, open=False)
            )
        if id in decided.drain:
            each = dataclasses.replace(
                each, state=HostState.DRAINING, drain=True, view=dataclasses.replace(each.view, open=False)
            )
        if id in decided.undrain:
            each = dataclasses.replace(
                each, state=HostState.READY, drain=False, view=dataclasses.replace(each.view, open=True)
            )
        if id in decided.resume.get(each.view.pool, ()):
            each = dataclasses.replace(each, instance=InstanceFacts(id=f"i-{id}", host=id, alive=True))
        if id in levels:
            each = dataclasses.replace(each, levels=levels[id])
        if each.instance is not None and each.instance.id in stopped:
            each = dataclasses.replace(
                each,
                instance=None,
                state=HostState.GONE,
                view=dataclasses.replace(each.view, open=False),
            )
        hosts.append(each)
    count = len(hosts)
    for _ in range(decided.start.get("default", 0)):
        count += 1
        hosts.append(
            host(f"new{count}", state=HostState.STARTING, created_at=now, heard_at=None, busy_at=None)
        )
    return View(
        hosts=tuple(hosts),
        orphans=tuple(each for each in view.orphans if each.id not in stopped),
        waiting=tuple(each for each in view.waiting if each.session not in decided.expire),
        wanted=tuple(each for each in view.wanted if (each.pool, each.id) not in decided.drop),
        recent=view.recent,
        pools={**view.pools, **{state.name: state for state in decided.pools}},
    )


# -- rules for every view --

rooms = st.builds(
    Room,
    cpu_millis=st.integers(100, 9000),
    memory_mib=st.integers(64, 9000),
    disk_mib=st.sampled_from([256, 1024, 4096, 16_384]),
    sandboxes=st.just(1),
)
ages = st.integers(-600, 0).map(lambda seconds: NOW + timedelta(seconds=seconds))


@st.composite
def hosts(draw: st.DrawFn) -> tuple[HostFacts, ...]:
    found = []
    for n in range(draw(st.integers(0, 6))):
        state = draw(st.sampled_from(list(HostState)))
        sessions = draw(st.integers(0, 5)) if state is not HostState.STARTING else 0
        held = Room(
            cpu_millis=1000 * sessions,
            memory_mib=1024 * sessions,
            disk_mib=4096 * sessions,
            sandboxes=sessions,
        )
        draining = state is HostState.DRAINING
        instance = InstanceFacts(
            id=f"i-{n}", host=HostId(f"h{n}"), alive=draw(st.booleans()) or draw(st.booleans())
        )
        found.append(
            host(
                f"h{n}",
                state=state,
                held=held,
                sessions=sessions,
                sandboxes=sessions,
                created_at=draw(ages),
                heard_at=draw(st.none() | ages),
                busy_at=draw(st.none() | ages),
                drain=draining,
                draining=draining and draw(st.booleans()),
                instance=draw(st.just(instance) | st.none()),
            )
        )
    return tuple(found)


views = st.builds(
    View,
    hosts=hosts(),
    orphans=st.just(()) | st.just((InstanceFacts(id="i-x", host=HostId("x"), alive=True),)),
    waiting=st.lists(
        st.builds(
            waiting, st.integers(0, 10_000), rooms, expires_at=ages.map(lambda t: t + timedelta(seconds=300))
        ),
        max_size=20,
        unique_by=lambda each: each.session,
    ).map(tuple),
    wanted=st.lists(
        st.builds(wanted, st.integers(1, 12), expires_at=ages.map(lambda t: t + timedelta(seconds=300))),
        max_size=1,
    ).map(tuple),
    recent=st.lists(
        st.builds(
            lambda n, at, busiest: Recent(
                pool="default", key=key(n), source=source(n), room=ONE, last_at=at, busiest=busiest
            ),
            st.integers(0, 3),
            ages,
            st.integers(0, 100),
        ),
        max_size=4,
        unique_by=lambda each: each.key.digest,
    ).map(tuple),
    pools=st.just({})
    | st.builds(
        lambda failures, at: {
            "default": PoolState(name="default", failures=failures, last_failure_at=at, last_failure="x")
        },
        st.integers(1, 5),
        ages,
    ),
)
policies = st.builds(
    policy,
    max_hosts=st.integers(1, 6),
    min_hosts=st.integers(0, 1),
    idle_to_zero_s=st.sampled_from([0.0, 300.0]),
)


@given(views, policies)
def test_never_more_than_the_pool_may_have(view: View, rules: Policy) -> None:
    """Machines that are there or coming, and those that are being ended, never pass max_hosts by a start."""
    decided = plan(view, rules, NOW)
    starting = decided.start.get("default", 0)
    there = sum(
        each.state not in (HostState.LOST, HostState.GONE) or each.instance is not None for each in view.hosts
    )
    forgotten_losses = sum(
        each.host == facts.view.id and facts.instance is None for each in decided.lose for facts in view.hosts
    )
    if starting:
        assert there - forgotten_losses + starting <= rules.pools[0].max_hosts


@given(views, policies)
def test_the_same_view_gives_the_same_plan(view: View, rules: Policy) -> None:
    """No clock and no chance of its own, and the order in which hosts are told does not matter to how many start."""
    assert plan(view, rules, NOW) == plan(view, rules, NOW)
    turned = dataclasses.replace(view, hosts=tuple(reversed(view.hosts)))
    assert plan(turned, rules, NOW).start == plan(view, rules, NOW).start


@settings(max_examples=300)
@given(views, policies)
def test_plans_come_to_rest(view: View, rules: Policy) -> None:
    """Carrying a plan out leads, within the steps a machine's end takes, to a view where there is nothing to do."""
    for _ in range(6):
        decided = plan(view, rules, NOW)
        if decided.empty:
            break
        view = applied(view, decided, NOW)
    assert plan(view, rules, NOW).empty


@given(views, policies)
def test_nobody_is_ended_with_sessions(view: View, rules: Policy) -> None:
    """Hosts with sessions are neither drained for want of demand nor stopped, unless they are lost."""
    decided = plan(view, rules, NOW)
    busy = {
        each.view.id
        for each in view.hosts
        if each.sessions and each.state in (HostState.READY, HostState.DRAINING)
    }
    lost = {each.host for each in decided.lose}
    assert not busy & set(decided.drain)
    assert not (busy - lost) & {each.host for each in decided.stop}


@given(views, policies)
def test_never_out_and_in_at_once(view: View, rules: Policy) -> None:
    """A plan does not start hosts and drain others in one breath."""
    decided = plan(view, rules, NOW)
    assert not (decided.start.get("default") and decided.drain)


@given(views, policies)
def test_warm_levels_fit_their_hosts(view: View, rules: Policy) -> None:
    """Warm sandboxes and what sessions hold never pass a host's capacity by order."""
    decided = plan(view, rules, NOW)
    by_id = {each.view.id: each for each in view.hosts}
    for change in decided.levels:
        total = by_id[change.host].view.held
        for level in change.levels:
            for _ in range(level.count):
                total = total + ONE
        assert not change.levels or total.fits(by_id[change.host].view.capacity)


# -- how it breathes --


def test_nothing_wanted_nothing_done() -> None:
    """Zero at rest."""
    assert plan(View(), policy(), NOW).empty


def test_scales_out_at_once_in_one_step() -> None:
    """Twenty sessions of an eighth of a host start three hosts, together."""
    decided = plan(View(waiting=tuple(waiting(n) for n in range(20))), policy(), NOW)
    assert decided.start == {"default": 3}


def test_hosts_that_are_coming_count() -> None:
    """What is starting is not started again."""
    view = View(
        hosts=(host("a", state=HostState.STARTING, heard_at=None, busy_at=None),),
        waiting=tuple(waiting(n) for n in range(8)),
    )
    assert plan(view, policy(), NOW).start == {}
    more = dataclasses.replace(view, waiting=tuple(waiting(n) for n in range(9)))
    assert plan(more, policy(), NOW).start == {"default": 1}


def test_ordered_hosts_are_asked_for_again() -> None:
    """A start without a machine goes on, oldest first and no further one for it, until it is given up."""
    about = {"state": HostState.STARTING, "instance": None, "heard_at": None, "busy_at": None}
    view = View(
        hosts=(
            host("b", created_at=NOW - timedelta(seconds=5), **about),
            host("a", created_at=NOW - timedelta(seconds=9), **about),
            host("c", **(about | {"instance": InstanceFacts(id="i-c", host=HostId("c"), alive=True)})),
            host("old", created_at=NOW - timedelta(seconds=61), **about),
        ),
        waiting=tuple(waiting(n) for n in range(24)),
    )
    decided = plan(view, policy(), NOW)
    assert decided.resume == {"default": ("a", "b")}
    assert [each.host for each in decided.lose] == ["old"]
    assert decided.start == {}


def test_says_why_it_does_not_scale() -> None:
    """At the limit, too large, failing hosts: each has its sentence, and none starts a host."""
    limit = plan(
        View(
            hosts=tuple(host(f"h{n}", held=SHAPE, sessions=8, sandboxes=8) for n in range(4)),
            waiting=(waiting(1),),
        ),
        policy(),
        NOW,
    )
    assert limit.start == {}
    assert "limit of 4" in (limit.pools[0].not_scaling or "")
    huge = Room(cpu_millis=9000, memory_mib=100, disk_mib=256, sandboxes=1)
    large = plan(View(waiting=(waiting(1, huge),)), policy(), NOW)
    assert large.start == {}
    assert "larger than any host" in (large.pools[0].not_scaling or "")
    state = PoolState(
        name="default", failures=3, last_failure_at=NOW - timedelta(seconds=5), last_failure="no runc"
    )
    failing = plan(View(waiting=(waiting(1),), pools={"default": state}), policy(), NOW)
    assert failing.start == {}
    assert "no runc" in (failing.pools[0].not_scaling or "")
    assert plan(
        View(waiting=(waiting(1),), pools={"default": state}), policy(), NOW + timedelta(seconds=10)
    ).start == {"default": 1}


def test_without_a_known_shape_one_host_comes_first() -> None:
    """Nobody knows how large a host is before one has told: one is started, then as many as it takes."""
    view = View(waiting=tuple(waiting(n) for n in range(20)))
    rules = policy(host_room=None)
    assert plan(view, rules, NOW).start == {"default": 1}
    coming = View(
        hosts=(host("a", state=HostState.STARTING, heard_at=None, busy_at=None),), waiting=view.waiting
    )
    assert plan(coming, rules, NOW).start == {}
    told = View(hosts=(host("a"),), waiting=view.waiting)
    assert plan(told, rules, NOW).start == {"default": 2}


def test_silence_loses_a_host_only_after_the_lease_and_its_margin() -> None:
    """Fencing comes first: the agent has frozen before anyone takes its sessions elsewhere."""
    quiet = View(hosts=(host("a", heard_at=NOW - timedelta(seconds=39), sessions=1, sandboxes=1),))
    assert plan(quiet, policy(), NOW).lose == ()
    silent = View(hosts=(host("a", heard_at=NOW - timedelta(seconds=41), sessions=1, sandboxes=1),))
    assert [each.host for each in plan(silent, policy(), NOW).lose] == ["a"]
    dead = InstanceFacts(id="i-a", host=HostId("a"), alive=False, detail="exit code 1")
    (lost,) = plan(View(hosts=(host("a", instance=dead),)), policy(), NOW).lose
    assert lost.detail == "exit code 1"


def test_a_host_in_its_providers_queue_has_not_begun_to_start() -> None:
    """It is given up when the queue takes too long; once it runs, what it may take to register counts from there. A
    host without such a queue has `host_start_s` from when it was asked for."""
    rules = dataclasses.replace(policy(), host_queue_s=3600)

    def lost(age_s: float, ran_s: float | None = None, *, queued: bool = False) -> str | None:
        now = NOW + timedelta(seconds=age_s)
        ran_at = None if ran_s is None else NOW + timedelta(seconds=ran_s)
        machine = InstanceFacts(
            id="job", host=HostId("a"), alive=True, detail="Full.", queued=queued, ran_at=ran_at
        )
        one = host("a", state=HostState.STARTING, registered_at=None, heard_at=None, instance=machine)
        asking = waiting(1, expires_at=NOW + timedelta(hours=9))
        decided = plan(View(hosts=(one,), waiting=(asking,)), rules, now)
        if queued and not decided.lose:
            assert decided.pools[0].not_scaling == "Hosts wait for machines: Full."
        return decided.lose[0].detail if decided.lose else None

    assert lost(3599, queued=True) is None
    assert lost(3601, queued=True) == "Its provider did not run it within 3600 s. Full."
    assert lost(1059, ran_s=1000) is None
    assert lost(1061, ran_s=1000) == "It did not register within 60 s. Full."
    assert lost(59) is None
    assert lost(61) == "It did not register within 60 s. Full."


def test_idle_goes_to_zero_and_not_before() -> None:
    """Without any demand the last host goes after idle_to_zero_s; with a prepare it stays."""
    busy_at = NOW - timedelta(seconds=299)
    assert plan(View(hosts=(host("a", busy_at=busy_at),)), policy(), NOW).drain == ()
    idle = View(hosts=(host("a", busy_at=NOW - timedelta(seconds=300)),))
    assert plan(idle, policy(), NOW).drain == ("a",)
    prepared = dataclasses.replace(idle, wanted=(wanted(2),))
    assert plan(prepared, policy(), NOW).drain == ()
    assert plan(idle, policy(min_hosts=1), NOW).drain == ()


def test_a_host_is_stopped_once_it_is_empty_and_knows_it_drains() -> None:
    """Drained means: its agent takes no more, and nothing is on it."""
    for draining, sessions, sandboxes, stopped in (
        (False, 0, 0, False),
        (True, 1, 1, False),
        (True, 0, 1, False),
        (True, 0, 0, True),
    ):
        facts = host(
            "a",
            state=HostState.DRAINING,
            drain=True,
            draining=draining,
            sessions=sessions,
            sandboxes=sandboxes,
        )
        assert bool(plan(View(hosts=(facts,)), policy(), NOW).stop) is stopped


def test_demand_takes_a_draining_host_back() -> None:
    """A host that drains is used again before another is started."""
    facts = host("a", state=HostState.DRAINING, drain=True, draining=True)
    decided = plan(View(hosts=(facts,), waiting=(waiting(1),)), policy(), NOW)
    assert decided.undrain == ("a",)
    assert decided.start == {}
    assert decided.stop == ()


def test_no_flapping_on_a_square_wave() -> None:
    """Demand that comes and goes faster than the cool-down starts hosts once, and keeps them."""
    rules = policy()
    view = View()
    starts = drains = 0
    now = NOW
    for second in range(0, 600, 5):
        now = NOW + timedelta(seconds=second)
        busy = (second // 20) % 2 == 0
        hosts = []
        for facts in view.hosts:
            if facts.state is HostState.STARTING:
                facts = host(str(facts.view.id))
            sessions = 7 if busy else 0
            hosts.append(
                dataclasses.replace(
                    facts,
                    sessions=sessions,
                    sandboxes=sessions,
                    heard_at=now,
                    busy_at=now if busy else facts.busy_at,
                    view=dataclasses.replace(
                        facts.view,
                        held=Room(cpu_millis=7000, memory_mib=7168, disk_mib=28_672, sandboxes=7)
                        if busy
                        else Room(),
                    ),
                )
            )
        queue = tuple(waiting(n) for n in range(14)) if busy and not hosts else ()
        view = dataclasses.replace(view, hosts=tuple(hosts), waiting=queue)
        decided = plan(view, rules, now)
        starts += decided.start.get("default", 0)
        drains += len(decided.drain)
        view = applied(view, decided, now)
    assert starts == 2
    assert drains == 0


def test_warm_levels_follow_prepares_and_demand() -> None:
    """A prepare is kept whole less what was claimed of it; demand keeps a few; old demand keeps none."""
    ready = (host("a"), host("b"))

    def level(view: View) -> int:
        return sum(each.count for change in plan(view, policy(), NOW).levels for each in change.levels)

    assert level(View(hosts=ready, wanted=(wanted(6),))) == 6
    assert level(View(hosts=ready, wanted=(wanted(6, claimed=4),))) == 2
    recent = Recent(pool="default", key=key(), source=source(), room=ONE, last_at=NOW, busiest=0)
    assert level(View(hosts=ready, recent=(recent,))) == 2
    assert level(View(hosts=ready, recent=(dataclasses.replace(recent, busiest=30),))) == 9
    assert level(View(hosts=ready, recent=(dataclasses.replace(recent, busiest=1000),))) == 16
    old = dataclasses.replace(recent, last_at=NOW - timedelta(seconds=901))
    assert level(View(hosts=ready, recent=(old,))) == 0
    kept = (WarmLevel(key=key(), source=source(), count=1),)
    spread = plan(View(hosts=ready, recent=(recent,)), policy(), NOW).levels
    assert [change.levels for change in spread] == [kept, kept]


def test_prepares_start_hosts_in_time_for_their_moment() -> None:
    """A prepare for later starts nothing yet; near its time it starts what it takes."""
    later = View(wanted=(wanted(20, by=NOW + timedelta(hours=2), expires_at=NOW + timedelta(hours=3)),))
    assert plan(later, policy(), NOW).start == {}
    assert plan(later, policy(), NOW + timedelta(hours=2) - timedelta(seconds=60)).start == {"default": 3}
