"""What the ECS driver decides about machines: pure, so every case is a few lines."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from provisioner.capacity import ecs_plan
from provisioner.capacity.ecs_view import GroupView, Machine, Task, read_failure, read_task
from provisioner.capacity.port import HostStart
from shoal.contract.base import HostId

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def machine(n: int, **about: Any) -> Machine:
    plain = {"lifecycle": "InService", "container_instance": f"ci-{n}", "connected": True}
    return Machine(id=f"i-{n}", **(plain | about))


def task(host: str, on: int, **about: Any) -> Task:
    plain = {"stopped": False, "stopping": False, "created_at": NOW}
    return Task(arn=f"task-{host}-{on}", host=HostId(host), machine=f"i-{on}", **(plain | about))


def group(machines: list[Machine], tasks: list[Task] | None = None, **about: Any) -> GroupView:
    plain = {"desired": sum(each.counts for each in machines), "min_size": 0, "max_size": 1000}
    return GroupView(
        machines={each.id: each for each in machines}, tasks=tuple(tasks or ()), **(plain | about)
    )


def starts(*hosts: str) -> list[HostStart]:
    return [HostStart(host=HostId(host), pool="p", join_token="t", asked_at=NOW) for host in hosts]


def order(view: GroupView, *hosts: str, **about: Any) -> ecs_plan.Order:
    return ecs_plan.order(view, starts(*hosts), about.pop("under_way", {}), NOW, join_s=180)


def test_zero_to_many_in_one_step() -> None:
    """500 hosts from zero: the capacity is 500 at once, and asking again asks for nothing more."""
    hosts = [f"h{n}" for n in range(500)]
    assert order(group([]), *hosts).desired == 500
    assert order(group([], desired=500), *hosts).desired is None
    coming = [machine(n, lifecycle="Pending", connected=False) for n in range(300)]
    later = order(group(coming, desired=500), *hosts)
    assert (later.desired, len(later.wait), len(later.short)) == (None, 500, 200)


def test_a_warm_pool_and_what_leaves_are_no_capacity() -> None:
    """Machines of a warm pool and those being terminated neither carry hosts nor count; their tasks are not counted."""
    view = group(
        [
            machine(1),
            machine(2, lifecycle="Warmed:Stopped"),
            machine(3, lifecycle="Warmed:Running"),
            machine(4, lifecycle="Terminating:Wait"),
        ],
        [task("old", 4)],
        desired=1,
    )
    found = order(view, "a", "b")
    assert [(start.host, on.id) for start, on in found.place] == [("a", "i-1")]
    assert found.desired == 2


def test_only_machines_that_are_ready_carry_hosts() -> None:
    """No task goes to a machine that has not joined, that ECS has no connection to, or that is not in service."""
    view = group(
        [
            machine(1, container_instance=None, connected=False),
            machine(2, connected=False),
            machine(3, lifecycle="Pending:Wait"),
        ]
    )
    assert order(view, "a").place == ()
    assert order(view, "a").desired is None


def test_a_used_machine_is_never_used_again() -> None:
    """A machine whose agent has ended carries no second host: the first one's identity is on its disk."""
    view = group([machine(1)], [task("a", 1, stopped=True, stopping=True)])
    found = order(view, "b")
    assert found.place == ()
    assert found.desired == 2


def test_a_host_that_is_starting_is_not_started_again() -> None:
    """A host whose task was started a moment ago has its machine, though nothing shows it."""
    view = group([machine(1), machine(2)])
    found = order(view, "a", "b", under_way={HostId("a"): "i-1"})
    assert [(start.host, on.id) for start, on in found.place] == [("b", "i-2")]
    assert found.desired is None


def test_a_machine_that_is_late_is_ended() -> None:
    """A machine that has not joined after its time is stuck; a young one and one whose age is not known are not."""
    late = machine(1, connected=False, launched_at=NOW - timedelta(seconds=181))
    young = machine(2, connected=False, launched_at=NOW - timedelta(seconds=179))
    unknown = machine(3, connected=False)
    found = order(group([late, young, unknown]), "a", "b", "c")
    assert found.stuck == (late,)
    assert [start.host for start in found.late] == ["c"]
    assert found.desired is None
    assert order(group([late, young, unknown])).stuck == (late,)


def test_surplus_keeps_what_is_ready_and_ends_what_is_idle() -> None:
    """Only machines that looked idle for a while are ended; those that are ready are kept for hosts to come."""
    joining = machine(1, connected=False)
    view = group([joining, machine(2), machine(4)], [task("a", 4)])
    idle = {"i-1", "i-2"}
    assert ecs_plan.surplus(view, [HostId("b")], idle, {}).end == (joining,)
    assert {each.id for each in ecs_plan.surplus(view, [], idle, {}).end} == {"i-1", "i-2"}
    assert ecs_plan.surplus(view, [], set(), {}).end == ()


