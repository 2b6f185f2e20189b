"""Hosts as AWS Batch jobs: an array job of up to 100 children, each an agent that serves until it is let go
(docs/capacity.md).

Batch brings the instances, Spot included, and takes them away when their jobs have ended. A job is tried once: another
attempt would be another boot with a join token that was used; who is missing is replaced by the planner.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from provisioner.aws.clients import AwsClients
from provisioner.aws.settings import BatchPool
from provisioner.capacity.calls import Calls, Refused
from provisioner.capacity.port import CapacityUnavailable, HostStart, Instance, NoMoreHosts
from provisioner.clock import Clock
from shoal.contract.base import HostId

log = structlog.get_logger("provisioner.capacity")

#: Children of one array job: their join tokens share one variable, and ECS takes 8,192 characters of overrides (ECS API
#: reference, read 2026-11); a token is 68.
CHILDREN = 100
TOKENS = "SHOAL_AGENT_JOIN_TOKENS"
#: Jobs that one DescribeJobs takes (Batch API reference, read 2026-11).
_BATCH = 100
#: An array job is PENDING while its children run; a plain job goes through all of these (user guide, read 2026-11).
_LIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
_OVER = frozenset({"SUCCEEDED", "FAILED"})
#: Their container does not run yet: `startedAt` is told from RUNNING on (Batch API reference, read 2026-11).
_QUEUED = frozenset({"SUBMITTED", "PENDING", "RUNNABLE", "STARTING"})
#: Seconds in which a submitted job must show in what is read; until then it is not submitted again.
_SHOW_S = 60.0
#: Seconds for which a host that is over is told of.
_TELL_S = 600.0
_POLL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A job, or a child of one, that is a host."""

    id: str
    host: HostId
    status: str
    created_at: datetime
    stopped_at: datetime | None
    detail: str | None
    ran_at: datetime | None = None

    @property
    def over(self) -> bool:
        return self.status in _OVER


