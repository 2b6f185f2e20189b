"""moto's server with what it gets wrong mended, run by the Python of its own environment (not by ours).

All of moto 5.2.1, against the API references as read 2026-11:

- RegisterTaskDefinition for EC2 takes a container that has `memoryReservation` and no `memory`; moto refuses it.
- CreateLaunchTemplate's user data is a string; moto fails when a group starts instances from such a template.
- A task runs until it is stopped; moto's ends a little with each look.
- A task has times, and StopTask only asks: it has stopped once the machine says so (SubmitTaskStateChange).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult  # type: ignore[import-not-found]
from moto.core.types import Base64EncodedString  # type: ignore[import-not-found]
from moto.ec2.models.launch_templates import LaunchTemplateVersion  # type: ignore[import-not-found]
from moto.ecs.models import EC2ContainerServiceBackend, Task  # type: ignore[import-not-found]
from moto.ecs.responses import EC2ContainerServiceResponse  # type: ignore[import-not-found]
from moto.moto_api import state_manager  # type: ignore[import-not-found]
from moto.server import main  # type: ignore[import-not-found]

_refuse = EC2ContainerServiceBackend._validate_container_defs


def _validate(
    memory: str | None, containers: list[dict[str, Any]], compatibilities: list[str] | None
) -> None:
    told = [{"memory": each.get("memoryReservation"), **each} for each in containers]
    _refuse(memory, [{k: v for k, v in each.items() if v is not None} for each in told], compatibilities)


def _user_data(version: Any) -> Any:
    data = version.data.get("UserData")
    return Base64EncodedString(data) if isinstance(data, str) else data


_make_task = Task.__init__
_end_task = EC2ContainerServiceBackend.stop_task


def _new_task(task: Any, *arguments: Any, **named: Any) -> None:
    _make_task(task, *arguments, **named)
    task.created_at = task.started_at = datetime.now(UTC)


def _stop_task(backend: Any, cluster: str, task: str, reason: str) -> Any:
    (found,) = backend.describe_tasks(cluster, [task])
    if found.desired_status != "STOPPED":
        found.desired_status, found.last_status = "STOPPED", "STOPPING"
        found.stopped_reason, found.stop_code = reason, "UserInitiated"
        found.stopping_at = datetime.now(UTC)
    return found


def _submit_task_state_change(response: Any) -> Any:
    cluster, task = response._get_param("cluster"), response._get_param("task")
    if response._get_param("status") == "STOPPED":
        (found,) = response.ecs_backend.describe_tasks(cluster, [task])
        if found.last_status != "STOPPED":
            asked = found.desired_status == "STOPPED"
            reason = found.stopped_reason if asked else response._get_param("reason")
            _end_task(response.ecs_backend, cluster, task, reason)
            found.stopped_at = datetime.now(UTC)
            found.stopping_at = getattr(found, "stopping_at", found.stopped_at)
            found.stop_code = getattr(found, "stop_code", "EssentialContainerExited")
    return ActionResult({"acknowledgment": "ACCEPT"})


Task.__init__ = _new_task
EC2ContainerServiceBackend.stop_task = _stop_task
EC2ContainerServiceResponse.submit_task_state_change = _submit_task_state_change
state_manager.set_transition("ecs::task", {"progression": "manual", "times": 1_000_000_000})
EC2ContainerServiceBackend._validate_container_defs = staticmethod(_validate)
LaunchTemplateVersion.user_data = property(_user_data)

if __name__ == "__main__":
    main()
