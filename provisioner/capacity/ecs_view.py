"""What ECS, Auto Scaling and EC2 say of a pool, read by polling and put together; nothing here changes anything.

One agent's task runs on one instance. Which host a task is stands in its `startedBy`, which pool and instance in its
`group`: both stay readable for an hour after it stopped, when its instance may be long gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from provisioner.aws.settings import EcsPool
from provisioner.capacity.calls import Calls
from provisioner.capacity.port import CapacityUnavailable
from shoal.contract.base import HostId

#: What one Describe call takes (ECS API reference, read 2026-11).
_BATCH = 100
#: EC2's limit of values of one filter is 200 (read 2026-11).
_EC2_BATCH = 200
_GONE_STATES = frozenset({"shutting-down", "terminated", "stopping", "stopped"})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """An EC2 instance of the group.

    Attributes:
        lifecycle: Its state in the group, such as `Pending`, `InService`, `Terminating:Wait`.
        container_instance: ECS's name of it; None before it has joined the cluster.
        connected: Whether it is ACTIVE in the cluster and ECS's agent on it answers.
        launched_at: When it was launched; known of those that have not joined.
    """

    id: str
    lifecycle: str
    protected: bool = False
    container_instance: str | None = None
    connected: bool = False
    launched_at: datetime | None = None

    @property
    def counts(self) -> bool:
        """Whether it is part of the desired capacity. A warm pool's machine (`Warmed:Stopped`) is not, nor is one that
        is being terminated."""
        return self.lifecycle == "InService" or self.lifecycle.startswith("Pending")

    @property
    def ready(self) -> bool:
        """Whether a task can be started on it."""
        return self.lifecycle == "InService" and self.connected and self.container_instance is not None


@dataclass(frozen=True, kw_only=True)
class Task:
    """An agent's task. `stopping_at`: when it was told to stop; `detail`: why it ended."""

    arn: str
    host: HostId
    machine: str
    stopped: bool
    stopping: bool
    created_at: datetime
    stopping_at: datetime | None = None
    stopped_at: datetime | None = None
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """A pool as it is.

    Attributes:
        machines: The instances of the group by id, whatever their state.
        tasks: Those that run, and those that stopped within the last hour.
        gone: Instances that tasks ran on and that are certainly no more.
    """

    desired: int
    min_size: int
    max_size: int
    machines: Mapping[str, Machine] = field(default_factory=dict)
    tasks: tuple[Task, ...] = ()
    gone: frozenset[str] = frozenset()


def group_name(pool: str, machine: str) -> str:
    """What a task's `group` says: its pool and its instance."""
    return f"shoal:{pool}:{machine}"


def read_task(about: Mapping[str, Any], pool: str) -> Task | None:
    """A described task; None when it is not an agent of this pool."""
    prefix = f"shoal:{pool}:"
    group = str(about.get("group") or "")
    host = str(about.get("startedBy") or "")
    if not group.startswith(prefix) or not host:
        return None
    stopped = about.get("lastStatus") == "STOPPED"
    return Task(
        arn=about["taskArn"],
        host=HostId(host),
        machine=group.removeprefix(prefix),
        stopped=stopped,
        stopping=stopped or about.get("desiredStatus") == "STOPPED",
        created_at=_moment(about.get("createdAt")) or datetime.fromtimestamp(0, UTC),
        stopping_at=_moment(about.get("stoppingAt")),
        stopped_at=_moment(about.get("stoppedAt")),
        detail=_why(about) if stopped else None,
    )