def test_surplus_cancels_what_is_only_ordered() -> None:
    """A capacity beyond what there is and what is to come is lowered; the group's smallest size is kept."""
    view = group([machine(1)], [task("a", 1)], desired=10)
    assert ecs_plan.surplus(view, [HostId("b"), HostId("c")], [], {}).desired == 3
    assert ecs_plan.surplus(replace(view, min_size=5), [], [], {}).desired == 5
    assert ecs_plan.surplus(replace(view, desired=1), [], [], {}).desired is None


def test_the_second_machine_of_one_host_is_given_back() -> None:
    """Of two tasks of one host the one that runs is the host; the other's machine is ended with its task."""
    view = group([machine(1), machine(2)], [task("a", 1, stopped=True, stopping=True), task("a", 2)])
    assert [each.machine for each in ecs_plan.hosts(view)] == ["i-2"]
    assert [each.id for each in ecs_plan.surplus(view, [], {"i-1"}, {}).end] == ["i-1"]
    both = group([machine(1), machine(2)], [task("a", 1), task("a", 2)])
    assert [each.machine for each in ecs_plan.hosts(both)] == ["i-1"]
    assert ecs_plan.surplus(both, [], {"i-1", "i-2"}, {}).end == ()


_LIFECYCLES = st.sampled_from(["Pending", "InService", "Terminating", "Warmed:Stopped"])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[GroupView, list[str]]:
    """Any group, and hosts that are asked for."""
    machines = [
        machine(n, lifecycle=draw(_LIFECYCLES), connected=draw(st.booleans()))
        for n in range(draw(st.integers(0, 8)))
    ]
    tasks = [
        task(f"h{each.id}", int(each.id[2:]), stopped=(over := draw(st.booleans())), stopping=over)
        for each in machines
        if draw(st.booleans())
    ]
    view = group(machines, tasks, desired=draw(st.integers(0, 12)), max_size=12)
    return view, [f"n{n}" for n in range(draw(st.integers(0, 12)))]


@given(worlds())
def test_an_order_settles(world: tuple[GroupView, list[str]]) -> None:
    """Whatever there is: no machine carries two hosts, nobody is both placed and refused, the size is kept, what was
    ordered is not ordered again, and a surplus of the same picture takes nothing that the hosts to come need."""
    view, hosts = world
    found = order(view, *hosts)
    used = [on.id for _, on in found.place]
    assert len(used) == len(set(used))
    assert {on.id for _, on in found.place}.isdisjoint(each.machine for each in view.tasks)
    named = [start.host for start, _ in found.place] + [
        start.host for start in (*found.wait, *found.full, *found.late)
    ]
    assert sorted(named) == sorted(hosts)
    counting = sum(each.counts for each in view.machines.values())
    if found.desired is not None:
        assert found.desired <= max(view.max_size, counting)
        assert order(replace(view, desired=found.desired), *hosts).desired is None
    back = ecs_plan.surplus(view, [HostId(host) for host in hosts], view.machines.keys(), {})
    tasks = {each.machine for each in view.tasks if not each.stopped}
    assert tasks.isdisjoint(each.id for each in back.end)
    bare = ecs_plan.idle_machines(view, {})
    kept = len([id for id in bare if id not in {each.id for each in back.end}])
    assert kept >= min(len(bare), len(hosts)) - len(ecs_plan.left_over(view))


def test_tasks_are_read_for_their_pool_only() -> None:
    """A task says whose it is; those of other pools and services are not ours. Why it ended is one sentence."""
    about = {
        "taskArn": "arn",
        "group": "shoal:p:i-1",
        "startedBy": "hst_1",
        "lastStatus": "STOPPED",
        "createdAt": NOW,
        "stoppedReason": "Essential container in task exited",
        "containers": [{"name": "agent", "exitCode": 1}],
    }
    read = read_task(about, "p")
    assert read is not None
    assert (read.machine, read.stopped) == ("i-1", True)
    assert read.detail == "Its task ended: Essential container in task exited; agent exited with 1."
    assert read_task(about, "q") is None
    assert read_task(about | {"group": "family:agent"}, "p") is None
    pulling = about | {"containers": [{"name": "agent", "reason": "CannotPullContainerError: no such tag"}]}
    assert "CannotPullContainerError" in (getattr(read_task(pulling, "p"), "detail", ""))


def test_failures_to_launch_are_those_since_the_order() -> None:
    """What failed before the order, or while another launch is under way, is no answer to it."""

    def activity(seconds: int, status: str, message: str = "no capacity") -> dict[str, Any]:
        return {
            "StartTime": NOW + timedelta(seconds=seconds),
            "StatusCode": status,
            "StatusMessage": message,
        }

    assert read_failure([activity(-5, "Failed")], NOW) is None
    assert read_failure([activity(5, "Failed", "a"), activity(9, "Failed", "b")], NOW) == "b"
    assert read_failure([activity(5, "Failed"), activity(9, "InProgress")], NOW) is None
    assert read_failure([activity(5, "Successful")], NOW) is None
    assert read_failure([], NOW) is None
