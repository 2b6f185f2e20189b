"""Hosts as agents' tasks on the EC2 instances of Auto Scaling groups, one task an instance (docs/capacity.md).

The group's desired capacity is set in one step; as instances join the ECS cluster, each gets the task of one host by
StartTask, with that host's join token. A host is ended by ending its task, then exactly its instance. ECS's managed
scaling must be off, and the group's MinSize 0: this is the only one who scales.

Everything is read by polling and repeatable: no call has an effect twice that the next look would not find and mend.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta

import structlog

from provisioner.aws.clients import AwsClients
from provisioner.aws.settings import EcsPool
from provisioner.capacity import ecs_plan
from provisioner.capacity.calls import Calls, Refused
from provisioner.capacity.ecs_memory import PoolMemory
from provisioner.capacity.ecs_view import EcsReader, GroupView, Machine, Task, group_name, read_task
from provisioner.capacity.port import CapacityUnavailable, HostStart, Instance, NoMoreHosts
from provisioner.clock import Clock
from shoal.contract.base import HostId

log = structlog.get_logger("provisioner.capacity")

#: Seconds for which what was read serves the calls of the same tick.
_FRESH_S = 3.0
#: Seconds for which a host that is over is told of after its instance has gone.
_TELL_S = 600.0
#: Instances that one SetInstanceProtection takes (Auto Scaling API reference, read 2026-11).
_PROTECT = 50
#: Seconds between two looks at a task that is to stop.
_POLL_S = 2.0
#: StartTask failures that pass by themselves: ECS's agent is away, or an earlier agent's port is not free yet.
_PASSING = frozenset({"AGENT", "INACTIVE", "MISSING", "RESOURCE:PORTS"})


class EcsCapacity:
    """The `Capacity` port over ECS and Auto Scaling.

    Args:
        pools: Each its own group; a cluster and a task definition may be shared.
        join_s: Seconds from an instance's launch until it must have joined the cluster; then it is replaced. Less than
            the provisioner's `host_start_s`, so that the reason is known when the host is given up.
        stop_wait_s: How long `stop` waits for tasks to end before it returns and leaves the instances to its repeat.
        kill_s: Seconds after which a task that does not stop no longer keeps its instance.
    """

    def __init__(
        self,
        clients: AwsClients,
        pools: Sequence[EcsPool],
        *,
        clock: Clock,
        calls: Calls | None = None,
        chance: random.Random | None = None,
        join_s: float = 180.0,
        stop_wait_s: float = 15.0,
        kill_s: float = 150.0,
    ) -> None:
        self.calls = calls or Calls(clients, clock, chance=chance)
        self._clock = clock
        self._join_s = join_s
        self._stop_wait_s = stop_wait_s
        self._kill_s = kill_s
        self._pools = {pool.pool: PoolMemory(pool, EcsReader(self.calls, pool)) for pool in pools}

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """As the port says."""
        found: dict[HostId, Instance] = {}
        refused: dict[HostId, str] = {}
        for name, pool in self._pools.items():
            theirs = [start for start in starts if start.pool == name]
            if theirs:
                found |= {each.host: each for each in await self._start(pool, theirs, refused)}
        if refused:
            raise NoMoreHosts(next(iter(refused.values())), refused=refused.keys())
        return [found[start.host] for start in starts if start.host in found]

    async def stop(self, instances: Sequence[str]) -> None:
        """As the port says: tasks are told to end; the instances of those that have are terminated."""
        wanted = set(instances)
        deadline = self._clock.monotonic() + self._stop_wait_s
        while True:
            left = False
            for pool in self._pools.values():
                left = await self._stop(pool, wanted) or left
            if not left or self._clock.monotonic() >= deadline:
                return
            await self._clock.sleep(_POLL_S)
            for pool in self._pools.values():
                pool.forget()

    async def instances(self) -> list[Instance]:
        """As the port says."""
        for pool in self._pools.values():
            pool.forget()
        views = await asyncio.gather(*(self._view(pool) for pool in self._pools.values()))
        return [
            instance
            for pool, view in zip(self._pools.values(), views, strict=True)
            for instance in self._told(pool, view)
        ]

    async def settle(self, coming: Collection[HostId]) -> None:
        """As the port says."""
        for pool in self._pools.values():
            view = await self._view(pool)
            under_way = pool.under_way(view, self._clock.monotonic())
            idle = pool.idle_long(ecs_plan.idle_machines(view, under_way), self._clock.monotonic())
            todo = ecs_plan.surplus(view, coming, idle, under_way)
            # A task that the lists do not show yet keeps its instance.
            in_use = await self._in_use(pool, todo.end)
            if in_use:
                todo = ecs_plan.surplus(view, coming, idle - in_use, under_way)
            for machine in todo.end:
                log.info("machine.surplus", pool=pool.about.pool, instance=machine.id)
                await self._terminate(pool, machine)
            if todo.desired is not None:
                await self._desire(pool, view, todo.desired)

    async def _in_use(self, pool: PoolMemory, machines: Sequence[Machine]) -> set[str]:
        bare = await asyncio.gather(*(pool.reader.is_bare(machine) for machine in machines))
        return {machine.id for machine, is_bare in zip(machines, bare, strict=True) if not is_bare}

    async def close(self) -> None:
        """Nothing to do: the clients belong to whoever made them."""

    # -- starting -------------------------------------------------------------------------------------------------

    async def _start(
        self, pool: PoolMemory, starts: Sequence[HostStart], refused: dict[HostId, str]
    ) -> list[Instance]:
        view = await self._view(pool)
        under_way = pool.under_way(view, self._clock.monotonic())
        order = ecs_plan.order(view, starts, under_way, self._clock.now(), join_s=self._join_s)
        group = pool.about.auto_scaling_group
        for machine in order.stuck:
            log.warning("machine.stuck", pool=pool.about.pool, instance=machine.id)
            await self._terminate(pool, machine)
        names = ", ".join(machine.id for machine in order.stuck[:3])
        for start in order.late:
            refused[start.host] = (
                f"Of the instances launched {len(order.stuck)} ({names}) did not join cluster "
                f"{pool.about.cluster} within {self._join_s:.0f} s; others are tried."
            )
        if order.desired is not None:
            try:
                await self._desire(pool, view, order.desired)
            except Refused as error:
                refused |= {start.host: error.reason for start in order.wait}
        elif order.short:
            since = min(start.asked_at for start in order.short)
            why = await pool.reader.launch_failure(since) or ""
            if why:
                refused |= {start.host: f"Auto Scaling group {group}: {why}" for start in order.short}
        for start in order.full:
            refused[start.host] = (
                f"Auto Scaling group {group} may have {view.max_size} instances at the most."
            )
        placed = await self._place(pool, order.place, refused)
        told = {instance.host: instance for instance in self._told(pool, view)}
        told |= {task.host: _instance(pool, task, alive=True) for task in placed}
        return [told[start.host] for start in starts if start.host in told]

    async def _desire(self, pool: PoolMemory, view: GroupView, desired: int) -> None:
        log.info("group.desired", pool=pool.about.pool, before=view.desired, desired=desired)
        pool.forget()
        await self.calls.call(
            "autoscaling",
            "set_desired_capacity",
            AutoScalingGroupName=pool.about.auto_scaling_group,
            DesiredCapacity=desired,
            HonorCooldown=False,
        )

    async def _place(
        self, pool: PoolMemory, place: Sequence[tuple[HostStart, Machine]], refused: dict[HostId, str]
    ) -> list[Task]:
        """Start the tasks, each on its machine, which is protected before: the group must not pick it to scale in."""
        if not place:
            return []
        pool.forget()
        bare = [pair for pair in place if not pair[1].protected]
        skipped: set[str] = set()
        for first in range(0, len(bare), _PROTECT):
            some = bare[first : first + _PROTECT]
            try:
                await self.calls.call(
                    "autoscaling",
                    "set_instance_protection",
                    AutoScalingGroupName=pool.about.auto_scaling_group,
                    InstanceIds=[machine.id for _, machine in some],
                    ProtectedFromScaleIn=True,
                )
            except CapacityUnavailable as error:
                # One of them may just be going: the next look shows which.
                log.warning("machine.not_protected", pool=pool.about.pool, reason=error.reason)
                skipped |= {machine.id for _, machine in some}
                if isinstance(error, Refused) and error.code != "ValidationError":
                    refused |= {start.host: error.reason for start, _ in some}
        results = await asyncio.gather(
            *(self._place_one(pool, *pair, refused) for pair in place if pair[1].id not in skipped)
        )
        return [task for task in results if task is not None]

    async def _place_one(
        self, pool: PoolMemory, start: HostStart, machine: Machine, refused: dict[HostId, str]
    ) -> Task | None:
        # StartTask knows no client token. Until the task shows, it is not started again from here; from elsewhere, the
        # agent's port is taken, and on another machine its join token.
        pool.began(start.host, machine.id, self._clock.monotonic())
        try:
            answer = await self.calls.call(
                "ecs",
                "start_task",
                cluster=pool.about.cluster,
                taskDefinition=pool.about.task_definition,
                containerInstances=[machine.container_instance],
                startedBy=start.host,
                group=group_name(pool.about.pool, machine.id),
                enableECSManagedTags=True,
                tags=[
                    {"key": "shoal:pool", "value": pool.about.pool},
                    {"key": "shoal:host", "value": start.host},
                ],
                overrides={
                    "containerOverrides": [
                        {
                            "name": pool.about.container,
                            "environment": [{"name": "SHOAL_AGENT_JOIN_TOKEN", "value": start.join_token}],
                        }
                    ]
                },
            )
        except Refused as error:
            pool.failed(start.host)
            refused[start.host] = error.reason
            return None
        except CapacityUnavailable as error:
            log.warning("task.unknown", host_id=start.host, instance=machine.id, reason=error.reason)
            return None
        for failure in answer.get("failures") or ():
            pool.failed(start.host)
            why = str(failure.get("reason"))
            log.warning("task.refused", host_id=start.host, instance=machine.id, reason=why)
            if why not in _PASSING:
                refused[start.host] = f"ECS does not start an agent on instance {machine.id}: {why}."
            return None
        for about in answer.get("tasks") or ():
            log.info("host.started", host_id=start.host, pool=pool.about.pool, instance=machine.id)
            task = read_task(about, pool.about.pool)
            if task is not None:
                pool.started(task, self._clock.monotonic())
            return task
        return None

    # -- ending ---------------------------------------------------------------------------------------------------

    async def _stop(self, pool: PoolMemory, wanted: set[str]) -> bool:
        """One step for each task that is asked for; whether any is left."""
        view = await self._view(pool)
        left = False
        for task in view.tasks:
            if task.arn not in wanted or task.arn in pool.over:
                continue
            try:
                over = await self._stop_one(pool, view, task)
            except CapacityUnavailable as error:
                # It is asked for again; it must not hold up the others.
                log.warning("host.not_stopped", host_id=task.host, reason=error.reason)
                over = False
            if over:
                pool.over.add(task.arn)
            left = left or not over
        return left

    async def _stop_one(self, pool: PoolMemory, view: GroupView, task: Task) -> bool:
        """Tell a task to end, or end its instance where it has; whether that was all."""
        machine = view.machines.get(task.machine)
        if machine is None or not machine.counts:
            # Its instance is gone, or going, with whatever ran there.
            if task.stopped or task.machine in view.gone:
                return True
        elif task.stopped or self._give_up(task, machine):
            others = [other for other in view.tasks if other.machine == machine.id and other != task]
            if any(not other.stopped for other in others):
                log.warning("machine.shared", instance=machine.id, host_id=task.host)
            else:
                await self._terminate(pool, machine)
            return True
        if not task.stopping:
            pool.forget()
            await self.calls.call(
                "ecs",
                "stop_task",
                cluster=pool.about.cluster,
                task=task.arn,
                reason="Shoal lets this host go.",
            )
        return False

    def _give_up(self, task: Task, machine: Machine) -> bool:
        """Whether a task that does not stop is left to end with its instance."""
        if not task.stopping:
            return False
        since = task.stopping_at
        late = since is not None and self._clock.now() - since > timedelta(seconds=self._kill_s)
        return late or not machine.connected

    async def _terminate(self, pool: PoolMemory, machine: Machine) -> None:
        """End exactly this instance; the group does not replace it. Protection from scale-in does not hinder that."""
        pool.forget()
        try:
            await self.calls.call(
                "autoscaling",
                "terminate_instance_in_auto_scaling_group",
                InstanceId=machine.id,
                ShouldDecrementDesiredCapacity=True,
            )
        except Refused as error:
            # It ended meanwhile, or the call before was answered after all.
            if error.code != "ValidationError" or "not found" not in error.reason.lower():
                raise
        log.info("machine.ended", pool=pool.about.pool, instance=machine.id)

    # -- looking --------------------------------------------------------------------------------------------------

    async def _view(self, pool: PoolMemory) -> GroupView:
        now = self._clock.monotonic()
        if pool.view is None or now - pool.view[0] > _FRESH_S:
            view = pool.with_started(await pool.reader.read(), now)
            pool.view = (now, view)
            pool.over &= {task.arn for task in view.tasks}
        return pool.view[1]

    def _told(self, pool: PoolMemory, view: GroupView) -> Iterable[Instance]:
        """The hosts that there are. One that is over is told of until it was stopped, or until it is old news."""
        for task in ecs_plan.hosts(view):
            if task.arn in pool.over:
                continue
            machine = view.machines.get(task.machine)
            gone = task.machine in view.gone
            if task.stopped and (machine is None or not machine.counts):
                ended = task.stopped_at
                if ended is not None and self._clock.now() - ended > timedelta(seconds=_TELL_S):
                    continue
            detail = f"Its instance {task.machine} is gone." if gone and not task.stopped else task.detail
            yield _instance(pool, task, alive=not (task.stopped or gone), detail=detail)


def _instance(pool: PoolMemory, task: Task, *, alive: bool, detail: str | None = None) -> Instance:
    return Instance(
        id=task.arn,
        host=task.host,
        pool=pool.about.pool,
        alive=alive,
        started_at=task.created_at,
        detail=detail,
    )