class BatchCapacity:
    """The `Capacity` port over AWS Batch.

    Args:
        pools: Each its own job names; queues and job definitions may be shared.
        stop_wait_s: How long `stop` waits for jobs to end before it returns.
    """

    def __init__(
        self,
        clients: AwsClients,
        pools: Sequence[BatchPool],
        *,
        clock: Clock,
        calls: Calls | None = None,
        chance: random.Random | None = None,
        stop_wait_s: float = 15.0,
    ) -> None:
        self.calls = calls or Calls(clients, clock, chance=chance)
        self._clock = clock
        self._stop_wait_s = stop_wait_s
        self._pools = {pool.pool: _Pool(pool) for pool in pools}

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """As the port says; what is submitted counts as there, though Batch may take minutes to run it."""
        found: dict[HostId, Instance] = {}
        refused: dict[HostId, str] = {}
        for name, pool in self._pools.items():
            theirs = [start for start in starts if start.pool == name]
            if not theirs:
                continue
            told = self._told(pool, await self._read(pool))
            there = {instance.host for instance in told} | pool.under_way(self._clock.monotonic())
            pending = [start for start in theirs if start.host not in there]
            for first in range(0, len(pending), CHILDREN):
                told += await self._submit(pool, pending[first : first + CHILDREN], refused)
            found |= {instance.host: instance for instance in told}
        if refused:
            raise NoMoreHosts(next(iter(refused.values())), refused=refused.keys())
        return [found[start.host] for start in starts if start.host in found]

    async def stop(self, instances: Sequence[str]) -> None:
        """As the port says: their jobs are terminated, those that wait as well as those that run."""
        wanted = set(instances)
        told: set[str] = set()
        deadline = self._clock.monotonic() + self._stop_wait_s
        while True:
            left = False
            for pool in self._pools.values():
                for job in await self._read(pool):
                    if job.id not in wanted:
                        continue
                    if job.over:
                        pool.over.add(job.id)
                        continue
                    left = True
                    if job.id not in told:
                        told.add(job.id)
                        await self.calls.call(
                            "batch", "terminate_job", jobId=job.id, reason="Shoal lets this host go."
                        )
            if not left or self._clock.monotonic() >= deadline:
                return
            await self._clock.sleep(_POLL_S)

    async def instances(self) -> list[Instance]:
        """As the port says."""
        pools = list(self._pools.values())
        jobs = await asyncio.gather(*(self._read(pool) for pool in pools))
        return [
            instance for pool, some in zip(pools, jobs, strict=True) for instance in self._told(pool, some)
        ]

    async def close(self) -> None:
        """Nothing to do: the clients belong to whoever made them."""

    async def _submit(
        self, pool: _Pool, starts: Sequence[HostStart], refused: dict[HostId, str]
    ) -> list[Instance]:
        about = pool.about
        array = {"arrayProperties": {"size": len(starts)}} if len(starts) > 1 else {}
        # SubmitJob knows no client token. Until the job shows it is not submitted again from here; from elsewhere, a
        # second agent's join token is taken.
        pool.began([start.host for start in starts], self._clock.monotonic())
        try:
            answer = await self.calls.call(
                "batch",
                "submit_job",
                jobName=pool.prefix + starts[0].host.removeprefix("hst_"),
                jobQueue=about.job_queue,
                jobDefinition=about.job_definition,
                containerOverrides={
                    "environment": [{"name": TOKENS, "value": " ".join(start.join_token for start in starts)}]
                },
                retryStrategy={"attempts": 1},
                propagateTags=True,
                tags={"shoal:pool": about.pool},
                **array,
            )
        except Refused as error:
            pool.failed([start.host for start in starts])
            refused |= {start.host: error.reason for start in starts}
            return []
        except CapacityUnavailable as error:
            log.warning("job.unknown", pool=about.pool, hosts=len(starts), reason=error.reason)
            return []
        id = str(answer["jobId"])
        pool.known.add(id)
        log.info("hosts.submitted", pool=about.pool, hosts=len(starts), job=id)
        jobs = [
            _Job(
                id=f"{id}:{index}" if array else id,
                host=start.host,
                status="SUBMITTED",
                created_at=self._clock.now(),
                stopped_at=None,
                detail=None,
            )
            for index, start in enumerate(starts)
        ]
        pool.submitted(jobs, self._clock.monotonic())
        return self._told(pool, jobs)

    async def _read(self, pool: _Pool) -> list[_Job]:
        """All jobs that are hosts of the pool: those that live, and those that ended of late."""
        ids: dict[str, None] = {}
        queue = pool.about.job_queue
        for status in _LIVE:
            listed = self.calls.pages(
                "batch", "list_jobs", "jobSummaryList", jobQueue=queue, jobStatus=status
            )
            async for summary in listed:
                if str(summary["jobName"]).startswith(pool.prefix):
                    ids[summary["jobId"]] = None
        # The newest come first; of those that ended only the latest are news.
        newest = await self.calls.call(
            "batch",
            "list_jobs",
            jobQueue=queue,
            filters=[{"name": "JOB_NAME", "values": [pool.prefix + "*"]}],
            maxResults=_BATCH,
        )
        ids |= dict.fromkeys(summary["jobId"] for summary in newest.get("jobSummaryList") or ())
        ids |= dict.fromkeys(sorted(pool.known))
        parents = await self._describe(list(ids))
        hosts: dict[str, HostId] = {}
        plain: list[Mapping[str, Any]] = []
        pool.known = set()
        for about in parents:
            names = _hosts(about)
            if not names or not str(about["jobName"]).startswith(pool.prefix):
                continue
            if about["status"] not in _OVER:
                pool.known.add(about["jobId"])
            elif self._is_old(_moment(about.get("stoppedAt"))):
                continue
            if (about.get("arrayProperties") or {}).get("size"):
                hosts |= {f"{about['jobId']}:{index}": name for index, name in enumerate(names)}
            else:
                hosts[about["jobId"]] = names[0]
                plain.append(about)
        children = await self._describe([id for id in hosts if ":" in id])
        # A child that is not there yet is on its way.
        waiting = hosts.keys() - {about["jobId"] for about in (*plain, *children)}
        jobs = [
            _job(about, hosts[about["jobId"]]) for about in (*plain, *children) if about["jobId"] in hosts
        ]
        now = self._clock.now()
        jobs += [
            _Job(id=id, host=hosts[id], status="SUBMITTED", created_at=now, stopped_at=None, detail=None)
            for id in sorted(waiting)
        ]
        return pool.seen(jobs, self._clock.monotonic())

    async def _describe(self, ids: Sequence[str]) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for first in range(0, len(ids), _BATCH):
            answer = await self.calls.call("batch", "describe_jobs", jobs=list(ids[first : first + _BATCH]))
            found += answer.get("jobs") or ()
        return found

    def _told(self, pool: _Pool, jobs: Iterable[_Job]) -> list[Instance]:
        """One instance per host: of several the one that is not over, and the first of those."""
        chosen: dict[HostId, _Job] = {}
        for job in sorted(jobs, key=lambda job: (job.created_at, job.id)):
            if job.id in pool.over or (job.over and self._is_old(job.stopped_at)):
                continue
            other = chosen.get(job.host)
            if other is None or (other.over and not job.over):
                chosen[job.host] = job
        return [
            Instance(
                id=job.id,
                host=job.host,
                pool=pool.about.pool,
                alive=not job.over,
                started_at=job.created_at,
                detail=job.detail,
                queued=job.status in _QUEUED,
                ran_at=job.ran_at,
            )
            for job in chosen.values()
        ]

    def _is_old(self, stopped_at: datetime | None) -> bool:
        return stopped_at is not None and self._clock.now() - stopped_at > timedelta(seconds=_TELL_S)


