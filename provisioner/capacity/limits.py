"""How fast AWS may be called: token buckets, and the limits they keep. Pure: the caller brings the time.

AWS counts per account and Region, and others live there, too; so a process keeps to `SHARE` of each limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: What one control plane takes of a limit.
SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A token bucket as AWS keeps it: so many calls at once, so many a second on."""

    burst: float
    per_s: float


#: ECS API, request throttling (read 2026-11): RunTask, StartTask, StopTask and ExecuteCommand share one bucket.
ECS_TASKS = Limit(burst=100, per_s=40)
#: The same page: Describe and List calls of clusters, tasks and instances.
ECS_READS = Limit(burst=100, per_s=20)
#: EC2 API, request throttling (read 2026-11): Describe calls with a filter.
EC2_READS = Limit(burst=100, per_s=20)
#: Auto Scaling says that all its calls share a bucket, and not how large it is; Batch names SubmitJob alone (read
#: 2026-11). These figures are ours: a tick makes one to three calls a group.
AUTO_SCALING = Limit(burst=50, per_s=10)
BATCH = Limit(burst=50, per_s=10)
#: AWS Batch quotas (read 2026-11): SubmitJob, 50 a second; no burst is named.
BATCH_SUBMIT = Limit(burst=50, per_s=50)

#: The bucket of each call; calls of one name share it.
BUCKETS: Mapping[tuple[str, str], tuple[str, Limit]] = {
    ("ecs", "start_task"): ("ecs tasks", ECS_TASKS),
    ("ecs", "stop_task"): ("ecs tasks", ECS_TASKS),
    ("ecs", "list_tasks"): ("ecs reads", ECS_READS),
    ("ecs", "describe_tasks"): ("ecs reads", ECS_READS),
    ("ecs", "list_container_instances"): ("ecs reads", ECS_READS),
    ("ecs", "describe_container_instances"): ("ecs reads", ECS_READS),
    ("ec2", "describe_instances"): ("ec2 reads", EC2_READS),
    ("autoscaling", "describe_auto_scaling_groups"): ("auto scaling", AUTO_SCALING),
    ("autoscaling", "describe_scaling_activities"): ("auto scaling", AUTO_SCALING),
    ("autoscaling", "set_desired_capacity"): ("auto scaling", AUTO_SCALING),
    ("autoscaling", "set_instance_protection"): ("auto scaling", AUTO_SCALING),
    ("autoscaling", "terminate_instance_in_auto_scaling_group"): ("auto scaling", AUTO_SCALING),
    ("batch", "submit_job"): ("batch submit", BATCH_SUBMIT),
    ("batch", "list_jobs"): ("batch", BATCH),
    ("batch", "describe_jobs"): ("batch", BATCH),
    ("batch", "terminate_job"): ("batch", BATCH),
}


class TokenBucket:
    """Gives out turns no faster than a limit.

    Args:
        limit: What the other side allows.
        share: The part of it that is taken here; at least one call at once.
    """

    def __init__(self, limit: Limit, *, share: float = SHARE) -> None:
        self._burst = max(1.0, limit.burst * share)
        self._per_s = limit.per_s * share
        self._tokens = self._burst
        self._at: float | None = None

    def take(self, now: float) -> float:
        """Take the next turn: how many seconds from `now` (monotonic) it comes. Turns come in the order taken."""
        self._refill(now)
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_s)

    def throttled(self, now: float) -> None:
        """The other side says that it is too fast: others use it as well. Nothing is left of the burst."""
        self._refill(now)
        self._tokens = min(self._tokens, 0.0)

    def _refill(self, now: float) -> None:
        if self._at is not None and now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now if self._at is None else max(self._at, now)
