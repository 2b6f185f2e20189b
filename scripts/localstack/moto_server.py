"""moto's server with what it gets wrong mended, run by the Python of its own environment (not by ours).

moto 5.2.1 refuses a task definition for EC2 whose container has `memoryReservation` and no `memory`; ECS takes either
(RegisterTaskDefinition, read 2026-11).
"""

from __future__ import annotations

from typing import Any

from moto.ecs.models import EC2ContainerServiceBackend  # type: ignore[import-not-found]
from moto.server import main  # type: ignore[import-not-found]

_refuse = EC2ContainerServiceBackend._validate_container_defs


def _validate(
    memory: str | None, containers: list[dict[str, Any]], compatibilities: list[str] | None
) -> None:
    told = [{"memory": each.get("memoryReservation"), **each} for each in containers]
    _refuse(memory, [{k: v for k, v in each.items() if v is not None} for each in told], compatibilities)


EC2ContainerServiceBackend._validate_container_defs = staticmethod(_validate)

if __name__ == "__main__":
    main()
