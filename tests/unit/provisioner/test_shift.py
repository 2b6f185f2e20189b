"""The reconciler that is woken: one works at a time, no wake is missed, and no host is ever dialled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from provisioner import keys
from provisioner.agents.none import NoAgents
from provisioner.lease import LEASE_S, RENEW_S, Lease
from provisioner.model import Host, load
from provisioner.plan import Plan, StopInstance
from provisioner.services import Services
from provisioner.settings import ProvisionerSettings
from provisioner.shift import MARGIN_S, Shift
from provisioner.wakes import write_wake
from shoal.contract.base import HostId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxStart
from shoal.contract.sessions import SessionCreate
from shoal.contract.states import HostState, SessionState
from tests.unit.provisioner.world import IMAGE, WHO, World, pool


class Undialled(NoAgents):
    """Agents that no test may reach: the call itself is the failure."""

    def __getattribute__(self, name: str) -> object:
        if name in ("start", "status", "patch", "end", "take_snapshot", "snapshot_status"):
            raise AssertionError(f"the reconciler dialled an agent: {name}")
        return super().__getattribute__(name)


@pytest.fixture
async def world() -> World:
    return await World().open()


def reconciler(world: World, name: str) -> Services:
    return world.replica(name, agents=Undialled(), builder=None)


async def work(
    world: World, services: Services, *, time_s: float = 60.0, marked: bool = True, beats: bool = False
) -> Shift:
    """One invocation with so many seconds."""
    end = world.clock.monotonic() + time_s
    return await world.finish(
        services.shifts.work(lambda: end - world.clock.monotonic(), marked=marked),
        beats=beats,
        limit_s=time_s + 5,
    )


def body(**fields: object) -> SessionCreate:
    return SessionCreate.model_validate({"image": IMAGE, "wait_s": 0, **fields})


async def test_a_wake_starts_hosts_for_who_waits_and_goes_on_until_they_are_there(world: World) -> None:
    """While hosts start the shift ticks on; once they have registered there is nothing to do, and it ends."""
    await world.services.sessions.create(WHO, body())
    await world.services.context.background.idle()
    one = reconciler(world, "one")
    arriving = asyncio.create_task(_arrive_after(world, 20))
    shift = await work(world, one)
    await arriving
    assert len(world.capacity.starts) == 1
    assert not shift.pending
    assert 5 <= shift.ticks <= 20
    assert world.clock.monotonic() < 40


async def _arrive_after(world: World, seconds: float) -> None:
    await world.clock.sleep(seconds)
    await world.arrive()


async def test_the_schedule_of_a_quiet_service_costs_one_tick(world: World) -> None:
    """Nothing is there and nothing was asked: one look, no lingering, no mark."""
    shift = await work(world, reconciler(world, "one"), marked=False)
    assert shift == Shift(ticks=1)
    assert await world.store.get(keys.WAKE) is None


async def test_time_that_runs_out_leaves_a_wake_for_the_rest(world: World) -> None:
    """With hosts still starting and no time left, the next invocation is called for at once."""
    await world.services.sessions.create(WHO, body())
    await world.services.context.background.idle()
    shift = await work(world, reconciler(world, "one"), time_s=MARGIN_S + 5)
    assert shift.pending
    assert await world.store.get(keys.WAKE) is not None
    # The lease is free: the next one goes on.
    again = await work(world, reconciler(world, "two"), time_s=MARGIN_S + 5)
    assert again.ticks >= 1


async def test_of_many_at_once_one_works_and_the_schedule_leaves_its_mark(world: World) -> None:
    """Others leave at once. One that a wake brought writes none (it would bring the next for ever); one that nothing
    in the store stands for does, and the holder looks once more for it."""
    store, clock = world.services.context.store, world.clock
    lease = Lease(store, clock, "holder")
    assert await lease.take()
    by_wake = await work(world, reconciler(world, "two"), marked=True)
    assert by_wake == Shift(ticks=0)
    assert await world.store.get(keys.WAKE) is None
    by_schedule = await work(world, reconciler(world, "three"), marked=False)
    assert by_schedule == Shift(ticks=0)
    assert await world.store.get(keys.WAKE) is not None
    await lease.release()
    assert (await work(world, reconciler(world, "four"), marked=False)).ticks == 1


async def test_a_wake_that_finds_the_lease_taken_is_seen_by_its_holder(world: World) -> None:
    """Whenever it comes while another works, down to the moment in which the lease is given back: the holder ticks
    after it. Tried at every call of the store that a shift makes."""
    one = reconciler(world, "one")
    quiet = len(world.store.calls)  # type: ignore[attr-defined]
    await work(world, one, marked=False)
    calls = len(world.store.calls) - quiet  # type: ignore[attr-defined]
    assert calls > 5
    for number in range(1, calls + 1):
        world = await World().open()
        one, other = reconciler(world, "one"), world.services.context
        ticks: list[float] = []
        woken: list[float] = []
        tick = one.reconciler.tick

        async def noting(tick=tick, ticks=ticks, world=world) -> Plan:  # type: ignore[no-untyped-def]
            ticks.append(len(world.store.calls))
            return await tick()  # type: ignore[no-any-return]

        one.reconciler.tick = noting  # type: ignore[method-assign]
        began = len(world.store.calls)  # type: ignore[attr-defined]

        async def wake(world=world, other=other, woken=woken, at=began + number) -> None:  # type: ignore[no-untyped-def]
            while len(world.store.calls) < at:
                await asyncio.sleep(0)
            await write_wake(other.store, other.clock, "other")
            written = len(world.store.calls)
            stored = await world.store.get(keys.LEASE)
            # Free: the wake's own invocation works. Taken: the holder must.
            if stored is not None and stored.item["owner"]:
                woken.append(written)

        waking = asyncio.create_task(wake())
        await work(world, one, marked=False)
        waking.cancel()
        await asyncio.gather(waking, return_exceptions=True)
        if woken:
            assert ticks[-1] >= woken[0], f"the wake at call {number} was missed"


async def test_a_tick_follows_a_second_after_the_last_wake(world: World) -> None:
    """A replica that woke it writes no second wake within a second: what it wanted meanwhile is seen later."""
    one = reconciler(world, "one")
    await write_wake(one.context.store, world.clock, "other")
    moments: list[float] = []
    tick = one.reconciler.tick

    async def noting() -> Plan:
        moments.append(world.clock.monotonic())
        return await tick()

    one.reconciler.tick = noting  # type: ignore[method-assign]
    began = world.clock.monotonic()
    await work(world, one, marked=True)
    assert moments[-1] - began >= 1.0


async def test_a_holder_that_died_is_followed_after_its_lease(world: World) -> None:
    """Nobody renews it: after `LEASE_S` the next one works, not before."""
    lease = Lease(world.services.context.store, world.clock, "died")
    assert await lease.take()
    await world.run(LEASE_S - 1, beats=False)
    assert (await work(world, reconciler(world, "early"), marked=True)).ticks == 0
    await world.run(2, beats=False)
    assert (await work(world, reconciler(world, "next"), marked=True)).ticks >= 1


async def test_a_kept_lease_outlives_its_length_and_is_given_back(world: World) -> None:
    """While its holder works it is renewed; released it is free at once."""
    store = world.services.context.store
    one, two = Lease(store, world.clock, "one"), Lease(store, world.clock, "two")
    assert await one.take()
    async with one.kept():
        await world.run(3 * LEASE_S, beats=False)
        assert not await two.take()
    assert not one.lost
    await one.release()
    assert await two.take()


async def test_a_holder_without_the_store_knows_in_time_that_it_has_lost_the_lease(world: World) -> None:
    """Renewals that fail end the holding before another could take it."""
    store = world.services.context.store
    one = Lease(store, world.clock, "one")
    assert await one.take()
    taken = world.clock.monotonic()

    async def unavailable(*_: object, **__: object) -> NoReturn:
        raise ShoalError(ErrorCode.UNAVAILABLE, "no answer")

    store.get = unavailable  # type: ignore[method-assign]
    async with one.kept():
        while not one.lost:
            await world.run(1, beats=False)
        assert world.clock.monotonic() - taken <= LEASE_S
        assert world.clock.monotonic() - taken >= RENEW_S


async def test_a_cloud_that_does_not_answer_is_left_to_the_schedule(world: World) -> None:
    """A few tries, then the shift ends and calls for no successor: else it would run for as long as that lasts."""
    one = reconciler(world, "one")
    for number in range(1, 50):
        world.capacity.fail_call(number)
    shift = await work(world, one, marked=False)
    assert (shift.ticks, shift.failed, shift.pending) == (3, 3, False)
    assert await world.store.get(keys.WAKE) is None
    world.capacity.script.clear()
    assert (await work(world, one, marked=False)).failed == 0


async def test_who_has_lost_the_lease_starts_and_stops_no_host(world: World) -> None:
    """The record of a host, and the end of one, carry the lease as their condition."""
    await world.host()
    one = reconciler(world, "one")
    lease = Lease(one.context.store, world.clock, "one")
    executor = one.reconciler._executor
    executor.fence = lease.fence
    await one.sessions.create(WHO, body(resources={"memory_mib": 8192}))
    (instance,) = await world.capacity.instances()
    stop = StopInstance(instance=instance.id, host=instance.host, reason="idle")
    failures = await executor.execute(Plan(start={"default": 1}, stop=(stop,)))
    await one.context.background.idle()
    assert {failure.step for failure in failures} == {"start", "stop"}
    assert len(await world.capacity.instances()) == 1
    assert await lease.take()
    failures = await executor.execute(Plan(start={"default": 1}, stop=(stop,)))
    await one.context.background.idle()
    assert not failures
    assert {each.host for each in await world.capacity.instances()} != {instance.host}


class _SlowEnds:
    """Ends machines in passes, as drivers do: `end` takes its time before it does what it was asked to."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self._stop = world.capacity.stop
        self.passes: list[tuple[str, float]] = []

    def of(self, replica: str) -> Any:
        async def stop(instances: Sequence[str]) -> None:
            for _ in range(3):
                self.passes.append((replica, self._clock.monotonic()))
                await self._clock.sleep(40)
            await self._stop(instances)

        return stop


