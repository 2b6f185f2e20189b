"""A tenant's quota in shards: never exceeded, never refused while there is some, never leaked, in whatever order the
calls of concurrent creates, ends and changes of the limits reach the store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner import keys, quota, spread
from provisioner.auth import DEFAULT_TENANT
from provisioner.clock import ManualClock
from provisioner.model import Tenant, dump
from provisioner.quota import DIMENSIONS
from provisioner.sessions import grants as grants_module
from provisioner.sessions import refusals as refusals_module
from provisioner.sessions.grants import Grants, held_by
from provisioner.sessions.settling import RETRY_S
from provisioner.store.fake import FakeStore
from provisioner.store.port import ConditionFailed, Key, Op, Page, Put, Stored
from shoal.contract.errors import ErrorCode, ShoalError
from tests.unit.provisioner.world import World

ONE = {"sessions": 1, "cpu_millis": 500, "memory_mib": 256}


class Shuffled:
    """A store whose calls wait until it is their turn: `drive` says whose."""

    def __init__(self, store: FakeStore, seen: Callable[[], None]) -> None:
        self._store = store
        self._seen = seen
        self._waiting: list[asyncio.Future[None]] = []

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    async def get(self, key: Key) -> Stored | None:
        await self._turn()
        return await self._store.get(key)

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        # No moment in common: every item is read at a turn of its own, as the port allows.
        found = []
        for key in keys:
            await self._turn()
            found.append(await self._store.get(key))
        return found

    async def query(self, pk: str, **how: Any) -> Page:
        await self._turn()
        return await self._store.query(pk, **how)

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        await self._turn()
        await self._store.transact(ops, token=token)
        self._seen()

    async def close(self) -> None:
        await self._store.close()

    async def drive(self, work: Sequence[Coroutine[Any, Any, Any]], chance: random.Random) -> list[Any]:
        tasks = [asyncio.ensure_future(each) for each in work]
        while not all(task.done() for task in tasks):
            for _ in range(5):
                await asyncio.sleep(0)
            if self._waiting:
                self._waiting.pop(chance.randrange(len(self._waiting))).set_result(None)
        return [task.result() for task in tasks]


class Quota:
    """A tenant over a store whose calls are shuffled, and what happens to its sessions."""

    def __init__(self, seed: int, *, sessions: int | None, cpu_millis: int | None = None) -> None:
        self.plain = FakeStore()
        self.store = Shuffled(self.plain, self.look)
        self.chance = random.Random(seed)
        self.worst = 0
        self.limits = {"sessions": sessions, "cpu_millis": cpu_millis}
        self.replicas: list[Grants] = []
        self.clocks: list[ManualClock] = []
        self.taken: list[int] = []

    async def open(self, replicas: int = 3) -> Quota:
        await self.plain.transact([self.tenant()])
        for number in range(replicas):
            world = World(self.store)
            self.clocks.append(world.clock)
            self.replicas.append(Grants(world.replica(f"r{number}").context))
        return self

    def wait(self, seconds: float = RETRY_S) -> None:
        """As long as who was refused is told to wait."""
        for clock in self.clocks:
            clock.tick(seconds)

    def tenant(self) -> Put:
        record = Tenant(
            id=DEFAULT_TENANT,
            name="t",
            parent=None,
            created_at=datetime(2026, 11, 1, tzinfo=UTC),
            max_sessions=self.limits["sessions"],
            max_cpu_millis=self.limits["cpu_millis"],
        )
        return Put(key=keys.tenant(DEFAULT_TENANT), item=dump(record))

    def items(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        dump = self.plain.dump()
        book = dump.get(keys.book(DEFAULT_TENANT), {})
        return book, [item for key, item in dump.items() if key.pk.startswith(f"QUOTA#{DEFAULT_TENANT}#")]

    def look(self) -> None:
        """After every write: no room is below none, and what was given is what is held and what may be."""
        book, shards = self.items()
        for name in DIMENSIONS:
            held = sum(shard.get(name) or 0 for shard in shards)
            room = sum(shard.get(f"room_{name}") or 0 for shard in shards)
            assert all((shard.get(f"room_{name}") or 0) >= 0 for shard in shards)
            assert all((shard.get(name) or 0) >= 0 for shard in shards)
            assert (book.get(name) or 0) == held + room, name
        self.worst = max(self.worst, self.held())

    def held(self) -> int:
        return sum(shard.get("sessions") or 0 for shard in self.items()[1])

    async def create(self, id: str, amounts: dict[str, int] = ONE) -> bool:
        """As a create does it: take of the shard of the id; where it is short, have room made there."""
        grants = self.chance.choice(self.replicas)
        shard = await grants.shard(DEFAULT_TENANT, id)
        while True:
            try:
                await self.store.transact([quota.take(DEFAULT_TENANT, shard, amounts)])
            except ConditionFailed:
                try:
                    shard = await grants.room_for(DEFAULT_TENANT, id, amounts)
                except ShoalError as error:
                    if error.code is not ErrorCode.QUOTA_EXCEEDED:
                        raise
                    return False
            else:
                self.taken.append(shard)
                return True

    async def end(self, amounts: dict[str, int] = ONE) -> None:
        """As an end does it: give back where it was taken."""
        if self.taken:
            shard = self.taken.pop(self.chance.randrange(len(self.taken)))
            await self.store.transact([quota.give_back(DEFAULT_TENANT, shard, amounts)])


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards open at a tenth of the usual size, so that few sessions meet many of them."""
    monkeypatch.setattr(spread, "SESSIONS_PER_SHARD", 2)
    monkeypatch.setattr(grants_module, "_AHEAD", 1)
    monkeypatch.setattr(refusals_module, "FEW", 1)


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 24), over=st.integers(0, 10))
def test_all_of_a_quota_can_be_taken_and_no_more(seed: int, limit: int, over: int) -> None:
    """Of concurrent creates exactly as many are let in as the quota has room for, and all room can be had again."""

    async def story() -> None:
        tenant = await Quota(seed, sessions=limit).open()
        for _ in range(2):
            done = await tenant.store.drive(
                [tenant.create(f"ses_{n}") for n in range(limit + over)], tenant.chance
            )
            assert sum(done) == limit
            assert tenant.worst == limit
            ends = [tenant.end() for _ in range(limit)]
            await tenant.store.drive(ends, tenant.chance)
            assert tenant.held() == 0
            tenant.wait()

    run(story)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 30), steps=st.integers(10, 40))
