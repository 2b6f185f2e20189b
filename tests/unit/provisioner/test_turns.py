"""Replicas that run only while they answer, in virtual time: nothing that a request began needs them afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from provisioner import keys
from provisioner.capacity.fake import FakeCapacity
from provisioner.services import Services
from provisioner.settings import ProvisionerSettings
from provisioner.store.fake import FakeStore
from provisioner.store.port import Conflict, StoreError, StoreUnavailable, Throttled
from provisioner.turns import KEYS_S, LOOK_S, SETTLE_S
from provisioner.waiters import POLL_S, Waiters
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, Next, ShoalError
from shoal.contract.images import ImagePut, RegistrySource
from shoal.contract.pools import Prepare
from shoal.contract.sessions import SessionCreate
from shoal.contract.snapshots import SnapshotCreate
from shoal.contract.states import Scope, SessionState, SnapshotState
from tests.unit.provisioner.world import IMAGE, WHO, World, pool

T = TypeVar("T")


@pytest.fixture
async def world() -> World:
    return await World().open()


def function(world: World, name: str) -> Services:
    """A replica as Lambda runs it: no loops, the reconciler elsewhere, no builder."""
    return world.replica(name, reconciler_elsewhere=True, builder=None)


async def turn(world: World, services: Services, work: Awaitable[T]) -> T:
    """One request, to where its answer is given; what is left of it then is thrown away, as with a process that is
    never thawed."""

    async def answered() -> T:
        async with services.turns.turn():
            return await work

    result = await world.finish(answered(), beats=False)
    for task in list(services.context.background._tasks):
        task.cancel()
    return result


def body(**fields: object) -> SessionCreate:
    return SessionCreate.model_validate({"image": IMAGE, "wait_s": 0, **fields})


async def state(world: World, id: SessionId) -> SessionState:
    return (await world.services.sessions.get(WHO, id)).state


async def test_what_a_create_began_is_done_before_its_answer_is_given(world: World) -> None:
    """A create that waits for nothing is placed all the same: its process stops when it has answered."""
    await world.host()
    one = function(world, "one")
    created = await turn(world, one, one.sessions.create(WHO, body()))
    assert await state(world, created.session.id) is SessionState.RUNNING


async def test_a_slow_start_holds_the_answer_back_for_so_long_and_no_longer(world: World) -> None:
    """An agent that does not answer costs `SETTLE_S`; the session is then another replica's to place."""
    await world.host()
    one = function(world, "one")
    never = asyncio.Event()

    async def hang(*_: object) -> None:
        await never.wait()

    world.agents.start, start = hang, world.agents.start  # type: ignore[assignment,method-assign]
    began = world.clock.monotonic()
    created = await turn(world, one, one.sessions.create(WHO, body()))
    assert world.clock.monotonic() - began == pytest.approx(SETTLE_S, abs=0.5)
    assert await state(world, created.session.id) is SessionState.PENDING

    world.agents.start = start  # type: ignore[method-assign]
    await world.run(world.settings.placing_lease_s + 1)
    other = function(world, "other")
    (host,) = world.agents.hosts.values()
    await turn(world, other, other.hosts.heartbeat(host.id, host.heartbeat(world.clock.now())))
    assert await state(world, created.session.id) is SessionState.RUNNING


async def test_a_host_that_registers_is_given_who_waits_before_it_is_answered(world: World) -> None:
    """The queue needs no loop of its own: registration drains it, within the same request."""
    one = function(world, "one")
    created = [await turn(world, one, one.sessions.create(WHO, body())) for _ in range(3)]
    assert {await state(world, each.session.id) for each in created} == {SessionState.PENDING}
    await world.services.reconciler.tick()
    world.services = function(world, "two")
    start = world.capacity.starts[-1]
    host = world.agents.add(start.host, capacity=pool().host_capacity)
    await turn(world, world.services, world.register(host, start.join_token))
    assert {await state(world, each.session.id) for each in created} == {SessionState.RUNNING}


