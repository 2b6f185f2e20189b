"""Hosts that a driver still owes: asked for again as they were, given up when it says so, given back when unneeded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from provisioner import keys, roster
from provisioner.capacity.port import CapacityUnavailable, NoMoreHosts
from provisioner.join_tokens import JoinTokens
from provisioner.model import PoolState, dump, load
from provisioner.store.fake import FakeStore
from provisioner.store.port import Put
from shoal.contract.base import HostId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import HostState, SessionState
from tests.unit.provisioner.test_hosts import register
from tests.unit.provisioner.world import WHO, World


@pytest.fixture
async def world() -> World:
    return await World().open()


async def starting(world: World) -> list[str]:
    hosts = await roster.hosts(world.services.context.store)
    return [host.id for host in hosts if host.state is HostState.STARTING]


async def test_an_owed_host_is_asked_for_again_with_the_same_token(world: World) -> None:
    """What did not come at once is asked for at the next tick, as it was; it then registers like any other."""
    world.capacity.at_once = 1
    executor = world.services.reconciler._executor
    await executor._start("default", 2)
    first, owed = await starting(world)
    assert [start.host for start in world.capacity.starts] == [first]
    world.clock.tick(5)
    plan = await world.services.reconciler.tick()
    assert plan.resume == {"default": (owed,)}
    came = world.capacity.starts[-1]
    assert came.host == owed
    assert came.join_token == await JoinTokens(world.store).token(HostId(owed))
    assert world.clock.now() - came.asked_at == timedelta(seconds=5)
    await world.services.hosts.register(register(came))
    with pytest.raises(ShoalError) as raised:
        await world.services.hosts.register(register(came, "another boot"))
    assert raised.value.code is ErrorCode.UNAUTHENTICATED
    assert (await world.services.reconciler.tick()).resume == {}


async def test_only_refused_hosts_are_given_up(world: World) -> None:
    """A driver that cannot give all says whom; the others stay on order, and the pool remembers why."""
    world.capacity.at_once = 0
    executor = world.services.reconciler._executor
    await executor._start("default", 3)
    hosts = await starting(world)
    world.capacity.fail_call(1, NoMoreHosts("InsufficientInstanceCapacity", refused={HostId(hosts[2])}))
    with pytest.raises(NoMoreHosts):
        await executor._start("default", 0, [HostId(host) for host in hosts])
    assert await starting(world) == hosts[:2]
    stored = await world.store.get(keys.pool("default"))
    assert stored is not None
    assert load(PoolState, stored.item).last_failure == "InsufficientInstanceCapacity"


async def test_no_answer_leaves_what_was_on_order(world: World) -> None:
    """A driver that does not answer costs the new hosts, not those that it was asked for before."""
    world.capacity.at_once = 0
    executor = world.services.reconciler._executor
    await executor._start("default", 1)
    (owed,) = await starting(world)
    world.capacity.fail_call(1)
    with pytest.raises(CapacityUnavailable):
        await executor._start("default", 1, [HostId(owed)])
    assert await starting(world) == [owed]


async def test_the_driver_hears_who_is_still_to_come(world: World) -> None:
    """Now and then the driver is told which hosts it owes, so that it can give back what is for nobody."""
    world.capacity.at_once = 0
    await world.services.reconciler._executor._start("default", 1)
    await world.services.reconciler.tick()
    assert world.capacity.settled == frozenset(await starting(world))


async def test_replicas_make_the_same_tokens() -> None:
    """The secret is made once, also when many replicas want it at the same moment; tokens differ by host only."""
    store = FakeStore()
    made = await asyncio.gather(*(JoinTokens(store).token(HostId("hst_1")) for _ in range(16)))
    assert len(set(made)) == 1
    assert await JoinTokens(store).token(HostId("hst_1")) == made[0]
    assert await JoinTokens(store).token(HostId("hst_2")) != made[0].replace("hst_1", "hst_2")
    assert await JoinTokens(FakeStore()).token(HostId("hst_1")) != made[0]
    assert made[0] not in repr(store.dump())


async def test_who_waits_hears_why_no_host_comes(world: World) -> None:
    """A session that waits is told with why no host comes, also while another try is under way, until one came."""
    id = await world.create(wait_s=0)
    assert (await world.services.sessions.get(WHO, id)).waiting_for is None
    world.capacity.fail_call(2, NoMoreHosts("InsufficientInstanceCapacity in all zones"))
    await world.services.reconciler.tick()
    world.clock.tick(1)
    await world.services.reconciler.tick()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.PENDING
    assert "InsufficientInstanceCapacity" in (session.waiting_for or "")
    world.clock.tick(10)
    await world.services.reconciler.tick()
    assert await starting(world)
    await world.services.reconciler.tick()
    assert "InsufficientInstanceCapacity" in ((await world.services.sessions.get(WHO, id)).waiting_for or "")
    await world.tick()
    await world.services.pump.drain()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.RUNNING
    assert session.waiting_for is None


async def test_who_does_not_wait_hears_why_no_host_comes(world: World) -> None:
    """A request that does not queue is refused with the pool's reason, and the event of one that does names it."""
    state = PoolState(name="default", not_scaling="Hosts do not come up: no capacity in any zone.")
    await world.store.transact([Put(key=keys.pool("default"), item=dump(state))])
    with pytest.raises(ShoalError, match="no capacity in any zone") as raised:
        await world.create(queue=False)
    assert raised.value.code is ErrorCode.NO_CAPACITY
    id = await world.create(wait_s=0)
    (waiting,) = [
        event
        for event in (await world.services.sessions.events(WHO, id)).events
        if event.kind == "session.waiting"
    ]
    assert "no capacity in any zone" in waiting.message


async def test_a_host_in_its_providers_queue_is_left_there(world: World) -> None:
    """Whoever waits hears why no machine comes; the host has `host_start_s` once it runs."""
    id = await world.create(wait_s=0)
    await world.services.reconciler.tick()
    (host,) = await starting(world)
    there = world.capacity._instances
    there[f"i-{host}"] = replace(there[f"i-{host}"], queued=True, detail="Its job is RUNNABLE: no capacity.")
    world.clock.tick(world.settings.host_start_s + 100)
    await world.services.reconciler.tick()
    assert await starting(world) == [host]
    why = (await world.services.sessions.get(WHO, id)).waiting_for or ""
    assert "RUNNABLE" in why
    there[f"i-{host}"] = replace(
        there[f"i-{host}"], queued=False, ran_at=world.clock.now() - timedelta(seconds=1)
    )
    world.clock.tick(world.settings.host_start_s - 2)
    await world.services.reconciler.tick()
    assert await starting(world) == [host]
    world.clock.tick(2)
    await world.services.reconciler.tick()
    assert host not in await starting(world)


async def test_a_host_that_never_registers_is_told(world: World) -> None:
    """A host whose agent does not come up in time is given up, and whoever waits hears what its driver says of it."""
    id = await world.create(wait_s=0)
    await world.services.reconciler.tick()
    (host,) = await starting(world)
    world.capacity._instances[f"i-{host}"] = replace(
        world.capacity._instances[f"i-{host}"], detail="Its job is RUNNABLE: no capacity."
    )
    world.clock.tick(world.settings.host_start_s + 1)
    await world.services.reconciler.tick()
    await world.services.reconciler.tick()
    why = (await world.services.sessions.get(WHO, id)).waiting_for or ""
    assert "did not register within" in why
    assert "RUNNABLE" in why
