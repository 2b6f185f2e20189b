"""ECS, Auto Scaling and EC2 as far as the capacity driver speaks to them, in virtual time, with their limits.

The driver under it is the real one. Here are only AWS's side of the calls, how long instances take, and a count of what
was called: each call takes a token of its limit's bucket, and how empty a bucket ever was is the use of that limit.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from provisioner.capacity.limits import BUCKETS, Limit
from provisioner.clock import Clock
from provisioner.simulate.aws_api import services
from provisioner.simulate.scenario import HostModel

Answer = dict[str, Any]

#: EC2 API, resource rate limits (read 2026-11): instances that RunInstances starts, for Auto Scaling's launches too.
RUN_INSTANCES = Limit(burst=1000, per_s=2)
#: ECS API, request throttling (read 2026-11): what ECS agents report.
ECS_REPORTS = Limit(burst=200, per_s=120)
#: Seconds of one API call.
_CALL_S = 0.05
#: Seconds between two looks of Auto Scaling at its desired capacity.
_LOOK_S = 1.0


@dataclass(slots=True)
class _Use:
    """A limit's bucket. `lowest` is the share of it that was ever left; `over`: calls that found it empty."""

    limit: Limit
    tokens: float
    at_s: float = 0.0
    lowest: float = 1.0
    over: int = 0
    calls: int = 0
    per_second: Counter[int] = field(default_factory=Counter)

    def take(self, now_s: float, count: int = 1) -> None:
        self.tokens = min(self.limit.burst, self.tokens + (now_s - self.at_s) * self.limit.per_s)
        self.at_s = now_s
        self.calls += count
        self.per_second[int(now_s)] += count
        self.tokens -= count
        if self.tokens < 0:
            self.over += 1
            self.tokens = 0.0
        self.lowest = min(self.lowest, self.tokens / self.limit.burst)


@dataclass(slots=True)
class Ec2:
    """An instance, from its launch to its end."""

    id: str
    launched_s: float
    launched_at: datetime
    state: str = "pending"
    lifecycle: str = "Pending"
    protected: bool = False
    joined: bool = False
    ended_s: float | None = None


@dataclass(slots=True)
class EcsTask:
    """A task on an instance."""

    arn: str
    host: str
    group: str
    token: str
    instance: str
    created_at: datetime
    status: str = "PENDING"
    desired: str = "RUNNING"
    stopping_at: datetime | None = None
    stopped_at: datetime | None = None
    stopped_s: float | None = None
    reason: str = ""