def test_creates_and_ends_in_any_order_keep_the_quota(seed: int, limit: int, steps: int) -> None:
    """Creates and ends at the same time never hold more than the quota, and leave nothing behind."""

    async def story() -> None:
        tenant = await Quota(seed, sessions=limit, cpu_millis=500 * limit).open()
        work: list[Coroutine[Any, Any, Any]] = [
            tenant.create(f"ses_{n}") if tenant.chance.random() < 0.7 else tenant.end() for n in range(steps)
        ]
        await tenant.store.drive(work, tenant.chance)
        assert tenant.worst <= limit
        assert tenant.held() == len(tenant.taken)
        await tenant.store.drive([tenant.end() for _ in list(tenant.taken)], tenant.chance)
        _, shards = tenant.items()
        assert all(not shard.get(name) for shard in shards for name in DIMENSIONS)
        # All of it can be taken once more: no room was lost.
        tenant.wait()
        done = await tenant.store.drive([tenant.create(f"new_{n}") for n in range(limit)], tenant.chance)
        assert all(done)

    run(story)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    first=st.one_of(st.none(), st.integers(1, 30)),
    then=st.one_of(st.none(), st.integers(1, 30)),
)
def test_a_new_limit_holds_once_it_is_known(seed: int, first: int | None, then: int | None) -> None:
    """Once a replica has seen changed limits no create adds to what is over them; below them creates are let in."""

    async def story() -> None:
        tenant = await Quota(seed, sessions=first).open()
        await tenant.store.drive([tenant.create(f"ses_{n}") for n in range(20)], tenant.chance)
        tenant.limits["sessions"] = then

        async def change() -> None:
            await tenant.store.transact([tenant.tenant()])
            tenant.replicas[0]._known.clear()
            await tenant.replicas[0].shards(DEFAULT_TENANT)

        racing = [tenant.create(f"mid_{n}") for n in range(5)]
        await tenant.store.drive([change(), *racing, tenant.end(), tenant.end()], tenant.chance)
        before = tenant.held()
        tenant.worst = 0
        tenant.wait()
        await tenant.store.drive([tenant.create(f"late_{n}") for n in range(40)], tenant.chance)
        if then is None:
            assert tenant.held() == before + 40
        else:
            assert tenant.held() == max(before, then)
        await tenant.store.drive([tenant.end() for _ in list(tenant.taken)], tenant.chance)
        assert tenant.held() == 0
        tenant.wait()
        wanted = 25 if then is None else then
        done = await tenant.store.drive([tenant.create(f"new_{n}") for n in range(wanted)], tenant.chance)
        assert all(done)

    run(story)


