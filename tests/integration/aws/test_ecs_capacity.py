"""The ECS driver against moto: one step up, exactly the right instances down, and what is for nobody given back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from provisioner.capacity.ecs import EcsCapacity
from provisioner.capacity.port import CapacityUnavailable, HostStart, Instance, NoMoreHosts
from shoal.contract.base import HostId
from tests.aws_capacity import EcsWorld, Hostile, QuickClock, client_error
from tests.emulators import aws_clients


class Bench:
    """A driver, its world, and time."""

    def __init__(self, world: EcsWorld, clients: Hostile) -> None:
        self.world, self.clients, self.clock = world, clients, QuickClock()
        self.capacity = self.another()

    def another(self) -> EcsCapacity:
        """The driver of another process."""
        return EcsCapacity(
            self.clients,  # type: ignore[arg-type]
            [self.world.pool],
            clock=self.clock,
            chance=random.Random(1),
        )

    def starts(self, count: int, *, first: int = 1) -> list[HostStart]:
        return [
            HostStart(
                host=HostId(f"hst_{n}"),
                pool="default",
                join_token=f"hst_{n}.secret",
                asked_at=self.clock.now(),
            )
            for n in range(first, first + count)
        ]

    async def up(self, count: int) -> list[Instance]:
        await self.capacity.start(self.starts(count))
        await self.world.join()
        return await self.capacity.start(self.starts(count))

    async def desired(self) -> int:
        return int((await self.world.group())["DesiredCapacity"])

    async def machine(self, instance: Instance) -> str:
        tasks = [*await self.world.tasks(), *await self.world.tasks("STOPPED")]
        (task,) = [task for task in tasks if task["taskArn"] == instance.id]
        return str(task["group"]).rpartition(":")[2]


@pytest.fixture
async def bench(moto: str) -> AsyncIterator[Bench]:
    clients = aws_clients(moto)
    try:
        yield Bench(await EcsWorld(moto, clients, max_size=12).open(), Hostile(clients))
    finally:
        await clients.close()


async def test_capacity_goes_up_in_one_step(bench: Bench) -> None:
    """Many hosts are one SetDesiredCapacity; asking again while they come makes no further call."""
    starts = bench.starts(10)
    assert await bench.capacity.start(starts) == []
    assert await bench.capacity.start(starts) == []
    assert [each["DesiredCapacity"] for each in bench.clients.made("set_desired_capacity")] == [10]
    assert bench.clients.made("start_task") == []


async def test_each_machine_gets_one_host(bench: Bench) -> None:
    """Each instance that joins gets one host's task, with its token, found by its host; it is protected before."""
    await bench.capacity.start(bench.starts(3))
    machines = await bench.world.machines()
    await bench.world.join(but=frozenset(machines[2:]))
    found = await bench.capacity.start(bench.starts(3))
    assert [instance.host for instance in found] == ["hst_1", "hst_2"]
    await bench.world.join()
    assert len(await bench.capacity.start(bench.starts(3))) == 3
    tasks = await bench.world.tasks()
    assert {task["startedBy"] for task in tasks} == {"hst_1", "hst_2", "hst_3"}
    assert {task["group"].rpartition(":")[2] for task in tasks} == set(machines)
    for task in tasks:
        (container,) = task["overrides"]["containerOverrides"]
        token = {"name": "SHOAL_AGENT_JOIN_TOKEN", "value": f"{task['startedBy']}.secret"}
        assert container == {"name": "agent", "environment": [token]}
    assert all(each["ProtectedFromScaleIn"] for each in (await bench.world.group())["Instances"])
    order = [name for name, _ in bench.clients.calls if name in ("set_instance_protection", "start_task")]
    assert order[0] == "set_instance_protection"
    assert order.count("start_task") == 3


async def test_more_hosts_take_machines_that_wait_first(bench: Bench) -> None:
    """What joins is given out in the order asked; hosts that come later raise the capacity by what is missing only."""
    await bench.up(2)
    await bench.capacity.start(bench.starts(5))
    assert [each["DesiredCapacity"] for each in bench.clients.made("set_desired_capacity")] == [2, 5]