class SimulatedAws:
    """One group and one cluster. `clients` is what the driver takes.

    Args:
        started: Called when an agent's program runs: host, join token, instance.
        ended: Called when it does not any more.
    """

    def __init__(
        self,
        clock: Clock,
        model: HostModel,
        chance: random.Random,
        *,
        max_size: int,
        started: Callable[[str, str, str], None],
        ended: Callable[[str], None],
    ) -> None:
        self.clock = clock
        self._model = model
        self._chance = chance
        self._max = max_size
        self._started = started
        self._ended = ended
        self._desired = 0
        self._numbers = 0
        self.machines: dict[str, Ec2] = {}
        self.tasks: dict[str, EcsTask] = {}
        self.history: list[Ec2] = []
        self.uses: dict[str, _Use] = {}
        self._launch_tokens = _Use(RUN_INSTANCES, RUN_INSTANCES.burst)
        self._looking: asyncio.Task[None] | None = None
        self._services: dict[str, Any] = services(self)
        self.uses["ec2 run instances"] = self._launch_tokens

    async def get(self, service: str) -> Any:
        """The client of a service (`aws_api`)."""
        return self._services[service]

    async def called(self, service: str, operation: str) -> None:
        """Count a call, and let its time pass."""
        name, limit = BUCKETS[service, operation]
        self.used(name, limit)
        await asyncio.sleep(_CALL_S)

    def used(self, name: str, limit: Limit) -> None:
        """Count a call against a limit."""
        use = self.uses.setdefault(name, _Use(limit, limit.burst))
        use.take(self.clock.monotonic())

    def lose(self, share: float) -> list[str]:
        """Take back so many of the instances, at once; answers which."""
        there = sorted(id for id, each in self.machines.items() if each.lifecycle == "InService")
        lost = self._chance.sample(there, round(share * len(there)))
        for id in lost:
            self.end(id, "Host EC2 (instance) terminated.")
        self._look_later()
        return lost

    def end(self, id: str, reason: str) -> None:
        """An instance is over, and what ran on it."""
        machine = self.machines.pop(id, None)
        if machine is None:
            return
        machine.state, machine.lifecycle, machine.joined = "terminated", "Terminated", False
        machine.ended_s = self.clock.monotonic() + self._model.billed_after_s
        for task in self.tasks.values():
            if task.instance == id and task.status != "STOPPED":
                self._stopped(task, reason)

    def desire(self, desired: int) -> None:
        """Have so many."""
        self._desired = min(desired, self._max)
        self._look_later()

    def stop(self, arn: str) -> None:
        """Tell a task to stop; its agent takes a moment to flush."""
        task = self.tasks[arn]
        if task.desired == "RUNNING":
            task.desired, task.stopping_at = "STOPPED", self.clock.now()
            asyncio.get_running_loop().call_later(1.0, self._stopped, task, "UserInitiated")

    def place(self, instance: str, host: str, group: str, token: str) -> EcsTask | None:
        """A task on an instance; None when it is not there."""
        machine = self.machines.get(instance)
        if machine is None or not machine.joined:
            return None
        self._numbers += 1
        task = EcsTask(f"arn:task/{self._numbers:06d}", host, group, token, instance, self.clock.now())
        self.tasks[task.arn] = task
        delay_s = self._model.task_s * self._chance.lognormvariate(0, self._model.sigma)
        asyncio.get_running_loop().call_later(delay_s, self._runs, task)
        return task

    def recent(self) -> list[EcsTask]:
        """Tasks that are read of: those that run, and those that stopped within the last hour."""
        now_s = self.clock.monotonic()
        old = [task.arn for task in self.tasks.values() if task.stopped_s and now_s - task.stopped_s > 3600]
        for arn in old:
            del self.tasks[arn]
        return list(self.tasks.values())

    def about(self) -> Answer:
        """The group, as Auto Scaling tells it."""
        return {
            "DesiredCapacity": self._desired,
            "MinSize": 0,
            "MaxSize": self._max,
            "Instances": [
                {
                    "InstanceId": each.id,
                    "LifecycleState": each.lifecycle,
                    "ProtectedFromScaleIn": each.protected,
                }
                for each in self.machines.values()
            ],
        }

    def dismiss(self, id: str) -> None:
        """End an instance and want one less."""
        if id in self.machines:
            self._desired -= 1
            self.end(id, "Host EC2 (instance) terminated.")

    # -- what AWS does by itself -----------------------------------------------------------------------------------

    def _look_later(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while len(self.machines) < self._desired:
            use = self._launch_tokens
            now_s = self.clock.monotonic()
            use.tokens = min(use.limit.burst, use.tokens + (now_s - use.at_s) * use.limit.per_s)
            use.at_s = now_s
            for _ in range(min(int(use.tokens), self._desired - len(self.machines))):
                use.take(now_s)
                self._launch()
            await asyncio.sleep(_LOOK_S)

    def _launch(self) -> None:
        self._numbers += 1
        machine = Ec2(f"i-{self._numbers:06d}", self.clock.monotonic(), self.clock.now())
        self.machines[machine.id] = machine
        self.history.append(machine)
        model = self._model
        boot_s = model.launch_s * self._chance.lognormvariate(0, model.sigma)
        if self._chance.random() < model.slow_share:
            boot_s *= model.slow_times
        loop = asyncio.get_running_loop()
        loop.call_later(boot_s, self._booted, machine)
        if self._chance.random() >= model.fail_share:
            loop.call_later(boot_s + model.join_s, self._joined, machine)

    def _booted(self, machine: Ec2) -> None:
        if machine.ended_s is None:
            machine.state, machine.lifecycle = "running", "InService"

    def _joined(self, machine: Ec2) -> None:
        if machine.ended_s is None:
            self.used("ecs reports", ECS_REPORTS)
            machine.joined = True

    def _runs(self, task: EcsTask) -> None:
        if task.status == "PENDING":
            self.used("ecs reports", ECS_REPORTS)
            task.status = "RUNNING"
            self._started(task.host, task.token, task.instance)

    def _stopped(self, task: EcsTask, reason: str) -> None:
        if task.status == "STOPPED":
            return
        self.used("ecs reports", ECS_REPORTS)
        task.status, task.desired, task.reason = "STOPPED", "STOPPED", reason
        task.stopped_at, task.stopped_s = self.clock.now(), self.clock.monotonic()
        self._ended(task.host)


def summary(uses: Mapping[str, _Use]) -> dict[str, dict[str, float]]:
    """Each limit: calls, the most within one second, the share of the bucket that was ever empty, calls over it."""
    return {
        name: {
            "calls": float(use.calls),
            "most_per_s": float(max(use.per_second.values(), default=0)),
            "limit_per_s": use.limit.per_s,
            "burst": use.limit.burst,
            "used": round(1.0 - use.lowest, 4),
            "over": float(use.over),
        }
        for name, use in sorted(uses.items())
    }
