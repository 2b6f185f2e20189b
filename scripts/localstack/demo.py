"""What the profile has to show, step by step, through the one URL that a trainer has; each step asserted.

HTTP API -> Lambda (Mangum) -> agent in an ECS task's container -> runc sandbox in it, and back to zero hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.localstack.docker import INSTANCE_LABEL, TASK_LABEL, Docker
from shoal import Session, Shoal, ShoalError

_UP_S = 400.0
_LOST_S = 240.0
_ZERO_S = 300.0
_POLL_S = 2.0
_RESOURCES = {"cpu_millis": 500, "memory_mib": 256, "disk_mib": 512}
_PROGRAM = "def answer():\n    return 41\n"


class DemoFailed(Exception):
    """A step did not do what it has to; the message says which, and what was there instead."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host by all its names: Shoal's, ECS's, EC2's, Docker's."""

    id: str
    task: str
    instance: str
    container: str


class Demo:
    """One play.

    Args:
        clients: By the SDK's name of the service: `ecs`, `autoscaling`, `s3`.
        image: The directory of a built image.
        sessions: How many are forked from the snapshot.
    """

    def __init__(
        self,
        *,
        url: str,
        api_key: str,
        outputs: Mapping[str, Any],
        clients: Mapping[str, Any],
        docker: Docker,
        image: Path,
        sessions: int,
    ) -> None:
        self._shoal = Shoal(url=url, api_key=api_key)
        self._outputs, self._aws, self._docker = outputs, clients, docker
        self._image, self._sessions = image, sessions
        self._begun = time.monotonic()

    def play(self) -> None:
        """All of it.

        Raises:
            DemoFailed: As it says.
        """
        with self._shoal:
            self._check(not self._hosts(), "there is no host before the first session")
            name = self._push()
            box, host, snapshot = self._work(name)
            self._kill(box, host)
            self._go_on(snapshot, host)
            self._zero()
        self._say("done")

    # -- the steps ------------------------------------------------------------------------------------------------

    def _push(self) -> str:
        image = self._shoal.images.push(f"{self._image.name}:demo", self._image)
        self._say(f"image {image.name}:{image.tag} pushed, {len(image.layers)} layer(s) in S3")
        return f"{image.name}:{image.tag}"

    def _work(self, image: str) -> tuple[Session, Host, str]:
        """Create, run, edit, snapshot; the session, the host that did it, and the snapshot."""
        box = self._shoal.session(image, run="demo", name="first", resources=_RESOURCES, timeout_s=_UP_S)
        box.ready(timeout_s=_UP_S)
        self._say(f"session {box.id} runs, from zero hosts")
        told = box.exec("id -u; cat /proc/self/uid_map")
        uid, inside, outside, _ = told.stdout.split()
        self._check(
            uid == inside == "0" and int(outside) > 65_535, f"root inside is {outside} outside", told.stdout
        )
        box.write_file("/workspace/app.py", _PROGRAM)
        edited = box.edit("/workspace/app.py", old="41", new="42")
        self._check(edited.replacements == 1, "a file was edited", edited)
        snapshot = box.snapshot()
        objects = self._objects()
        self._check(
            snapshot.state == "available" and objects,
            f"snapshot {snapshot.id} is in S3: {len(objects)} objects",
        )
        host = self._host_of(box.refresh().host)
        self._say(
            f"its host is {host.id} = task {host.task} = container {host.container[:12]} on {host.instance}"
        )
        return box, host, snapshot.id

    def _kill(self, box: Session, host: Host) -> None:
        """The container dies, as a host may; the session's end is told with its cause."""
        self._docker.kill(host.container)
        self._say(f"container {host.container[:12]} killed")
        self._wait(_LOST_S, "the session to end", lambda: box.refresh().state == "ended")
        end = box.refresh().end
        self._check(
            end is not None and end.reason == "host_lost", "the session ended with its cause: host_lost", end
        )

    def _go_on(self, snapshot: str, before: Host) -> None:
        """Sessions from the snapshot, on another host, with the edited file."""
        with self._shoal.sessions(
            snapshot=snapshot, count=self._sessions, run="demo", resources=_RESOURCES
        ) as group:
            hosts = set()
            for box in group:
                box.ready(timeout_s=_UP_S)
                text = box.read_file("/workspace/app.py").content
                self._check(text == _PROGRAM.replace("41", "42"), f"{box.id} goes on from the snapshot", text)
                hosts.add(box.refresh().host)
            for id in hosts:
                host = self._host_of(id)
                self._check(
                    host.id != before.id
                    and host.container != before.container
                    and host.instance != before.instance,
                    f"on another host: {host.id} = task {host.task} = container {host.container[:12]}",
                )

    def _zero(self) -> None:
        """Nobody asks for any: every host goes, at every one of its names."""

        def gone() -> bool:
            return not self._hosts() and not self._running() and self._desired() == 0

        self._wait(_ZERO_S, "zero hosts", gone)
        self._say("zero hosts: no agent, no task, no instance, no container; desired capacity 0")

    # -- looking --------------------------------------------------------------------------------------------------

    def _host_of(self, id: str | None) -> Host:
        """The host by all its names; that they belong together is asserted."""
        cluster = self._outputs["cluster"]
        arns = self._aws["ecs"].list_tasks(cluster=cluster, desiredStatus="RUNNING")["taskArns"]
        tasks = self._aws["ecs"].describe_tasks(cluster=cluster, tasks=arns)["tasks"] if arns else []
        task = next((task for task in tasks if task["startedBy"] == id), None)
        self._check(task is not None, f"host {id} is a task that DescribeTasks tells", tasks, quiet=True)
        assert task is not None
        running = {each["Config"]["Labels"][TASK_LABEL]: each for each in self._running()}
        container = running.get(task["taskArn"])
        self._check(
            container is not None,
            f"task {task['taskArn']} is a container that runs",
            sorted(running),
            quiet=True,
        )
        assert container is not None
        instance = self._instance_of(task["containerInstanceArn"])
        told = container["Config"]["Labels"][INSTANCE_LABEL]
        self._check(
            told == instance, "the container is on the task's instance", f"{told}, {instance}", quiet=True
        )
        return Host(id=str(id), task=task["taskArn"], instance=instance, container=container["Id"])

    def _instance_of(self, arn: str) -> str:
        told = self._aws["ecs"].describe_container_instances(
            cluster=self._outputs["cluster"], containerInstances=[arn]
        )
        return str(told["containerInstances"][0]["ec2InstanceId"])

    def _hosts(self) -> int:
        return sum(self._shoal.pools.get().hosts.values())

    def _running(self) -> list[dict[str, Any]]:
        return [each for each in self._docker.containers() if each["State"]["Running"]]

    def _desired(self) -> int:
        (group,) = self._aws["autoscaling"].describe_auto_scaling_groups(
            AutoScalingGroupNames=[self._outputs["auto_scaling_group"]]
        )["AutoScalingGroups"]
        return int(group["DesiredCapacity"]) + len(group["Instances"])

    def _objects(self) -> list[str]:
        pages = self._aws["s3"].get_paginator("list_objects_v2").paginate(Bucket=self._outputs["bucket_name"])
        return [
            each["Key"] for page in pages for each in page.get("Contents", ()) if "snapshots" in each["Key"]
        ]

    # -- telling --------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float, what: str, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if found := look():
                    return found
            except ShoalError as error:
                self._say(f"(waiting for {what}: {error})")
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {seconds:.0f} s for {what}")
            time.sleep(_POLL_S)

    def _check(self, holds: object, what: str, instead: object = "", *, quiet: bool = False) -> None:
        if not holds:
            raise DemoFailed(f"not so: {what}. {instead}")
        if not quiet:
            self._say(what)

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {what}", flush=True)
