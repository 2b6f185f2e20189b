"""The calls of ECS, Auto Scaling and EC2 that the capacity driver makes, answered from a simulated `Aws`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provisioner.simulate.aws import EcsTask
    from provisioner.simulate.aws import SimulatedAws as Aws

Answer = dict[str, Any]

#: Items of one page (ECS API reference, read 2026-11).
_PAGE = 100


def services(aws: Aws) -> dict[str, Any]:
    """The client of each service."""
    return {"autoscaling": _AutoScaling(aws), "ecs": _Ecs(aws), "ec2": _Ec2Api(aws)}


class _AutoScaling:
    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    async def describe_auto_scaling_groups(self, **about: Any) -> Answer:
        await self._aws.called("autoscaling", "describe_auto_scaling_groups")
        return {"AutoScalingGroups": [self._aws.about()]}

    async def describe_scaling_activities(self, **about: Any) -> Answer:
        await self._aws.called("autoscaling", "describe_scaling_activities")
        return {"Activities": [{"StatusCode": "InProgress"}]}

    async def set_desired_capacity(self, *, DesiredCapacity: int, **about: Any) -> Answer:
        await self._aws.called("autoscaling", "set_desired_capacity")
        self._aws.desire(DesiredCapacity)
        return {}

    async def set_instance_protection(
        self, *, InstanceIds: Sequence[str], ProtectedFromScaleIn: bool, **about: Any
    ) -> Answer:
        await self._aws.called("autoscaling", "set_instance_protection")
        for id in InstanceIds:
            if id in self._aws.machines:
                self._aws.machines[id].protected = ProtectedFromScaleIn
        return {}

    async def terminate_instance_in_auto_scaling_group(self, *, InstanceId: str, **about: Any) -> Answer:
        await self._aws.called("autoscaling", "terminate_instance_in_auto_scaling_group")
        self._aws.dismiss(InstanceId)
        return {}


class _Ecs:
    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    async def list_container_instances(self, *, nextToken: str = "0", **about: Any) -> Answer:
        await self._aws.called("ecs", "list_container_instances")
        joined = [each.id for each in self._aws.machines.values() if each.joined]
        return _page("containerInstanceArns", joined, nextToken)

    async def describe_container_instances(
        self, *, containerInstances: Sequence[str], **about: Any
    ) -> Answer:
        await self._aws.called("ecs", "describe_container_instances")
        busy = Counter(task.instance for task in self._aws.tasks.values() if task.status != "STOPPED")
        return {
            "containerInstances": [
                {
                    "containerInstanceArn": id,
                    "ec2InstanceId": id,
                    "status": "ACTIVE",
                    "agentConnected": True,
                    "runningTasksCount": busy[id],
                }
                for id in containerInstances
                if id in self._aws.machines
            ]
        }

    async def list_tasks(self, *, desiredStatus: str, nextToken: str = "0", **about: Any) -> Answer:
        await self._aws.called("ecs", "list_tasks")
        arns = [task.arn for task in self._aws.recent() if task.desired == desiredStatus]
        return _page("taskArns", arns, nextToken)

    async def describe_tasks(self, *, tasks: Sequence[str], **about: Any) -> Answer:
        await self._aws.called("ecs", "describe_tasks")
        found = [self._aws.tasks[arn] for arn in tasks if arn in self._aws.tasks]
        return {"tasks": [_task(each) for each in found]}

    async def start_task(
        self,
        *,
        containerInstances: Sequence[str],
        startedBy: str,
        group: str,
        overrides: Mapping[str, Any],
        **about: Any,
    ) -> Answer:
        await self._aws.called("ecs", "start_task")
        token = overrides["containerOverrides"][0]["environment"][0]["value"]
        task = self._aws.place(containerInstances[0], startedBy, group, token)
        if task is None:
            return {"failures": [{"reason": "MISSING"}]}
        return {"tasks": [_task(task)]}

    async def stop_task(self, *, task: str, **about: Any) -> Answer:
        await self._aws.called("ecs", "stop_task")
        self._aws.stop(task)
        return {}


class _Ec2Api:
    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    async def describe_instances(self, *, Filters: Sequence[Mapping[str, Any]], **about: Any) -> Answer:
        await self._aws.called("ec2", "describe_instances")
        found = [self._aws.machines[id] for id in Filters[0]["Values"] if id in self._aws.machines]
        told = [
            {"InstanceId": each.id, "LaunchTime": each.launched_at, "State": {"Name": each.state}}
            for each in found
        ]
        return {"Reservations": [{"Instances": told}]}


def _task(task: EcsTask) -> Answer:
    return {
        "taskArn": task.arn,
        "startedBy": task.host,
        "group": task.group,
        "lastStatus": task.status,
        "desiredStatus": task.desired,
        "createdAt": task.created_at,
        "stoppingAt": task.stopping_at,
        "stoppedAt": task.stopped_at,
        "stoppedReason": task.reason,
    }


def _page(name: str, items: list[str], token: str) -> Answer:
    start = int(token)
    answer: Answer = {name: items[start : start + _PAGE]}
    if start + _PAGE < len(items):
        answer["nextToken"] = str(start + _PAGE)
    return answer