async def test_exactly_the_drained_host_goes(bench: Bench) -> None:
    """A stop ends the task, then that very instance, and takes the desired capacity down with it."""
    hosts = await bench.up(3)
    going = await bench.machine(hosts[1])
    before = set(await bench.world.machines())
    await bench.capacity.stop([hosts[1].id])
    assert set(await bench.world.machines()) == before - {going}
    assert await bench.desired() == 2
    order = [
        name
        for name, _ in bench.clients.calls
        if name in ("stop_task", "terminate_instance_in_auto_scaling_group")
    ]
    assert order == ["stop_task", "terminate_instance_in_auto_scaling_group"]
    assert {instance.host for instance in await bench.capacity.instances()} == {"hst_1", "hst_3"}


async def test_one_that_cannot_be_stopped_holds_up_no_others(bench: Bench) -> None:
    """A host whose stop fails is still there and stopped later; the others of the same call are gone."""
    hosts = await bench.up(3)
    failing = [client_error("InvalidParameterException", "no")]
    bench.clients.fail = lambda operation: failing.pop() if operation == "stop_task" and failing else None
    bench.capacity._stop_wait_s = 0.0
    for _ in range(2):
        await bench.capacity.stop([instance.id for instance in hosts])
        bench.clock.tick(5)
    assert len(await bench.world.machines()) == 1
    for _ in range(2):
        await bench.capacity.stop([instance.id for instance in hosts])
        bench.clock.tick(5)
    assert await bench.world.machines() == []


async def test_down_to_zero(bench: Bench) -> None:
    """All hosts stopped leaves no instance and asks for none."""
    hosts = await bench.up(4)
    await bench.capacity.stop([instance.id for instance in hosts])
    assert await bench.world.machines() == []
    assert await bench.desired() == 0
    assert await bench.capacity.instances() == []


async def test_a_task_gets_its_time_to_end(bench: Bench) -> None:
    """An instance whose task still ends is left alone; asked again, it goes once the task has ended, or will not."""
    (host,) = await bench.up(1)
    bench.clients.stale = lambda operation: operation == "describe_tasks"
    await bench.capacity.stop([host.id])
    assert len(await bench.world.machines()) == 1
    bench.clients.stale = lambda operation: False
    await bench.capacity.stop([host.id])
    assert await bench.world.machines() == []


async def test_a_lost_instance_is_told_and_not_replaced(bench: Bench) -> None:
    """An instance that dies takes its host with it, with a reason; the one the group brings instead is given back when
    nobody needs it, however many died."""
    hosts = await bench.up(4)
    for host in hosts[:3]:
        await bench.world.lose(await bench.machine(host))
    told = {instance.host: instance for instance in await bench.capacity.instances()}
    assert [told[host.host].alive for host in hosts] == [False, False, False, True]
    assert "terminated" in (told[hosts[0].host].detail or "")
    await bench.capacity.stop([host.id for host in hosts[:3]])
    assert [instance.host for instance in await bench.capacity.instances()] == ["hst_4"]
    assert await bench.desired() == 4
    for _ in range(2):
        await bench.capacity.settle(())
        bench.clock.tick(60)
    assert await bench.desired() == 1
    assert await bench.world.machines() == [await bench.machine(hosts[3])]


async def test_a_replacement_is_used_when_it_is_needed(bench: Bench) -> None:
    """What the group brought instead of a lost instance carries the host that the planner starts instead."""
    (host,) = await bench.up(1)
    await bench.world.lose(await bench.machine(host))
    await bench.capacity.stop([host.id])
    (another,) = bench.starts(1, first=2)
    await bench.capacity.settle([another.host])
    bench.clock.tick(60)
    await bench.capacity.settle([another.host])
    assert await bench.capacity.start([another]) == []
    await bench.world.join()
    bench.clock.tick(5)
    assert [instance.host for instance in await bench.capacity.start([another])] == ["hst_2"]
    assert await bench.desired() == 1


async def test_an_order_that_nobody_needs_is_cancelled(bench: Bench) -> None:
    """Machines that came for hosts which are given up meanwhile are ended; a host that is still to come keeps one."""
    await bench.capacity.start(bench.starts(5))
    await bench.world.join()
    coming = [HostId("hst_2")]
    await bench.capacity.settle(coming)
    assert len(await bench.world.machines()) == 5
    bench.clock.tick(60)
    await bench.capacity.settle(coming)
    assert len(await bench.world.machines()) == 1
    assert await bench.desired() == 1


