"""The Batch driver against Batch's API in memory, in virtual time; and drivers put together by pool."""

from __future__ import annotations

import random

import pytest

from provisioner.capacity.batch import BatchCapacity
from provisioner.capacity.by_pool import ByPool, FrozenCapacity, NoCapacity
from provisioner.capacity.fake import FakeCapacity
from provisioner.capacity.port import CapacityUnavailable, HostStart, NoMoreHosts
from provisioner.clock import ManualClock
from shoal.contract.base import HostId
from tests.aws_capacity import BatchApi, Hostile, QuickClock, client_error


class Bench:
    """A driver, the API behind it, and time."""

    def __init__(self) -> None:
        self.clock = QuickClock()
        self.api = BatchApi(self.clock)
        self.clients = Hostile(self.api)
        self.capacity = self.another()

    def another(self) -> BatchCapacity:
        """The driver of another process."""
        return BatchCapacity(
            self.clients,  # type: ignore[arg-type]
            [self.api.pool],
            clock=self.clock,
            chance=random.Random(1),
        )

    def starts(self, count: int, *, first: int = 1, pool: str = "default") -> list[HostStart]:
        return [
            HostStart(
                # As long as they are: the limit of overrides is tested with it.
                host=HostId(f"hst_{n:020d}"),
                pool=pool,
                join_token=f"hst_{n:020d}." + "s" * 43,
                asked_at=self.clock.now(),
            )
            for n in range(first, first + count)
        ]


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_hosts_are_children_of_array_jobs(bench: Bench) -> None:
    """250 hosts are three array jobs of at most 100; each child has its token at its index, and all count as there."""
    starts = bench.starts(250)
    found = await bench.capacity.start(starts)
    assert [instance.host for instance in found] == [start.host for start in starts]
    made = bench.clients.made("submit_job")
    assert [about["arrayProperties"]["size"] for about in made] == [100, 100, 50]
    (variable,) = made[1]["containerOverrides"]["environment"]
    assert variable["name"] == "SHOAL_AGENT_JOIN_TOKENS"
    assert variable["value"].split() == [start.join_token for start in starts[100:200]]
    assert found[101].id.endswith(":1")
    assert all(about["retryStrategy"] == {"attempts": 1} for about in made)
    there = {instance.host: instance.id for instance in await bench.another().instances()}
    assert there == {instance.host: instance.id for instance in found}


async def test_one_host_is_a_plain_job(bench: Bench) -> None:
    """Batch takes no array of one."""
    (found,) = await bench.capacity.start(bench.starts(1))
    (made,) = bench.clients.made("submit_job")
    assert "arrayProperties" not in made
    assert ":" not in found.id


async def test_exactly_the_child_that_is_stopped_goes(bench: Bench) -> None:
    """A child is terminated alone, whether it runs or still waits; the others stay."""
    bench.api.room = 2
    found = await bench.capacity.start(bench.starts(3))
    bench.api.step()
    await bench.capacity.stop([found[1].id, found[2].id])
    assert [about["jobId"] for about in bench.clients.made("terminate_job")] == [found[1].id, found[2].id]
    assert [instance.id for instance in await bench.capacity.instances()] == [found[0].id]


async def test_what_keeps_a_job_waiting_is_told(bench: Bench) -> None:
    """A job that waits for an instance is alive, and says what Batch says."""
    bench.api.room = 0
    await bench.capacity.start(bench.starts(1))
    bench.api.step()
    (seen,) = await bench.capacity.instances()
    assert seen.alive
    assert "INSUFFICIENT_INSTANCE_CAPACITY" in (seen.detail or "")


async def test_a_job_that_waits_has_not_begun_and_one_that_runs_tells_since_when(bench: Bench) -> None:
    """From its submission to RUNNING it stands in Batch's queue, also as a child; its start counts from there."""
    bench.api.room = 1
    told = await bench.capacity.start(bench.starts(2))
    assert [(each.queued, each.ran_at) for each in told] == [(True, None)] * 2
    bench.clock.tick(600)
    bench.api.step()
    one, two = sorted(await bench.capacity.instances(), key=lambda each: each.id)
    assert (one.queued, one.ran_at) == (False, one.ran_at)
    assert (two.queued, two.ran_at) == (True, None)
    bench.api.move(one.id, "FAILED", statusReason="gone")
    (over,) = (each for each in await bench.capacity.instances() if each.id == one.id)
    assert not over.queued


async def test_a_host_that_ended_is_told_with_its_reason_for_a_while(bench: Bench) -> None:
    """A child that ended by itself is told until it is stopped, and not for ever by a process that starts later."""
    one, two = await bench.capacity.start(bench.starts(2))
    bench.api.step()
    bench.api.move(one.id, "FAILED", statusReason="Host EC2 (instance i-1) terminated.")
    told = {instance.id: instance for instance in await bench.capacity.instances()}
    assert not told[one.id].alive
    assert "i-1" in (told[one.id].detail or "")
    await bench.capacity.stop([one.id])
    assert [instance.id for instance in await bench.capacity.instances()] == [two.id]
    assert {instance.id for instance in await bench.another().instances()} == {one.id, two.id}
    bench.clock.tick(700)
    assert [instance.id for instance in await bench.another().instances()] == [two.id]


async def test_a_lost_answer_submits_nothing_twice(bench: Bench) -> None:
    """A SubmitJob whose answer is lost is found again, by this process and by another."""
    bench.clients.lose = lambda operation: operation == "submit_job"
    assert await bench.capacity.start(bench.starts(5)) == []
    bench.clients.stale = lambda operation: True
    assert await bench.capacity.start(bench.starts(5)) == []
    bench.clients.stale = lambda operation: False
    assert len(await bench.capacity.start(bench.starts(5))) == 5
    assert len(await bench.another().start(bench.starts(5))) == 5
    assert len(bench.clients.made("submit_job")) == 1


