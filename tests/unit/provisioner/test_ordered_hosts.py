"""Hosts that a driver still owes: asked for again as they were, given up when it says so, given back when unneeded."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from provisioner import keys, roster
from provisioner.capacity.port import CapacityUnavailable, NoMoreHosts
from provisioner.join_tokens import JoinTokens
from provisioner.model import PoolState, load
from provisioner.store.fake import FakeStore
from shoal.contract.base import HostId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import HostState
from tests.unit.provisioner.test_hosts import register
from tests.unit.provisioner.world import World


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