async def test_a_task_that_no_list_shows_keeps_its_machine(bench: Bench) -> None:
    """Another process has just started a host on a machine that looks idle here: it is not given back."""
    await bench.capacity.start(bench.starts(1))
    await bench.world.join()
    await bench.capacity.settle(())
    await bench.another().start(bench.starts(1))
    bench.clock.tick(60)
    bench.clients.hide = lambda operation, about: (
        operation == "list_tasks" and "containerInstance" not in about
    )
    await bench.capacity.settle(())
    assert len(await bench.world.machines()) == 1


async def test_a_machine_that_never_joins_is_replaced_and_told(bench: Bench) -> None:
    """An instance that does not join the cluster in time is ended, its host is given up with the reason, and the next
    start brings another; those that joined are not touched."""
    await bench.capacity.start(bench.starts(2))
    good, bad = await bench.world.machines()
    await bench.world.join(but=frozenset({bad}))
    assert len(await bench.capacity.start(bench.starts(2))) == 1
    bench.clock.tick(200)
    with pytest.raises(NoMoreHosts) as raised:
        await bench.capacity.start(bench.starts(2))
    assert bad in raised.value.reason
    assert raised.value.refused == {"hst_2"}
    ended = bench.clients.made("terminate_instance_in_auto_scaling_group")
    assert [about["InstanceId"] for about in ended] == [bad]
    assert await bench.world.machines() == [good]
    assert await bench.desired() == 1
    assert len(bench.clients.made("set_desired_capacity")) == 1
    await bench.capacity.start(bench.starts(1, first=3))
    assert await bench.desired() == 2


async def test_why_nothing_is_launched_is_told(bench: Bench) -> None:
    """When the group cannot launch, the hosts that wait are refused with what its scaling activity says."""
    groups = await bench.clients._inner.get("autoscaling")
    real, starts = groups.describe_auto_scaling_groups, bench.starts(3)
    await bench.capacity.start(starts[:1])
    await bench.world.join()
    first = await bench.capacity.start(starts[:1])

    async def short(**about: object) -> object:
        # moto launches all at once; a region out of capacity does not.
        answer = await real(**about)
        group = answer["AutoScalingGroups"][0]
        group["Instances"] = [each for each in group["Instances"] if each["InstanceId"] == machine]
        return answer

    async def activities(**about: object) -> object:
        failed = {
            "StatusCode": "Failed",
            "StatusMessage": "We currently do not have sufficient m7i.large capacity.",
            "StartTime": bench.clock.now() + timedelta(seconds=1),
        }
        return {"Activities": [failed]}

    machine = await bench.machine(first[0])
    groups.describe_auto_scaling_groups, groups.describe_scaling_activities = short, activities
    await bench.capacity.start(starts)
    with pytest.raises(NoMoreHosts, match=r"sufficient m7i\.large capacity") as raised:
        await bench.capacity.start(starts)
    assert raised.value.refused == {"hst_2", "hst_3"}


async def test_the_groups_size_is_never_exceeded(bench: Bench) -> None:
    """More hosts than MaxSize: the rest is refused at once, and the capacity asked for is MaxSize."""
    with pytest.raises(NoMoreHosts, match="12 instances at the most") as raised:
        await bench.capacity.start(bench.starts(15))
    assert raised.value.refused == {"hst_13", "hst_14", "hst_15"}
    assert await bench.desired() == 12


async def test_a_lost_answer_starts_no_second_task(bench: Bench) -> None:
    """A StartTask whose answer is lost is not made again, by this process; another one sees the task."""
    await bench.capacity.start(bench.starts(1))
    await bench.world.join()
    bench.clients.lose = lambda operation: operation == "start_task"
    bench.clients.stale = lambda operation: operation == "list_tasks"
    assert await bench.capacity.start(bench.starts(1)) == []
    bench.clock.tick(10)
    assert await bench.capacity.start(bench.starts(1)) == []
    bench.clients.stale = lambda operation: False
    bench.clock.tick(10)
    assert len(await bench.capacity.start(bench.starts(1))) == 1
    assert len(await bench.another().start(bench.starts(1))) == 1
    assert len(bench.clients.made("start_task")) == 1


