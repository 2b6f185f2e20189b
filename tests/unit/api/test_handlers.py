"""The reconciler's Lambda function: events in, hosts out; a batch of the stream never fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provisioner import handlers, keys
from provisioner.agents.none import NoAgents
from provisioner.aws import profile
from provisioner.aws.settings import AwsSettings, EcsPool
from provisioner.capacity.by_pool import ByPool, FrozenCapacity, NoCapacity
from provisioner.clock import SystemClock
from provisioner.settings import ProvisionerSettings
from provisioner.store.fake import FakeStore
from provisioner.store.port import StoreUnavailable
from shoal.contract.errors import ShoalError
from shoal.contract.sessions import SessionCreate
from tests.unit.api.functions import WHO, World, function_world

SCHEDULE = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
SPOT = {"source": "aws.ec2", "detail-type": "EC2 Spot Instance Interruption Warning", "detail": {}}
WAKE = {
    "Records": [
        {
            "eventSource": "aws:dynamodb",
            "eventName": "MODIFY",
            "dynamodb": {"Keys": {"pk": {"S": "WAKE"}, "sk": {"S": "-"}}, "SequenceNumber": "1"},
        }
    ]
}


class Context:
    """An invocation with so much time."""

    def __init__(self, seconds: float) -> None:
        self._clock = SystemClock()
        self._until = self._clock.monotonic() + seconds

    def get_remaining_time_in_millis(self) -> int:
        return int((self._until - self._clock.monotonic()) * 1000)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(profile, "open_services", lambda aws, settings, role: world.opening(role))
    monkeypatch.setattr(handlers, "configure", lambda: None)
    monkeypatch.setenv("SHOAL_AWS_TABLE", "t")
    monkeypatch.setenv("SHOAL_AWS_BUCKET", "b")
    with function_world(monkeypatch, world) as opened:
        try:
            yield opened
        finally:
            handlers.close()


async def _queue_one(world: World) -> None:
    async with world.opening("router") as services:
        await services.signer.refresh()
        await services.sessions.create(WHO, SessionCreate(image="code:1", wait_s=0))
        await services.context.background.idle()


@pytest.mark.parametrize("event", [SCHEDULE, SPOT], ids=["schedule", "spot"])
def test_an_event_starts_hosts_for_who_waits(world: World, event: dict[str, object]) -> None:
    """Whatever the event says, state is read: a session waits, so a host is started."""
    world.elsewhere.run(_queue_one(world))
    told = handlers.reconcile(event, Context(11.5))
    assert told["ticks"] >= 1
    assert told["pending"]
    assert len(world.capacity.starts) == 1


def test_a_batch_of_the_stream_answers_that_nothing_failed(world: World) -> None:
    """Its records only wake: the batch is done whatever came of it, and is not repeated for ever."""
    world.elsewhere.run(_queue_one(world))
    assert handlers.reconcile(WAKE, Context(11.5)) == {"batchItemFailures": []}
    assert len(world.capacity.starts) == 1
    assert isinstance(world.store, FakeStore)
    for number in range(1, 200):
        world.store.fail_call(number, StoreUnavailable("down"))
    assert handlers.reconcile(WAKE, Context(11.5)) == {"batchItemFailures": []}


def test_a_schedule_fails_where_the_store_does_not_answer(world: World) -> None:
    """An alarm on the function's errors is to see it."""
    assert isinstance(world.store, FakeStore)
    for number in range(1, 200):
        world.store.fail_call(number, StoreUnavailable("down"))
    with pytest.raises(ShoalError):
        handlers.reconcile(SCHEDULE, Context(11.5))


def test_services_are_opened_once_for_all_invocations(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm function goes on with the loop and the connections that it has."""
    opened: list[str] = []
    monkeypatch.setattr(
        profile, "open_services", lambda aws, settings, role: opened.append(role) or world.opening(role)
    )
    for _ in range(3):
        handlers.reconcile(SCHEDULE, Context(15))
    assert opened == ["reconciler"]


async def test_each_role_gets_what_it_may_use() -> None:
    """Only the reconciler starts hosts, and it reaches none; the others are woken through the store."""
    pools = (EcsPool(pool="default", cluster="c", auto_scaling_group="g", task_definition="t"),)
    aws = AwsSettings(table="t", bucket="b", pools=pools)
    store = FakeStore()
    async with profile.open_services(aws, ProvisionerSettings(), role="reconciler", store=store) as one:
        assert isinstance(one.capacity, ByPool)
        assert isinstance(one.context.agents, NoAgents)
        one.context.wake_reconciler.set()
        await one.context.background.idle()
    assert await store.get(keys.WAKE) is None
    async with profile.open_services(aws, ProvisionerSettings(), role="router", store=store) as two:
        assert isinstance(two.capacity, NoCapacity)
        two.context.wake_reconciler.set()
        await two.context.background.idle()
    assert await store.get(keys.WAKE) is not None
    frozen = aws.model_copy(update={"execution_enabled": False})
    async with profile.open_services(frozen, ProvisionerSettings(), role="reconciler", store=store) as three:
        assert isinstance(three.capacity, FrozenCapacity)
        assert not three.context.execution_enabled
    with pytest.raises(ValueError, match="default"):
        async with profile.open_services(
            AwsSettings(table="t", bucket="b"), ProvisionerSettings(), role="reconciler"
        ):
            pass
