"""What capacity drivers on AWS are tested against: a moto server's ECS and Auto Scaling with instances that join as the
ECS agent would have them, a Batch API in memory (moto's needs Docker, or ends every job at once), and a client layer
that throttles, loses answers and answers with what was so a while ago: emulators are kinder than AWS."""

from __future__ import annotations

import asyncio
import copy
import json
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from provisioner.aws.clients import AwsClients
from provisioner.aws.settings import BatchPool, EcsPool
from provisioner.clock import ManualClock
from tests.emulators import fresh_name

#: One of the images that moto knows.
_IMAGE = "ami-03cf127a"
_READS = ("describe_", "list_")


class QuickClock(ManualClock):
    """Virtual time that starts now, or when told, and passes whenever somebody sleeps: nobody waits."""

    def __init__(self, start: datetime | None = None) -> None:
        super().__init__(start or datetime.now(UTC))

    async def sleep(self, seconds: float) -> None:
        """The time has passed."""
        self.tick(max(0.0, seconds))


class EcsWorld:
    """A cluster and a group of up to `max_size` instances on moto, once it is open."""

    def __init__(self, url: str, clients: AwsClients, *, max_size: int = 3) -> None:
        self.url = url
        self.clients = clients
        self.name = fresh_name("cap")
        self.max_size = max_size
        self.pool = EcsPool(
            pool="default", cluster=self.name, auto_scaling_group=self.name, task_definition=self.name
        )
        self._joined: set[str] = set()

    async def open(self) -> EcsWorld:
        """Make them."""
        await asyncio.to_thread(self._let_tasks_run)
        ec2, ecs, groups = [await self.clients.get(name) for name in ("ec2", "ecs", "autoscaling")]
        await ec2.create_launch_template(
            LaunchTemplateName=self.name,
            LaunchTemplateData={"ImageId": _IMAGE, "InstanceType": "m7i.large"},
        )
        await groups.create_auto_scaling_group(
            AutoScalingGroupName=self.name,
            LaunchTemplate={"LaunchTemplateName": self.name, "Version": "$Latest"},
            MinSize=0,
            MaxSize=self.max_size,
            DesiredCapacity=0,
            AvailabilityZones=["us-east-1a"],
        )
        await ecs.create_cluster(clusterName=self.name)
        await ecs.register_task_definition(
            family=self.name,
            networkMode="host",
            containerDefinitions=[{"name": "agent", "image": "agent", "memory": 256}],
        )
        return self

    def _let_tasks_run(self) -> None:
        # A task of moto goes one state further at each look, until it has stopped.
        body = {"model_name": "ecs::task", "transition": {"progression": "manual", "times": 1_000_000}}
        request = urllib.request.Request(
            f"{self.url}/moto-api/state-manager/set-transition",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
            pass

    async def group(self) -> Mapping[str, Any]:
        """The group as it is."""
        groups = await self.clients.get("autoscaling")
        answer = await groups.describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])
        found: Mapping[str, Any] = answer["AutoScalingGroups"][0]
        return found

    async def machines(self) -> list[str]:
        """The group's instances."""
        return [each["InstanceId"] for each in (await self.group())["Instances"]]

    async def tasks(self, status: str = "RUNNING") -> list[Mapping[str, Any]]:
        """All tasks, as described."""
        ecs = await self.clients.get("ecs")
        arns = (await ecs.list_tasks(cluster=self.name, desiredStatus=status))["taskArns"]
        if not arns:
            return []
        found: list[Mapping[str, Any]] = (await ecs.describe_tasks(cluster=self.name, tasks=arns))["tasks"]
        return found

    async def join(self, *, but: frozenset[str] = frozenset()) -> None:
        """New instances join the cluster, as ECS's agent on them would have them."""
        ecs = await self.clients.get("ecs")
        for id in await self.machines():
            if id not in self._joined and id not in but:
                self._joined.add(id)
                document = json.dumps({"instanceId": id})
                await ecs.register_container_instance(cluster=self.name, instanceIdentityDocument=document)

    async def lose(self, id: str) -> None:
        """An instance dies; as in the world, the group replaces it, and ECS stops its tasks."""
        ec2, ecs = await self.clients.get("ec2"), await self.clients.get("ecs")
        await ec2.terminate_instances(InstanceIds=[id])
        for task in await self.tasks():
            if task["group"].endswith(id):
                await ecs.stop_task(
                    cluster=self.name, task=task["taskArn"], reason=f"Host EC2 (instance {id}) terminated"
                )