async def test_a_running_host_does_not_vanish_from_a_list_that_lags(bench: Bench) -> None:
    """A host that was seen alive is asked for by name when a list does not show it."""
    (host,) = await bench.up(1)
    bench.clock.tick(100)
    await bench.capacity.instances()
    bench.clients.hide = lambda operation, about: operation == "list_tasks"
    (seen,) = await bench.capacity.instances()
    assert (seen.id, seen.alive) == (host.id, True)


async def test_a_host_is_there_from_the_answer_on(bench: Bench) -> None:
    """A host whose task was started is there at once, though no list and no description shows it yet."""
    await bench.capacity.start(bench.starts(1))
    await bench.world.join()
    (host,) = await bench.capacity.start(bench.starts(1))
    bench.clients.hide = lambda operation, about: operation in ("list_tasks", "describe_tasks")
    assert [instance.id for instance in await bench.capacity.instances()] == [host.id]
    assert await bench.capacity.start(bench.starts(1)) == [host]


async def test_a_group_that_does_not_show_an_instance_kills_no_host(bench: Bench) -> None:
    """A running task on an instance that the group does not list is dead only when EC2 does not have it either."""
    (host,) = await bench.up(1)
    machine = await bench.machine(host)
    groups = await bench.clients._inner.get("autoscaling")
    real = groups.describe_auto_scaling_groups

    async def empty(**about: object) -> object:
        answer = await real(**about)
        answer["AutoScalingGroups"][0]["Instances"] = []
        return answer

    groups.describe_auto_scaling_groups = empty
    (seen,) = await bench.capacity.instances()
    assert seen.alive
    ec2 = await bench.world.clients.get("ec2")
    await ec2.terminate_instances(InstanceIds=[machine])
    (seen,) = await bench.capacity.instances()
    assert not seen.alive
    assert machine in (seen.detail or "")
    await bench.capacity.stop([seen.id])
    assert await bench.capacity.instances() == []


async def test_a_refused_task_gives_the_host_up_with_the_reason(bench: Bench) -> None:
    """A StartTask that ECS refuses for good is told at once; its machine stays for the next host."""
    await bench.capacity.start(bench.starts(1))
    await bench.world.join()
    bench.clients.fail = lambda operation: (
        client_error("AccessDeniedException", "not authorized to perform: ecs:StartTask")
        if operation == "start_task"
        else None
    )
    with pytest.raises(NoMoreHosts, match="not authorized") as raised:
        await bench.capacity.start(bench.starts(1))
    assert raised.value.refused == {"hst_1"}
    bench.clients.fail = lambda operation: None
    assert len(await bench.capacity.start(bench.starts(1, first=2))) == 1
    assert await bench.desired() == 1


@pytest.mark.parametrize(("code", "passing"), [("ValidationError", True), ("AccessDenied", False)])
async def test_no_task_starts_on_a_machine_that_is_not_protected(
    bench: Bench, code: str, passing: bool
) -> None:
    """Where a machine cannot be protected no host is started; it is tried again, or told when refused for good."""
    await bench.capacity.start(bench.starts(1))
    await bench.world.join()
    bench.clients.fail = lambda operation: (
        client_error(code, "no") if operation == "set_instance_protection" else None
    )
    if passing:
        assert await bench.capacity.start(bench.starts(1)) == []
    else:
        with pytest.raises(NoMoreHosts, match="AccessDenied"):
            await bench.capacity.start(bench.starts(1))
    assert bench.clients.made("start_task") == []
    bench.clients.fail = lambda operation: None
    assert len(await bench.capacity.start(bench.starts(1))) == 1


async def test_no_picture_is_better_than_half_a_picture(bench: Bench) -> None:
    """When part of it cannot be read, nothing is told rather than that hosts are gone."""
    await bench.up(1)
    for operation in ("list_tasks", "describe_auto_scaling_groups", "describe_container_instances"):
        bench.clients.fail = lambda name, failing=operation: (  # type: ignore[misc]
            client_error("AccessDeniedException") if name == failing else None
        )
        with pytest.raises(CapacityUnavailable):
            await bench.capacity.instances()