class EcsReader:
    """Reads one pool.

    What was seen alive is asked for by name until it is seen stopped, so that a list that lags behind does not make a
    host disappear.
    """

    def __init__(self, calls: Calls, pool: EcsPool) -> None:
        self._calls = calls
        self._pool = pool
        self._family = pool.task_definition.rpartition("/")[2].partition(":")[0]
        self._known: set[str] = set()

    async def read(self) -> GroupView:
        """The pool now.

        Raises:
            CapacityUnavailable: Part of it could not be read, or the group does not exist.
        """
        group, instances, tasks = await asyncio.gather(
            self._group(), self._container_instances(), self._tasks()
        )
        machines: dict[str, Machine] = {}
        for about in group.get("Instances") or ():
            id = about["InstanceId"]
            joined = instances.get(id)
            machines[id] = Machine(
                id=id,
                lifecycle=about.get("LifecycleState", ""),
                protected=bool(about.get("ProtectedFromScaleIn")),
                container_instance=joined["containerInstanceArn"] if joined else None,
                connected=bool(joined and joined["status"] == "ACTIVE" and joined.get("agentConnected")),
            )
        late = [each.id for each in machines.values() if each.counts and not each.connected]
        lost = {task.machine for task in tasks if not task.stopped and task.machine not in machines}
        launched, there = await self._launched([*late, *sorted(lost)])
        for id in late:
            machines[id] = replace(machines[id], launched_at=launched.get(id))
        self._known = {task.arn for task in tasks if not task.stopped}
        return GroupView(
            desired=int(group["DesiredCapacity"]),
            min_size=int(group["MinSize"]),
            max_size=int(group["MaxSize"]),
            machines=machines,
            tasks=tuple(sorted(tasks, key=lambda task: (task.created_at, task.arn))),
            gone=frozenset(lost - there),
        )

    async def is_bare(self, machine: Machine) -> bool:
        """Whether no agent's task is on an instance, asked for this one alone: a look at the whole may lag."""
        if machine.container_instance is None:
            return True
        answer = await self._calls.call(
            "ecs",
            "list_tasks",
            cluster=self._pool.cluster,
            containerInstance=machine.container_instance,
            family=self._family,
        )
        return not answer.get("taskArns")

    async def launch_failure(self, since: datetime) -> str | None:
        """Why the group launches nothing: what its latest activities since then say; None while it still tries."""
        answer = await self._calls.call(
            "autoscaling",
            "describe_scaling_activities",
            AutoScalingGroupName=self._pool.auto_scaling_group,
            MaxRecords=20,
        )
        return read_failure(answer.get("Activities") or (), since)

    async def _group(self) -> Mapping[str, Any]:
        name = self._pool.auto_scaling_group
        answer = await self._calls.call(
            "autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=[name]
        )
        for group in answer.get("AutoScalingGroups") or ():
            found: Mapping[str, Any] = group
            return found
        raise CapacityUnavailable(f"There is no Auto Scaling group {name}.")

    async def _container_instances(self) -> dict[str, Mapping[str, Any]]:
        """By EC2 instance; one that registered twice is the one that is connected."""
        cluster = self._pool.cluster
        arns = await _all(
            self._calls.pages("ecs", "list_container_instances", "containerInstanceArns", cluster=cluster)
        )
        found: dict[str, Mapping[str, Any]] = {}
        for some in _batches(arns, _BATCH):
            answer = await self._calls.call(
                "ecs", "describe_container_instances", cluster=cluster, containerInstances=some
            )
            for about in answer.get("containerInstances") or ():
                id = about.get("ec2InstanceId")
                if id and (id not in found or about.get("agentConnected")):
                    found[id] = about
        return found

    async def _tasks(self) -> list[Task]:
        cluster = self._pool.cluster
        arns: dict[str, None] = {}
        for status in ("RUNNING", "STOPPED"):
            listed = self._calls.pages(
                "ecs", "list_tasks", "taskArns", cluster=cluster, family=self._family, desiredStatus=status
            )
            arns |= dict.fromkeys(await _all(listed))
        arns |= dict.fromkeys(sorted(self._known))
        found: list[Task] = []
        for some in _batches(list(arns), _BATCH):
            answer = await self._calls.call("ecs", "describe_tasks", cluster=cluster, tasks=some)
            for about in answer.get("tasks") or ():
                task = read_task(about, self._pool.pool)
                if task is not None:
                    found.append(task)
        return list({task.arn: task for task in found}.values())

    async def _launched(self, ids: Sequence[str]) -> tuple[dict[str, datetime], set[str]]:
        """When instances were launched, and which of them EC2 still has."""
        launched: dict[str, datetime] = {}
        there: set[str] = set()
        for some in _batches(ids, _EC2_BATCH):
            # By filter, not by id: an id that EC2 knows no more would fail the call.
            pages = self._calls.pages(
                "ec2",
                "describe_instances",
                "Reservations",
                token="NextToken",
                Filters=[{"Name": "instance-id", "Values": list(some)}],
            )
            async for reservation in pages:
                for about in reservation.get("Instances") or ():
                    when = _moment(about.get("LaunchTime"))
                    if when is not None:
                        launched[about["InstanceId"]] = when
                    if about.get("State", {}).get("Name") not in _GONE_STATES:
                        there.add(about["InstanceId"])
        return launched, there


def read_failure(activities: Iterable[Mapping[str, Any]], since: datetime) -> str | None:
    """What the newest scaling activities say when launches fail; None when one is under way or nothing failed."""
    recent = [each for each in activities if (_moment(each.get("StartTime")) or since) >= since]
    if any(each.get("StatusCode") not in ("Successful", "Failed", "Cancelled") for each in recent):
        return None
    failed = [each for each in recent if each.get("StatusCode") in ("Failed", "Cancelled")]
    if not failed:
        return None
    newest = max(failed, key=lambda each: _moment(each.get("StartTime")) or since)
    return str(newest.get("StatusMessage") or newest.get("Description") or "A launch failed.")[:500]


def _why(about: Mapping[str, Any]) -> str:
    said = str(about.get("stoppedReason") or about.get("stopCode") or "it gives no reason").rstrip(".")
    parts = [f"Its task ended: {said}"]
    for container in about.get("containers") or ():
        if container.get("reason"):
            parts.append(str(container["reason"]).rstrip("."))
        elif container.get("exitCode") not in (None, 0):
            parts.append(f"{container.get('name', 'its container')} exited with {container['exitCode']}")
    return "; ".join(parts)[:500] + "."


def _moment(when: Any) -> datetime | None:
    """A time as the SDK gives it, aware."""
    if isinstance(when, datetime):
        return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return None


def _batches(items: Sequence[str], size: int) -> Iterable[list[str]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))


async def _all(pages: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in pages]