async def test_a_host_is_there_from_the_answer_on(bench: Bench) -> None:
    """A submitted host is there at once, though nothing shows it yet; one that ran stays when a list lags behind."""
    found = await bench.capacity.start(bench.starts(2))
    bench.clients.hide = lambda operation, about: operation != "submit_job"
    assert [instance.id for instance in await bench.capacity.instances()] == [each.id for each in found]
    bench.clients.hide = lambda operation, about: False
    bench.api.step()
    await bench.capacity.instances()
    bench.clock.tick(100)
    bench.clients.hide = lambda operation, about: operation == "list_jobs"
    assert [instance.id for instance in await bench.capacity.instances()] == [each.id for each in found]


async def test_a_submission_that_never_happened_is_made_again(bench: Bench) -> None:
    """When nothing shows for a minute, the hosts are submitted anew."""
    failing = [client_error("InternalError", status=500)]
    bench.clients.fail = lambda operation: failing.pop() if operation == "submit_job" and failing else None
    assert await bench.capacity.start(bench.starts(2)) == []
    assert await bench.capacity.start(bench.starts(2)) == []
    bench.clock.tick(61)
    assert len(await bench.capacity.start(bench.starts(2))) == 2


async def test_a_refused_submission_names_its_hosts(bench: Bench) -> None:
    """What Batch refuses is told with its reason; nothing is left on order."""
    bench.clients.fail = lambda operation: (
        client_error("ClientException", "Job queue does not exist") if operation == "submit_job" else None
    )
    with pytest.raises(NoMoreHosts, match="does not exist") as raised:
        await bench.capacity.start(bench.starts(2))
    assert raised.value.refused == {start.host for start in bench.starts(2)}
    bench.clients.fail = lambda operation: None
    assert len(await bench.capacity.start(bench.starts(2))) == 2


async def test_other_jobs_of_the_queue_are_not_ours(bench: Bench) -> None:
    """Jobs that others submitted to the queue are neither told nor touched."""
    await bench.api.submit_job(
        jobName="shoal-default-2-hst_1",
        jobQueue="queue",
        jobDefinition="agent:1",
        containerOverrides={"environment": [{"name": "SHOAL_AGENT_JOIN_TOKENS", "value": "hst_9.x"}]},
    )
    assert await bench.capacity.instances() == []


async def test_a_tick_costs_few_calls(bench: Bench) -> None:
    """Looking at 500 hosts takes six lists and six descriptions."""
    starts = bench.starts(500)
    await bench.capacity.start(starts)
    bench.api.step()
    await bench.capacity.instances()
    bench.clients.calls.clear()
    assert len(await bench.capacity.instances()) == 500
    made = [operation for operation, _ in bench.clients.calls]
    assert made.count("describe_jobs") == 6
    # Two jobs a page here; one page of a thousand in the world.
    assert made.count("list_jobs") == 8


async def test_pools_have_their_own_drivers() -> None:
    """Hosts go to the driver of their pool; what one refuses does not keep the others from theirs."""
    clock = ManualClock()
    left, right = FakeCapacity(clock), FakeCapacity(clock, limit=1)
    both = ByPool({"a": left, "b": right, "c": left})
    bench = Bench()
    starts = [
        *bench.starts(1, pool="a"),
        *bench.starts(2, first=2, pool="b"),
        *bench.starts(1, first=4, pool="c"),
    ]
    with pytest.raises(NoMoreHosts) as raised:
        await both.start(starts)
    assert raised.value.refused is not None
    assert starts[2].host in raised.value.refused
    assert starts[0].host not in raised.value.refused
    assert {instance.host for instance in await both.instances()} == {
        start.host for start in (starts[0], starts[1], starts[3])
    }
    await both.stop([f"i-{starts[0].host}", f"i-{starts[1].host}"])
    assert (left.stopped, right.stopped) == ([f"i-{starts[0].host}"], [f"i-{starts[1].host}"])
    await both.settle([starts[3].host])
    assert left.settled == right.settled == {starts[3].host}
    with pytest.raises(NoMoreHosts, match="Pool z"):
        await both.start(bench.starts(1, pool="z"))


async def test_half_a_picture_of_the_pools_is_none() -> None:
    """When one driver does not answer, the hosts of the others are not told either: the missing would seem gone."""
    clock = ManualClock()
    left, right = FakeCapacity(clock), FakeCapacity(clock)
    both = ByPool({"a": left, "b": right})
    await both.start(Bench().starts(1, pool="a"))
    right.fail_call(1)
    with pytest.raises(CapacityUnavailable):
        await both.instances()


async def test_no_capacity_starts_nothing() -> None:
    """A process without capacity says so; there is nothing to stop."""
    none = NoCapacity()
    with pytest.raises(NoMoreHosts):
        await none.start(Bench().starts(1))
    await none.stop(["x"])
    assert await none.instances() == []


async def test_frozen_capacity_ends_what_runs_and_starts_nothing() -> None:
    """With execution switched off no host is started, those that run may end, and what is on order is given back."""
    inner = FakeCapacity(ManualClock())
    (running,) = await inner.start(Bench().starts(1))
    frozen = FrozenCapacity(inner)
    assert await frozen.start(Bench().starts(1)) == [running]
    with pytest.raises(NoMoreHosts, match="execution_enabled"):
        await frozen.start(Bench().starts(2))
    await frozen.settle([HostId("hst_2")])
    assert inner.settled == frozenset()
    await frozen.stop([running.id])
    assert await frozen.instances() == []