async def test_a_long_poll_pumps_the_queue_while_it_waits(world: World) -> None:
    """Who waits for its own session places it, when room comes and no heartbeat reaches this replica."""
    await world.host()
    one, two = function(world, "one"), function(world, "two")
    for host in world.agents.hosts.values():
        host.full = True
    created = await turn(world, one, one.sessions.create(WHO, body()))
    for host in world.agents.hosts.values():
        host.full = False
    got = await turn(world, two, two.sessions.get(WHO, created.session.id, wait_s=25))
    assert got.state in (SessionState.STARTING, SessionState.RUNNING)


async def test_an_end_whose_command_was_never_sent_is_made_good_by_a_heartbeat(world: World) -> None:
    """The replica that wrote the intent died with the command unsent: the host hears of it all the same."""
    host = await world.host()
    id = await world.create()
    one = function(world, "one")
    await one.sessions.delete(WHO, id)  # no turn: the command is thrown away
    for task in list(one.context.background._tasks):
        task.cancel()
    await asyncio.sleep(0)
    assert await state(world, id) is SessionState.ENDING
    two = function(world, "two")
    await turn(world, two, two.hosts.heartbeat(host.id, host.heartbeat(world.clock.now())))
    assert await state(world, id) is SessionState.ENDED


async def test_a_replace_that_was_left_half_done_is_placed_by_others(world: World) -> None:
    """The lease of whoever placed it runs out, and the next turn anywhere places it."""
    host = await world.host()
    id = await world.create()
    one = function(world, "one")
    await one.sessions.changing.replace(WHO, id, from_snapshot=False)
    for task in list(one.context.background._tasks):
        task.cancel()
    assert await state(world, id) is SessionState.RESTORING
    await world.run(world.settings.placing_lease_s + 1)
    two = function(world, "two")
    await turn(world, two, two.hosts.heartbeat(host.id, host.heartbeat(world.clock.now())))
    assert await state(world, id) is SessionState.RUNNING


async def test_a_snapshot_that_its_host_never_heard_of_is_ordered_again(world: World) -> None:
    """Whoever wrote it down died before the order was sent: a heartbeat that does not name it brings it there."""
    host = await world.host()
    id = await world.create()
    one = function(world, "one")
    snapshot = await one.snapshots.create(WHO, id, SnapshotCreate(wait_s=0))
    for task in list(one.context.background._tasks):
        task.cancel()
    await asyncio.sleep(0)
    assert not host.snapshots
    await world.run(30, beats=False)
    two = function(world, "two")
    await turn(world, two, two.hosts.heartbeat(host.id, host.heartbeat(world.clock.now())))
    assert snapshot.id in host.snapshots
    for _ in range(3):
        await turn(world, two, two.hosts.heartbeat(host.id, host.heartbeat(world.clock.now())))
    assert (await two.snapshots.get(WHO, snapshot.id)).state is not SnapshotState.CREATING


async def test_a_snapshots_order_is_sent_before_the_answer_and_its_end_is_not_waited_for(
    world: World,
) -> None:
    """The upload may take minutes: the answer is given once the host has the order."""
    host = await world.host()
    id = await world.create()
    one = function(world, "one")
    began = world.clock.monotonic()
    snapshot = await turn(world, one, one.snapshots.create(WHO, id, SnapshotCreate(wait_s=0)))
    assert snapshot.id in host.snapshots
    assert world.clock.monotonic() - began < SETTLE_S / 2


async def test_what_needs_a_builder_is_refused_where_there_is_none(world: World) -> None:
    """The refusal comes with the request, and says what to do instead."""
    one = function(world, "one")
    asked = ImagePut(source=RegistrySource(ref="registry.example/a:1"))
    with pytest.raises(ShoalError) as refused:
        await turn(world, one, one.images.put(WHO, "a", "1", asked))
    assert refused.value.code is ErrorCode.NOT_IMPLEMENTED
    assert "shoal image push" in refused.value.message
    with pytest.raises(ShoalError):
        await one.images.get(WHO, "a", "1")