async def test_what_a_shift_began_to_end_is_not_ended_by_it_after_the_lease_was_given_back() -> None:
    """A driver's end of a machine takes longer than the shift: its process is frozen with that half done, and thawed
    when another works. It makes no further pass, and no host GONE; the other plans the end again."""
    settings = ProvisionerSettings(pools=(pool(idle_to_zero_s=5, scale_in_cooldown_s=1),))
    world = await World(settings=settings).open()
    host = await world.host()
    ends, at_once = _SlowEnds(world), world.capacity.stop
    one, two = reconciler(world, "one"), reconciler(world, "two")

    world.capacity.stop = ends.of("one")  # type: ignore[method-assign]
    for _ in range(20):
        await work(world, one, marked=False, time_s=MARGIN_S + 10, beats=True)
        if ends.passes:
            break
        await world.run(5)
    ended_at = world.clock.monotonic()
    assert ends.passes, "no machine was ended"
    stored = await world.store.get(keys.LEASE)
    assert stored is not None
    assert not stored.item["owner"]

    # Thawed: time goes by for what was left of it.
    await world.run(130)
    assert all(at <= ended_at for _, at in ends.passes)
    assert len(await world.capacity.instances()) == 1
    assert (await host_state(world, host.id)) is not HostState.GONE

    world.capacity.stop = at_once  # type: ignore[method-assign]
    for _ in range(3):
        await work(world, two, marked=False, time_s=30)
    assert not await world.capacity.instances()


