"""The machines of the profile: what EC2 and the ECS agent do for the instances and tasks that an API reports.

An emulator answers RunInstances and StartTask and starts nothing. This plays the part that has hardware, once a
moment: for each instance of an Auto Scaling group it makes a directory (the disk), an address of the loopback range
and registers it in the cluster that its user data names; for each task on it, it starts the container of the task
definition; ends those whose task or instance is gone; and reports tasks whose container ended. It knows nothing of
Shoal beyond two settings that make several hosts fit on one machine.

Run as a daemon: `python -m scripts.localstack.machines`.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from runtime_image.agent.host_runtime import cgroup_name_of
from scripts.localstack.docker import INSTANCE_LABEL, TASK_LABEL, Docker, DockerError
from scripts.localstack.events import Events
from scripts.localstack.places import REGION, Places, places

_log = logging.getLogger("machines")
_TICK_S = 0.5
_CLUSTER = re.compile(r"^ECS_CLUSTER=(\S+)$", re.MULTILINE)
#: What a machine's file is called while its disk is being wiped.
_ENDING = "ending.json"
_RUNNING = ("pending", "running")
#: What the container needs beside its task definition's capabilities, and ECS cannot say unless it is privileged:
#: Docker's filters on system calls and /proc lifted, as a privileged container has them, and devices.
#: 7: loop devices; 10:237: /dev/loop-control (Linux Documentation/admin-guide/devices.txt, read 2026-11).
_UNCONFINED = (
    "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined",
    "--security-opt", "systempaths=unconfined",
    "--device-cgroup-rule", "b 7:* rmw", "--device-cgroup-rule", "c 10:237 rmw",
    "--cgroupns=host", "--network=host",
)  # fmt: skip
#: Shares of the machine that each of its hosts has.
_MEMORY_MIB, _CPU_MILLIS, _DISK_MIB = 4096, 4000, 20_480
#: Host ids of the hosts' sandboxes: 64 Mi for each, above those of an agent on the machine itself.
_FIRST_ID, _IDS = 1 << 31, 1 << 26


@dataclass(frozen=True, kw_only=True)
class Machine:
    """An instance that has booted. `number` gives its address and its ids; `arn`: its name in the cluster."""

    id: str
    cluster: str
    number: int
    arn: str

    @property
    def address(self) -> str:
        """An address of the loopback range that no other machine of the profile has."""
        return f"127.77.0.{self.number}"


class Machines:
    """All of an installation.

    Args:
        clients: By the SDK's name of the service: `ecs`, `ec2`, `autoscaling`.
        events: Who is told, as ECS does.
    """

    def __init__(self, clients: Mapping[str, Any], docker: Docker, places: Places, events: Events) -> None:
        self._events = events
        self._ecs, self._ec2, self._groups = clients["ecs"], clients["ec2"], clients["autoscaling"]
        self._docker = docker
        self._places = places
        self._over: set[str] = set()
        self._stopping: set[str] = set()
        self._wiping: list[threading.Thread] = []

    def tick(self) -> None:
        """Look once, and make what is so what should be so."""
        there = dict(self._reported())
        booted = {machine.id: machine for machine in self.booted()}
        for id, cluster in there.items():
            if id not in booted and cluster:
                self._boot(id, cluster, booted)
        for id in booted.keys() - there.keys():
            self._terminate(booted.pop(id))
        containers = self._docker.containers()
        by_task = {each["Config"]["Labels"][TASK_LABEL]: each for each in containers}
        for cluster in sorted({machine.cluster for machine in booted.values()}):
            for task in self._tasks(cluster):
                machine = next((m for m in booted.values() if m.arn == task["containerInstanceArn"]), None)
                if machine is not None:
                    self._look_after(machine, task, by_task.get(task["taskArn"]))

    def booted(self) -> list[Machine]:
        """Those that have been started here and not ended."""
        return self._read("machine.json")

    def _read(self, name: str) -> list[Machine]:
        found = []
        for file in self._places.instances.glob(f"*/{name}"):
            try:
                found.append(Machine(**json.loads(file.read_text())))
            except FileNotFoundError:
                continue  # wiped just now
        return found

    def end_all(self) -> None:
        """As if each were terminated."""
        for machine in self.booted():
            self._terminate(machine)
        for container in self._docker.containers():
            self._docker.remove(container["Id"])
        self.wait()
        # Of one that was interrupted.
        for directory in self._places.instances.glob("i-*"):
            shutil.rmtree(directory, ignore_errors=True)

    def wait(self) -> None:
        """Until the disks of all that were terminated are wiped."""
        while self._wiping:
            self._wiping.pop().join()

    # -- instances ------------------------------------------------------------------------------------------------

    def _reported(self) -> Iterator[tuple[str, str]]:
        """Instances that run by EC2's word, each with the cluster of its group's launch template."""
        members: dict[str, str] = {}
        for page in self._groups.get_paginator("describe_auto_scaling_groups").paginate():
            for group in page["AutoScalingGroups"]:
                ids = [instance["InstanceId"] for instance in group["Instances"]]
                if ids:
                    members |= dict.fromkeys(ids, self._cluster(group))
        if members:
            filters = [{"Name": "instance-state-name", "Values": list(_RUNNING)}]
            for page in self._ec2.get_paginator("describe_instances").paginate(Filters=filters):
                for reservation in page["Reservations"]:
                    for instance in reservation["Instances"]:
                        if instance["InstanceId"] in members:
                            yield instance["InstanceId"], members[instance["InstanceId"]]

    def _cluster(self, group: Mapping[str, Any]) -> str:
        policy = group.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {})
        template = group.get("LaunchTemplate") or policy.get("LaunchTemplateSpecification")
        if not template:
            return ""
        versions = self._ec2.describe_launch_template_versions(
            LaunchTemplateId=template["LaunchTemplateId"], Versions=[template.get("Version") or "$Default"]
        )["LaunchTemplateVersions"]
        data = versions[0]["LaunchTemplateData"].get("UserData", "") if versions else ""
        found = _CLUSTER.search(base64.b64decode(data).decode(errors="replace"))
        return found[1] if found else ""

    def _boot(self, id: str, cluster: str, booted: dict[str, Machine]) -> None:
        taken = {machine.number for machine in [*booted.values(), *self._read(_ENDING)]}
        number = next(number for number in range(2, 32) if number not in taken)
        document = json.dumps({"instanceId": id, "region": REGION})
        answer = self._ecs.register_container_instance(cluster=cluster, instanceIdentityDocument=document)
        arn = answer["containerInstance"]["containerInstanceArn"]
        machine = booted[id] = Machine(id=id, cluster=cluster, number=number, arn=arn)
        directory = self._places.instances / id
        (directory / "disk").mkdir(parents=True, exist_ok=True)
        seed = self._places.state / "baked"
        if seed.is_dir():
            shutil.copytree(seed, directory / "disk", dirs_exist_ok=True, symlinks=True)
        (directory / "machine.json").write_text(json.dumps(asdict(machine)))
        _log.info("booted %s in %s at %s", id, cluster, machine.address)
        about = {"clusterArn": answer["containerInstance"].get("clusterArn") or _cluster_arn(arn)}
        self._events.send("aws.ecs", "ECS Container Instance State Change", {**about, "status": "ACTIVE"})

    def _terminate(self, machine: Machine) -> None:
        """The machine is gone: its containers die at once; its disk is wiped aside, others do not wait."""
        images = set()
        for container in self._docker.containers():
            if container["Config"]["Labels"][INSTANCE_LABEL] == machine.id:
                images.add(container["Config"]["Image"])
                self._docker.remove(container["Id"])
        directory = self._places.instances / machine.id
        (directory / "machine.json").rename(directory / _ENDING)
        try:
            for task in self._tasks(machine.cluster):
                if task["containerInstanceArn"] == machine.arn and task["lastStatus"] != "STOPPED":
                    self._report(task, f"Host EC2 (instance {machine.id}) terminated.")
            self._ecs.deregister_container_instance(
                cluster=machine.cluster, containerInstance=machine.arn, force=True
            )
        except ClientError as error:
            _log.info("not in the cluster any more: %s: %s", machine.id, error)
        _log.info("terminated %s", machine.id)
        wiping = threading.Thread(target=self._wipe, args=(machine, images), name=f"wipe {machine.id}")
        self._wiping.append(wiping)
        wiping.start()

    def _wipe(self, machine: Machine, images: Collection[str]) -> None:
        for image in images:
            self._sweep(machine, image)
        shutil.rmtree(self._places.instances / machine.id, ignore_errors=True)
        _log.info("wiped %s", machine.id)

    def _sweep(self, machine: Machine, image: str) -> None:
        """What ends with a real machine and not with a container: cgroups, mounts that others see."""
        for home in sorted((self._places.instances / machine.id / "disk" / "hosts").glob("*")):
            inside = f"/var/lib/shoal/hosts/{home.name}"
            with (self._places.state / "cgroups").open("a") as seen:
                seen.write(cgroup_name_of(Path(inside)) + "\n")
            command = ["-m", "runtime_image.agent.cleanup", "--home", inside]
            options = [
                *_UNCONFINED, "--entrypoint", "python3",
                *(part for name in _held(_ALL) for part in ("--cap-add", name)),
                "--volume", "/dev:/dev", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup",
                "--volume", f"{self._places.instances / machine.id / 'disk'}:/var/lib/shoal",
            ]  # fmt: skip
            try:
                self._docker.once(options, image, command)
            except DockerError as error:
                _log.error("not clean: %s %s: %s", machine.id, home.name, error)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _tasks(self, cluster: str) -> list[dict[str, Any]]:
        arns: list[str] = []
        for status in ("RUNNING", "STOPPED"):
            for page in self._ecs.get_paginator("list_tasks").paginate(cluster=cluster, desiredStatus=status):
                arns += [arn for arn in page["taskArns"] if arn not in self._over]
        tasks: list[dict[str, Any]] = []
        for first in range(0, len(arns), 100):
            tasks += self._ecs.describe_tasks(cluster=cluster, tasks=arns[first : first + 100])["tasks"]
        return tasks

    def _look_after(
        self, machine: Machine, task: Mapping[str, Any], container: Mapping[str, Any] | None
    ) -> None:
        arn = task["taskArn"]
        over = task["desiredStatus"] == "STOPPED"
        if task["lastStatus"] == "STOPPED":
            self._over.add(arn)
        elif container is None:
            if over:
                self._report(task, "Task was stopped before it started")
            else:
                self._start(machine, task)
        elif not container["State"]["Running"]:
            code = container["State"]["ExitCode"]
            self._report(task, f"Essential container in task exited ({code})")
        elif over:
            self._stop(arn, container)

    def _start(self, machine: Machine, task: Mapping[str, Any]) -> None:
        definition = self._ecs.describe_task_definition(taskDefinition=task["taskDefinitionArn"])[
            "taskDefinition"
        ]
        try:
            for about in definition["containerDefinitions"]:
                options, environment = container_options(
                    definition, about, task, machine, self._places.instances
                )
                container = self._docker.run(options, about["image"], environment)
                _log.info("started %s on %s: container %s", task["taskArn"], machine.id, container[:12])
            self._tell(task, "RUNNING")
        except DockerError as error:
            _log.error("%s", error)
            self._report(task, f"CannotStartContainerError: {error}")

    def _stop(self, arn: str, container: Mapping[str, Any]) -> None:
        """End it with its grace, aside: others do not wait."""
        if arn in self._stopping:
            return
        grace_s = int(container["Config"]["Labels"].get("shoal.stop_s", "30"))

        def stop() -> None:
            self._docker.stop(container["Id"], grace_s=grace_s)
            # The container and its log stay until the instance goes, as with ECS.
            _log.info("stopped %s", arn)

        self._stopping.add(arn)
        threading.Thread(target=stop, name=f"stop {arn}").start()

    def _report(self, task: Mapping[str, Any], reason: str) -> None:
        self._ecs.submit_task_state_change(
            cluster=task["clusterArn"], task=task["taskArn"], status="STOPPED", reason=reason
        )
        _log.info("reported %s: %s", task["taskArn"], reason)
        self._tell(task, "STOPPED")

    def _tell(self, task: Mapping[str, Any], status: str) -> None:
        about = {name: task.get(name) for name in ("taskArn", "clusterArn", "group", "startedBy")}
        self._events.send("aws.ecs", "ECS Task State Change", {**about, "lastStatus": status})


def container_options(
    definition: Mapping[str, Any],
    about: Mapping[str, Any],
    task: Mapping[str, Any],
    machine: Machine,
    instances: Path,
) -> tuple[list[str], dict[str, str]]:
    """How Docker is told of a task's container: options and environment."""
    disk = instances / machine.id / "disk"
    places = {
        volume["name"]: volume.get("host", {}).get("sourcePath") for volume in definition.get("volumes", ())
    }
    options = [
        *_UNCONFINED,
        "--label", f"{INSTANCE_LABEL}={machine.id}", "--label", f"{TASK_LABEL}={task['taskArn']}",
        "--label", f"shoal.stop_s={about.get('stopTimeout', 30)}",
    ]  # fmt: skip
    wanted = about.get("linuxParameters", {}).get("capabilities", {}).get("add", [])
    for name in _held(_ALL if about.get("privileged") else wanted):
        options += ["--cap-add", name]
    for mount in about.get("mountPoints", ()):
        source = places[mount["sourceVolume"]]
        # The state's directory is the machine's disk; devices and cgroups are those of the one real machine.
        source = str(disk) if source == "/var/lib/shoal" else source
        mode = "ro" if mount.get("readOnly") else "rw"
        options += ["--volume", f"{source}:{mount['containerPath']}:{mode}"]
    for limit in about.get("ulimits", ()):
        options += ["--ulimit", _ulimit(limit)]
    environment = {each["name"]: each["value"] for each in about.get("environment", ())}
    for override in task.get("overrides", {}).get("containerOverrides", ()):
        if override.get("name") == about["name"]:
            environment |= {each["name"]: each["value"] for each in override.get("environment", ())}
    environment |= {
        "SHOAL_AGENT_LISTEN": f"{machine.address}:{_port(environment)}",
        "SHOAL_AGENT_ID_BASE": str(_FIRST_ID + (machine.number - 2) * _IDS),
        "SHOAL_AGENT_MEMORY_MIB": str(_MEMORY_MIB),
        "SHOAL_AGENT_CPU_MILLIS": str(_CPU_MILLIS),
        "SHOAL_AGENT_DISK_MIB": str(_DISK_MIB),
    }
    return options, environment