class _Pool:
    """A pool, and what this process remembers of it.

    Attributes:
        prefix: How the names of its jobs begin.
        known: Jobs that were not over when last looked: asked for by name, whatever lists say.
        over: Jobs whose stop is done.
    """

    def __init__(self, about: BatchPool) -> None:
        self.about = about
        self.prefix = f"shoal-{about.pool}-hst_"
        self.known: set[str] = set()
        self.over: set[str] = set()
        self._began: dict[HostId, float] = {}
        self._submitted: dict[str, tuple[_Job, float]] = {}

    def began(self, hosts: Iterable[HostId], now: float) -> None:
        """Their job was, perhaps, submitted."""
        self._began |= dict.fromkeys(hosts, now)

    def failed(self, hosts: Iterable[HostId]) -> None:
        """It was not."""
        for host in hosts:
            self._began.pop(host, None)

    def under_way(self, now: float) -> set[HostId]:
        """Hosts whose job was submitted and does not show yet."""
        self._began = {host: at for host, at in self._began.items() if now - at < _SHOW_S}
        return set(self._began)

    def submitted(self, jobs: Iterable[_Job], now: float) -> None:
        """They were submitted for certain: they are there, whatever is read in their first minute."""
        self._submitted |= {job.id: (job, now) for job in jobs}

    def seen(self, jobs: Sequence[_Job], now: float) -> list[_Job]:
        """What was read, with what it does not show yet."""
        shown = {job.id for job in jobs}
        self._submitted = {
            id: (job, at)
            for id, (job, at) in self._submitted.items()
            if id not in shown and now - at < _SHOW_S
        }
        found = [*jobs, *(job for job, _ in self._submitted.values())]
        self.failed({job.host for job in found})
        self.over &= {job.id for job in found}
        return found


def _hosts(about: Mapping[str, Any]) -> list[HostId]:
    """Whose tokens a job carries, in the order of its children."""
    for variable in (about.get("container") or {}).get("environment") or ():
        if variable.get("name") == TOKENS:
            return [HostId(token.partition(".")[0]) for token in str(variable["value"]).split()]
    return []


def _job(about: Mapping[str, Any], host: HostId) -> _Job:
    container = about.get("container") or {}
    parts = [str(about["statusReason"]).rstrip(".")] if about.get("statusReason") else []
    if container.get("reason"):
        parts.append(str(container["reason"]).rstrip("."))
    elif container.get("exitCode") not in (None, 0):
        parts.append(f"the agent exited with {container['exitCode']}")
    over = about["status"] in _OVER
    said = "; ".join(parts)[:500]
    detail = None
    if over:
        detail = f"Its job ended: {said or about['status'].lower()}."
    elif said and about["status"] != "RUNNING":
        detail = f"Its job is {about['status']}: {said}."
    return _Job(
        id=about["jobId"],
        host=host,
        status=about["status"],
        created_at=_moment(about.get("createdAt")) or datetime.fromtimestamp(0, UTC),
        stopped_at=_moment(about.get("stoppedAt")),
        detail=detail,
        ran_at=_moment(about.get("startedAt")),
    )


def _moment(milliseconds: int | None) -> datetime | None:
    """A time as Batch gives it."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None
