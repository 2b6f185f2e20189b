"""What one process remembers of an ECS pool between two looks: what was done and need not show yet, for ECS's lists lag
behind. Losing it costs time, never a host."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from provisioner.aws.settings import EcsPool
from provisioner.capacity.ecs_view import EcsReader, GroupView, Task
from shoal.contract.base import HostId

#: Seconds in which a task that was started must show in what is read; until then it is not started again.
_SHOW_S = 60.0
#: Seconds that an instance must have looked idle before it is given back: reads lag behind.
_IDLE_S = 30.0


class PoolMemory:
    """A pool, and what this process remembers of it.

    Attributes:
        over: Tasks whose stop is done.
        view: When the pool was read, and what was there.
    """

    def __init__(self, about: EcsPool, reader: EcsReader) -> None:
        self.about = about
        self.reader = reader
        self.over: set[str] = set()
        self.view: tuple[float, GroupView] | None = None
        self._began: dict[HostId, tuple[str, float]] = {}
        self._started: dict[str, tuple[Task, float]] = {}
        self._idle_since: dict[str, float] = {}

    def forget(self) -> None:
        """What was read is not so any more."""
        self.view = None

    def began(self, host: HostId, machine: str, now: float) -> None:
        """A task was, perhaps, started."""
        self._began[host] = (machine, now)

    def failed(self, host: HostId) -> None:
        """It was not."""
        self._began.pop(host, None)

    def started(self, task: Task, now: float) -> None:
        """A task was started for certain: it is there, whatever is read in its first minute."""
        self._started[task.arn] = (task, now)

    def with_started(self, view: GroupView, now: float) -> GroupView:
        """What was read, with what it does not show yet."""
        shown = {task.arn for task in view.tasks}
        self._started = {
            arn: (task, at)
            for arn, (task, at) in self._started.items()
            if arn not in shown and now - at < _SHOW_S
        }
        return replace(view, tasks=(*view.tasks, *(task for task, _ in self._started.values())))

    def under_way(self, view: GroupView, now: float) -> dict[HostId, str]:
        """Hosts whose task was started and does not show yet."""
        shown = {task.host for task in view.tasks}
        self._began = {
            host: (machine, at)
            for host, (machine, at) in self._began.items()
            if host not in shown and now - at < _SHOW_S and machine in view.machines
        }
        return {host: machine for host, (machine, _) in self._began.items()}

    def idle_long(self, idle: Collection[str], now: float) -> set[str]:
        """Those of the idle machines that have been so for a while."""
        self._idle_since = {id: self._idle_since.get(id, now) for id in idle}
        return {id for id, since in self._idle_since.items() if now - since >= _IDLE_S}