class BatchApi:
    """AWS Batch's jobs in memory, behind the shape of its client; what is asked is checked against the SDK's own
    description of the service. `room`: how many jobs run at once."""

    pool = BatchPool(pool="default", job_queue="queue", job_definition="agent:1")

    def __init__(self, clock: ManualClock, *, room: int = 1000) -> None:
        from botocore import session, validate

        self._clock = clock
        self._model = session.get_session().get_service_model("batch")
        self._validator = validate.ParamValidator()
        self.room = room
        self.jobs: dict[str, dict[str, Any]] = {}

    async def get(self, service: str) -> Any:
        """As `AwsClients.get`."""
        assert service == "batch"
        return self

    async def close(self) -> None:
        """As `AwsClients.close`."""

    def _check(self, operation: str, about: Mapping[str, Any]) -> None:
        shape = self._model.operation_model(operation).input_shape
        report = self._validator.validate(about, shape)
        assert not report.has_errors(), report.generate_report()

    def _now(self) -> int:
        return int(self._clock.now().timestamp() * 1000)

    def move(self, id: str, status: str, **about: Any) -> None:
        """A job, or a child, comes to another state."""
        job = self.jobs[id]
        job |= {"status": status, **about}
        if status in ("SUCCEEDED", "FAILED"):
            job["stoppedAt"] = self._now()
        parent = self.jobs.get(id.partition(":")[0])
        if ":" in id and parent is not None:
            size = parent["arrayProperties"]["size"]
            states = {self.jobs[f"{parent['jobId']}:{index}"]["status"] for index in range(size)}
            over = states <= {"SUCCEEDED", "FAILED"}
            parent["status"] = ("FAILED" if "FAILED" in states else "SUCCEEDED") if over else "PENDING"
            if over:
                parent["stoppedAt"] = self._now()

    def step(self) -> None:
        """Batch runs what waits, as far as there is room."""
        running = sum(job["status"] == "RUNNING" for job in self.jobs.values())
        for id, job in list(self.jobs.items()):
            if job["status"] in ("SUBMITTED", "RUNNABLE") and "size" not in job.get("arrayProperties", {}):
                if running < self.room:
                    running += 1
                    self.move(id, "RUNNING", startedAt=self._now())
                else:
                    self.move(id, "RUNNABLE", statusReason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")

    async def submit_job(self, **about: Any) -> Mapping[str, Any]:
        """As the SDK's client."""
        self._check("SubmitJob", about)
        id = f"job-{len(self.jobs):06d}"
        job = {
            "jobId": id,
            "jobName": about["jobName"],
            "jobQueue": about["jobQueue"],
            "status": "SUBMITTED",
            "createdAt": self._now(),
            "container": {"environment": about["containerOverrides"]["environment"]},
        }
        assert len(json.dumps(about["containerOverrides"])) <= 8192
        self.jobs[id] = job
        size = about.get("arrayProperties", {}).get("size")
        if size:
            job["arrayProperties"] = {"size": size}
            for index in range(size):
                self.jobs[f"{id}:{index}"] = copy.deepcopy(job) | {
                    "jobId": f"{id}:{index}",
                    "arrayProperties": {"index": index},
                }
        return {"jobId": id, "jobName": about["jobName"]}

    async def list_jobs(self, **about: Any) -> Mapping[str, Any]:
        """As the SDK's client; two to a page, so that pages are asked for."""
        self._check("ListJobs", about)
        found = [job for id, job in self.jobs.items() if ":" not in id]
        if "filters" in about:
            (prefix,) = about["filters"][0]["values"]
            found = [job for job in found if job["jobName"].lower().startswith(prefix.rstrip("*").lower())]
            found.reverse()
            page = about["maxResults"]
        else:
            found = [job for job in found if job["status"] == about["jobStatus"]]
            page = 2
        first = int(about.get("nextToken", 0))
        answer: dict[str, Any] = {
            "jobSummaryList": [
                {"jobId": job["jobId"], "jobName": job["jobName"]} for job in found[first : first + page]
            ]
        }
        if first + page < len(found):
            answer["nextToken"] = str(first + page)
        return answer

    async def describe_jobs(self, **about: Any) -> Mapping[str, Any]:
        """As the SDK's client."""
        self._check("DescribeJobs", about)
        assert len(about["jobs"]) <= 100
        return {"jobs": [copy.deepcopy(self.jobs[id]) for id in about["jobs"] if id in self.jobs]}

    async def terminate_job(self, **about: Any) -> Mapping[str, Any]:
        """As the SDK's client: what runs is told to end, and ends."""
        self._check("TerminateJob", about)
        if self.jobs[about["jobId"]]["status"] not in ("SUCCEEDED", "FAILED"):
            self.move(about["jobId"], "FAILED", statusReason=about["reason"])
        return {}


class Hostile:
    """`AwsClients` whose clients are worse than the emulator.

    Attributes:
        calls: Every call that reached the service: its operation and parameters.
        fail: Called with the operation before each call: an error to raise instead.
        lose: Called with the operation after each call: whether its answer is lost.
        stale: Called with the operation of each read: whether to give the answer of the last time again.
        hide: Called with the operation and parameters of each list: whether to answer with nothing.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.fail: Callable[[str], Exception | None] = lambda operation: None
        self.lose: Callable[[str], bool] = lambda operation: False
        self.stale: Callable[[str], bool] = lambda operation: False
        self.hide: Callable[[str, Mapping[str, Any]], bool] = lambda operation, about: False
        self._answers: dict[str, Any] = {}

    async def get(self, service: str) -> Any:
        """As `AwsClients.get`."""
        return _HostileClient(self, await self._inner.get(service))

    async def close(self) -> None:
        """As `AwsClients.close`."""

    def made(self, operation: str) -> list[Mapping[str, Any]]:
        """The parameters of all calls of an operation."""
        return [about for name, about in self.calls if name == operation]

    async def answer(self, client: Any, operation: str, about: Mapping[str, Any]) -> Any:
        """One call."""
        from botocore.exceptions import ReadTimeoutError

        error = self.fail(operation)
        if error is not None:
            raise error
        name = operation + json.dumps(about, default=str, sort_keys=True)
        read = operation.startswith(_READS)
        if read and name in self._answers and self.stale(operation):
            return self._answers[name]
        self.calls.append((operation, about))
        if self.hide(operation, about):
            return {}
        answer = await getattr(client, operation)(**about)
        if read:
            self._answers[name] = answer
        if self.lose(operation):
            raise ReadTimeoutError(endpoint_url="http://127.0.0.1")
        return answer


class _HostileClient:
    def __init__(self, hostile: Hostile, inner: Any) -> None:
        self._hostile = hostile
        self._inner = inner

    def __getattr__(self, operation: str) -> Any:
        async def call(**about: Any) -> Any:
            return await self._hostile.answer(self._inner, operation, about)

        return call


def client_error(code: str, message: str = "scripted", status: int = 400) -> Exception:
    """An error as AWS answers it."""
    from botocore.exceptions import ClientError

    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "Scripted",
    )
