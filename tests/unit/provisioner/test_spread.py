"""Lists over several partitions are one list; small tenants pay for one, hot ones get more."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner import keys, spread
from provisioner.auth import DEFAULT_TENANT
from provisioner.clock import ManualClock
from provisioner.store.fake import FakeStore
from provisioner.store.port import Key, Put, Throttled
from provisioner.store.steady import SteadyStore
from tests.unit.provisioner.world import WHO, World


@settings(max_examples=60, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 999)), unique_by=lambda place: place[1]),
    limit=st.integers(1, 25),
    reverse=st.booleans(),
)
def test_pages_of_many_partitions_are_pages_of_one(
    places: list[tuple[int, int]], limit: int, reverse: bool
) -> None:
    """However entries are spread, the pages put together are all of them, in order, and each cursor is further on."""

    async def story() -> None:
        store = SteadyStore(FakeStore(), ManualClock(), random.Random(1))
        pks = [f"L#{shard:02x}" for shard in range(5)]
        for shard, number in places:
            await store.transact([Put(key=Key(pk=pks[shard], sk=f"{number:03d}"), item={})])
        found: list[str] = []
        after: str | None = None
        while True:
            page = await spread.page(store, pks, after=after, limit=limit, reverse=reverse)
            assert len(page.items) <= limit
            found += [item.key.sk for item in page.items]
            if page.after is None:
                break
            assert len(page.items) == limit
            assert page.after == found[-1]
            after = page.after
        assert found == sorted((f"{number:03d}" for _, number in places), reverse=reverse)

    asyncio.run(story())


async def test_a_small_tenants_list_is_one_query() -> None:
    """Who has had few sessions pays one read of the number of shards, one query and one read of the sessions."""
    world = await World().open()
    await world.host()
    for number in range(3):
        await world.create(run="r", name=f"s{number}")
    assert isinstance(world.store, FakeStore)
    world.store.calls.clear()
    page = await world.services.sessions.list(WHO, run="r")
    assert len(page.sessions) == 3
    assert [call.split()[0] for call in world.store.calls] == ["get", "query", "get_many"]


async def test_a_tenant_is_spread_when_its_partitions_refuse() -> None:
    """A create that DynamoDB throttles for longer than the retries last finds its tenant twice as many shards, and is
    made there."""
    world = await World().open()
    await world.host()
    await world.create()
    store = world.services.context.store
    before = await spread.lists_of(store, DEFAULT_TENANT)
    inner = world.store.transact
    refused = 0

    async def hot(ops, *, token=None):  # type: ignore[no-untyped-def]
        nonlocal refused
        if any(op.key.pk.startswith("LIVE#") for op in ops) and refused < 5:
            refused += 1
            raise Throttled("hot")
        await inner(ops, token=token)

    world.store.transact = hot  # type: ignore[method-assign]
    id = await world.create()
    assert refused == 5
    assert await spread.lists_of(store, DEFAULT_TENANT) == 2 * before
    stored = await world.store.get(keys.session(id))
    assert stored is not None
    assert stored.item["shards"] == 2 * before
    assert id in [session.id for session in (await world.services.sessions.list(WHO)).sessions]