async def test_each_turn_flushes_demand_and_wakes_the_reconciler_elsewhere(world: World) -> None:
    """Demand that is counted in a process that may never run again is written down with the request; and who waits
    in vain leaves one wake a second, however often it is set."""
    assert isinstance(world.store, FakeStore)
    one = function(world, "one")
    await turn(world, one, one.sessions.create(WHO, body()))
    assert await world.store.query("DEMAND#default")
    assert not one.context.demand.pending
    stored = await world.store.get(keys.WAKE)
    assert stored is not None
    for _ in range(5):
        one.context.wake_reconciler.set()
    await one.context.background.idle()
    again = await world.store.get(keys.WAKE)
    assert again is not None
    assert again.version <= stored.version + 1
    await world.clock.advance(1.1)
    one.context.wake_reconciler.set()
    await one.context.background.idle()
    last = await world.store.get(keys.WAKE)
    assert last is not None
    assert last.version == again.version + 1


async def test_a_wake_that_is_lost_fails_nothing_and_holds_back_no_other() -> None:
    """The store refuses the wake: the request is answered, and the next one tries again at once."""
    world = await World().open()
    assert isinstance(world.store, FakeStore)
    one = function(world, "one")
    for number in range(1, 20):
        world.store.fail_call(number)
    one.context.wake_reconciler.set()
    await one.context.background.idle()
    world.store.script.clear()
    assert await world.store.get(keys.WAKE) is None
    one.context.wake_reconciler.set()
    await one.context.background.idle()
    assert await world.store.get(keys.WAKE) is not None


@pytest.mark.parametrize("refusal", [Conflict(), Throttled()], ids=["conflict", "throttled"])
async def test_a_wake_that_meets_anothers_is_tried_once(refusal: StoreError) -> None:
    """A thousand processes write that item in one moment: whoever is refused leaves it to the one under way, at once,
    and writes no other within the second."""
    world = await World().open()
    assert isinstance(world.store, FakeStore)
    one = function(world, "one")
    for number in range(1, 20):
        world.store.fail_call(number, refusal)
    before = len(world.store.calls)
    one.context.wake_reconciler.set()
    await one.context.background.idle()
    assert world.store.calls[before:] == ["transact Update:WAKE"]
    world.store.script.clear()
    one.context.wake_reconciler.set()
    await one.context.background.idle()
    assert len(world.store.calls) == before + 1
    assert world.clock.monotonic() == 0


async def test_a_wake_over_a_connection_that_died_is_written_by_the_second_try() -> None:
    """A process that was frozen finds its connections closed; the item is written once, whether or not the first try
    arrived."""
    for after in (False, True):
        world = await World().open()
        assert isinstance(world.store, FakeStore)
        one = function(world, "one")
        world.store.fail_call(1, StoreUnavailable("closed"), after=after)
        one.context.wake_reconciler.set()
        await one.context.background.idle()
        stored = await world.store.get(keys.WAKE)
        assert stored is not None
        assert stored.version == 1


async def test_a_process_that_was_frozen_knows_that_time_went_by(world: World) -> None:
    """Its own clock stood still from one request to the next: what it did before is not counted as just done."""
    assert isinstance(world.store, FakeStore)
    one = function(world, "one")
    await turn(world, one, one.sessions.create(WHO, body()))
    key = await one.auth.make_key(WHO.tenant, "one", (Scope.SESSIONS,))
    await one.auth.authenticate(key.secret)
    woken = await world.store.get(keys.WAKE)
    assert woken is not None
    assert not one.pump.due(LOOK_S)
    before = len(world.store.calls)
    world.clock.jump(KEYS_S + 1)

    one.context.wake_reconciler.set()
    await one.context.background.idle()
    again = await world.store.get(keys.WAKE)
    assert again is not None
    assert again.version == woken.version + 1
    assert one.pump.due(LOOK_S)
    await turn(world, one, one.sessions.create(WHO, body()))
    assert not one.context.demand.pending
    await one.auth.authenticate(key.secret)
    calls = world.store.calls[before:]
    assert any("SIGNING" in call for call in calls)
    assert any(call.startswith("get KEY#") for call in calls)