def _cluster_arn(instance: str) -> str:
    """Of a container instance's ARN, `...:container-instance/<cluster>/<id>`."""
    return instance.rpartition("/")[0].replace(":container-instance/", ":cluster/")


def _port(environment: Mapping[str, str]) -> str:
    return environment.get("SHOAL_AGENT_LISTEN", ":8701").rpartition(":")[2]


def _ulimit(limit: Mapping[str, Any]) -> str:
    """As asked, within what this machine's root may give."""
    known = getattr(resource, f"RLIMIT_{limit['name'].upper()}", None)
    most = resource.getrlimit(known)[1] if known is not None else resource.RLIM_INFINITY
    soft, hard = limit["softLimit"], limit["hardLimit"]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    return f"{limit['name']}={soft}:{hard}"


#: Capabilities by their number (linux/capability.h, read 2026-11), those that an agent may be given.
_NUMBERS = {
    "NET_ADMIN": 12,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_RESOURCE": 24,
    "MKNOD": 27,
    "DAC_READ_SEARCH": 2,
}
_ALL: Sequence[str] = tuple(_NUMBERS)


def _held(wanted: Sequence[str]) -> list[str]:
    """Those that this machine's root has itself: nobody can give what they lack."""
    status = Path("/proc/self/status").read_text()
    bounds = int(re.search(r"^CapBnd:\s*([0-9a-f]+)", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    return [name for name in wanted if name not in _NUMBERS or bounds >> _NUMBERS[name] & 1]


def clients(where: Places) -> dict[str, Any]:
    """The SDK's clients."""
    return {
        name: boto3.client(
            name,
            region_name=REGION,
            endpoint_url=where.endpoint(name),
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        for name in ("ecs", "ec2", "autoscaling", "events", "lambda")
    }


def main() -> int:
    """Look after them until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    where = places()
    where.instances.mkdir(parents=True, exist_ok=True)
    by_name = clients(where)
    machines = Machines(by_name, Docker(where.docker_host), where, Events(by_name))
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    (where.run / "machines.ready").touch()
    while not over.wait(_TICK_S):
        try:
            machines.tick()
        except (BotoCoreError, ClientError, DockerError) as error:
            _log.error("%s", error)
    machines.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