async def test_a_host_is_not_marked_gone_by_who_lost_the_lease_while_ending_it(world: World) -> None:
    """The end of a machine takes a while, in which another may have taken over."""
    host = await world.host()
    one = reconciler(world, "one")
    lease, other = (Lease(one.context.store, world.clock, name) for name in ("one", "two"))
    assert await lease.take()
    one.reconciler._executor.fence = lease.fence
    world.capacity.stop = _SlowEnds(world).of("one")  # type: ignore[method-assign]
    (instance,) = await world.capacity.instances()
    stop = StopInstance(instance=instance.id, host=instance.host, reason="idle")
    assert not await one.reconciler._executor.execute(Plan(stop=(stop,)))
    await world.run(LEASE_S + 1)
    assert await other.take()
    await world.run(120)
    await one.context.background.idle()
    assert (await host_state(world, host.id)) is HostState.READY


async def host_state(world: World, id: HostId) -> HostState:
    stored = await world.store.get(keys.host(id))
    assert stored is not None
    return load(Host, stored.item).state


async def test_no_path_of_the_reconciler_dials_a_host() -> None:
    """Hosts lost while their sandboxes run, start and are replaced; sessions that expire in the queue; snapshots whose
    host is gone; hosts that leave: all is done without one call to an agent."""
    settings = ProvisionerSettings(pools=(pool(idle_to_zero_s=5, scale_in_cooldown_s=1),), start_attempts=1)
    world = await World(settings=settings).open()
    host = await world.host()
    running = await world.create()
    restored = await world.create(on_host_loss="restore")
    host.cold = True
    starting = await world.create(wait_s=0)
    await world.run(1)
    assert (await world.services.sessions.get(WHO, starting)).state is SessionState.STARTING
    expiring = (
        await world.services.sessions.create(WHO, body(ttl_s=60, resources={"cpu_millis": 8000}))
    ).session
    await world.services.context.background.idle()
    host.reachable = False
    one = reconciler(world, "one")
    for _ in range(40):
        await work(world, one, marked=False, time_s=15)
        await world.run(5, beats=False)
    told = {id: await world.services.sessions.get(WHO, id) for id in (running, starting, expiring.id)}
    assert {session.state for session in told.values()} == {SessionState.ENDED}
    assert (await world.services.sessions.get(WHO, restored)).state is SessionState.RESTORING


async def test_no_agents_say_that_nothing_was_sent() -> None:
    """What a process without a way to hosts would tell one is known not to have arrived: others try."""
    from provisioner.agents.port import HostRef

    with pytest.raises(ShoalError) as refused:
        await NoAgents().start(
            HostRef(id=HostId("hst_1"), address="http://127.0.0.1:1"), SandboxStart.model_construct()
        )
    assert refused.value.code is ErrorCode.HOST_UNREACHABLE
    assert refused.value.details["sent"] is False