async def test_a_clock_that_was_set_back_holds_no_wake_up(world: World) -> None:
    """Hours that come twice are not waited for."""
    one = function(world, "one")
    one.context.wake_reconciler.set()
    world.clock.jump(-3600)
    one.context.wake_reconciler.set()
    await one.context.background.idle()
    stored = await world.store.get(keys.WAKE)
    assert stored is not None
    assert stored.version == 2


async def test_a_wait_looks_ever_less_often_and_sees_what_another_replica_changed(world: World) -> None:
    """25 s without a change cost 18 reads; a change is seen within `POLL_S`."""
    waiters = Waiters(world.clock)
    reads = 0
    ready_at = 1e9

    async def read() -> bool:
        nonlocal reads
        reads += 1
        return world.clock.monotonic() >= ready_at

    assert not await world.finish(waiters.until("x", read, bool, 25.0), beats=False)
    assert reads == 18
    began = world.clock.monotonic()
    ready_at = began + 10.0
    assert await world.finish(waiters.until("x", read, bool, 25.0), beats=False)
    assert world.clock.monotonic() - ready_at <= POLL_S + 0.2


async def test_with_execution_off_nothing_new_is_taken_and_what_runs_may_end() -> None:
    """New sessions and prepares are refused with a code that says to wait; the reconciler starts nothing, not even the
    hosts that a pool always has, and takes away what is idle."""
    settings = ProvisionerSettings(pools=(pool(min_hosts=1, idle_to_zero_s=10, scale_in_cooldown_s=1),))
    world = await World(settings=settings).open()
    await world.host()
    id = await world.create(key="once")
    world.services = off = world.replica("off", execution_enabled=False)
    with pytest.raises(ShoalError) as refused:
        await off.sessions.create(WHO, body())
    assert refused.value.code is ErrorCode.NO_CAPACITY
    assert refused.value.next is Next.WAIT
    assert refused.value.details == {"reason": "execution_disabled"}
    with pytest.raises(ShoalError):
        await off.pools.prepare(WHO, "default", Prepare(sandboxes=1, image=IMAGE))
    again = await world.finish(
        off.sessions.create(WHO, SessionCreate(image=IMAGE, wait_s=1), idempotency_key="once")
    )
    assert again.session.id == id
    assert isinstance(world.capacity, FakeCapacity)
    started = len(world.capacity.starts)
    await world.finish(off.sessions.delete(WHO, id, wait_s=5))
    for _ in range(60):
        await off.reconciler.tick()
        await world.run(1)
    assert await state(world, id) is SessionState.ENDED
    assert len(world.capacity.starts) == started
    assert not await world.capacity.instances()


async def test_a_queue_that_does_not_move_wakes_the_reconciler_now_and_then(world: World) -> None:
    """Every look at the queue finds who waits in vain; only one that is new, or ten seconds, is a reason to look at all
    hosts again."""
    one = function(world, "one")
    await turn(world, one, one.sessions.create(WHO, body()))
    await world.clock.advance(2)
    one.context.wake_reconciler.clear()
    woken = 0
    for _ in range(9):
        await one.pump.look()
        woken += one.context.wake_reconciler.is_set
        one.context.wake_reconciler.clear()
        await world.clock.advance(1)
    assert woken <= 1
    await turn(world, one, one.sessions.create(WHO, body()))
    assert one.context.wake_reconciler.is_set