async def test_counts_are_the_sum_of_the_shards() -> None:
    """What a tenant holds is told exactly, however it is spread."""
    tenant = await Quota(1, sessions=None).open(1)
    await tenant.store.drive([tenant.create(f"ses_{n}") for n in range(33)], tenant.chance)
    _, shards = tenant.items()
    assert len(shards) > 4
    context = World(tenant.plain).replica("x").context
    assert await held_by(context.store, DEFAULT_TENANT) == {name: 33 * ONE[name] for name in DIMENSIONS}


async def test_a_group_takes_of_several_shards_or_borrows_into_one() -> None:
    """A group's quota is taken of many shards in equal parts; near the limit it is gathered in one, all of it;
    beyond the limit it is refused, and what is left can still be taken."""
    tenant = await Quota(2, sessions=64).open(1)
    grants = tenant.replicas[0]
    await tenant.store.drive([tenant.create(f"ses_{n}") for n in range(16)], tenant.chance)

    async def group(id: str, count: int) -> int:
        parts = await grants.parts(DEFAULT_TENANT, id, count)
        while True:
            assert sum(many for _, many in parts) == count
            assert len({shard for shard, _ in parts}) == len(parts)
            takes = [
                quota.take(DEFAULT_TENANT, shard, {name: many * ONE[name] for name in DIMENSIONS})
                for shard, many in parts
            ]
            try:
                await tenant.store.transact(takes)
            except ConditionFailed:
                parts = await grants.room_for_group(DEFAULT_TENANT, id, [ONE] * count)
            else:
                return len(parts)

    assert (await tenant.store.drive([group("grp_1", 24)], tenant.chance))[0] > 1
    assert (await tenant.store.drive([group("grp_2", 22)], tenant.chance))[0] == 1
    assert tenant.held() == 62
    with pytest.raises(ShoalError) as raised:
        await tenant.store.drive([group("grp_3", 3)], tenant.chance)
    assert raised.value.details["held"]["sessions"] == 62
    assert await asyncio.wait_for(tenant.store.drive([group("grp_4", 2)], tenant.chance), 10) == [1]


async def at_its_limit() -> Quota:
    """A tenant of many shards that holds all of its quota, and was refused more."""
    tenant = await Quota(3, sessions=24).open(3)
    await tenant.store.drive([tenant.create(f"ses_{n}") for n in range(24)], tenant.chance)
    assert len(tenant.items()[1]) >= 8
    return tenant


async def test_repeats_of_a_tenant_at_its_limit_read_few_items() -> None:
    """Of 500 creates a second for ten seconds, over replicas that see few of them each, a handful count all shards; the
    rest read the tenant, the book, their shard and the refusal."""
    tenant = await at_its_limit()
    counted = 0
    many = tenant.store.get_many

    async def noting(wanted: Sequence[Key]) -> list[Stored | None]:
        nonlocal counted
        counted += len(wanted) > 2
        return await many(wanted)

    tenant.store.get_many = noting  # type: ignore[assignment,method-assign]
    for second in range(10):
        for tenth in range(10):
            creates = [tenant.create(f"more_{second}_{tenth}_{n}") for n in range(50)]
            assert not any(await tenant.store.drive(creates, tenant.chance))
            tenant.wait(0.1)
    # One each 1.5 s, and the first of each replica.
    assert counted <= 10


async def test_what_is_freed_is_had_within_the_time_that_a_refusal_says_to_wait() -> None:
    """However often it is asked for meanwhile: being asked does not make a refusal last."""
    tenant = await at_its_limit()
    assert await tenant.store.drive([tenant.create("one_more")], tenant.chance) == [False]
    await tenant.store.drive([tenant.end()], tenant.chance)
    waited, got = 0.0, False
    while not got:
        got = any(
            await tenant.store.drive([tenant.create(f"again_{waited}_{n}") for n in range(3)], tenant.chance)
        )
        if not got:
            tenant.wait(0.1)
            waited += 0.1
    assert waited <= RETRY_S + 0.05


async def test_a_refusal_is_of_its_limits_and_of_its_size() -> None:
    """A raised limit lets in at once, and so does an ask for less than what was refused."""
    tenant = await at_its_limit()
    await tenant.store.drive([tenant.end(), tenant.end()], tenant.chance)
    tenant.wait()
    big = {name: 3 * amount for name, amount in ONE.items()}
    assert await tenant.store.drive([tenant.create("big", big)], tenant.chance) == [False]
    assert await tenant.store.drive([tenant.create("small")], tenant.chance) == [True]
    assert await tenant.store.drive([tenant.create("big_2", big)], tenant.chance) == [False]
    tenant.limits["sessions"] = 30
    await tenant.store.drive([tenant.store.transact([tenant.tenant()])], tenant.chance)
    assert await tenant.store.drive([tenant.create("big_3", big)], tenant.chance) == [True]
