"""Creates at the same time, from several replicas, over every store: the quota is neither exceeded nor left unused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from provisioner import keys, spread
from provisioner.auth import DEFAULT_TENANT
from provisioner.clock import SystemClock
from provisioner.model import Tenant, dump, load, replace
from provisioner.route_tokens import RouteSigner
from provisioner.services import Services, build_services
from provisioner.sessions import records
from provisioner.sessions.create import Made
from provisioner.sessions.grants import held_by
from provisioner.sessions.queries import decode_cursor
from provisioner.store.port import Put, Store
from shoal.contract.errors import ErrorCode, Next, ShoalError
from shoal.contract.sessions import SessionCreate
from shoal.contract.states import EndReason
from tests.contract.test_store import ADAPTERS, opened
from tests.unit.provisioner.world import IMAGE, WHO, World

LIMIT = 48


@pytest.fixture(params=ADAPTERS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(request.param, tmp_path, request) as store:
        yield store


async def replicas(store: Store, limit: int | None) -> list[Services]:
    """Four control planes over one store, in real time, and a tenant of this quota."""
    world = await World(store).open()
    found = await store.get(keys.tenant(DEFAULT_TENANT))
    assert found is not None
    tenant = replace(load(Tenant, found.item), max_sessions=limit)
    await store.transact([Put(key=keys.tenant(DEFAULT_TENANT), item=dump(tenant))])
    clock = SystemClock()
    return [
        build_services(
            store=store,
            blobs=world.blobs,
            agents=world.agents,
            capacity=world.capacity,
            clock=clock,
            signer=RouteSigner(store, clock, key_life_s=86_400),
            settings=world.settings,
            replica=f"r{number}",
        )
        for number in range(4)
    ]


async def create(services: Services, key: str) -> Made | None:
    """Make a session under a key, as patiently as the SDK; None when the quota refuses it."""
    while True:
        try:
            return await services.sessions.creating.one(WHO, SessionCreate(image=IMAGE, run="r"), key)
        except ShoalError as error:
            if error.code is ErrorCode.QUOTA_EXCEEDED:
                return None
            if error.next not in (Next.RETRY, Next.WAIT):
                raise


async def test_sixty_four_creates_take_exactly_the_quota(store: Store) -> None:
    """Of 64 creates over four replicas exactly as many as the quota allows are made; when these have ended, as many
    are made again: nothing was lost on the way."""
    several = await replicas(store, LIMIT)
    for turn in ("first", "second"):
        made = await asyncio.gather(*(create(several[n % 4], f"{turn}-{n}") for n in range(64)))
        let_in = [each for each in made if each is not None]
        assert len(let_in) == LIMIT
        store_of = several[0].context.store
        assert (await held_by(store_of, DEFAULT_TENANT))["sessions"] == LIMIT
        limit = asyncio.Semaphore(16)
        await asyncio.gather(*(end(several[n % 4], each, limit) for n, each in enumerate(let_in)))
        assert (await held_by(store_of, DEFAULT_TENANT))["sessions"] == 0


async def end(services: Services, made: Made, limit: asyncio.Semaphore) -> None:
    async with limit:
        found = await records.read(services.context.store, made.session.id)
        assert found is not None
        await services.sessions.ending.end(found, EndReason.DELETED)


async def test_lists_see_every_create_of_a_growing_tenant(store: Store) -> None:
    """While creates from four replicas spread a tenant over more and more shards, a list shows whatever was made when
    it began, in order of age, once, page by page."""
    several = await replicas(store, None)
    done: set[str] = set()
    stop = asyncio.Event()

    async def make(services: Services, name: str) -> None:
        for number in range(40):
            made = await create(services, f"{name}-{number}")
            assert made is not None
            done.add(made.session.id)

    async def look(services: Services) -> int:
        looks = 0
        while not stop.is_set():
            before = set(done)
            seen: list[str] = []
            places: list[str] = []
            cursor = None
            while True:
                page = await services.sessions.list(WHO, run="r", cursor=cursor, limit=25)
                seen += [session.id for session in page.sessions]
                cursor = page.cursor
                if cursor is None:
                    break
                places.append(decode_cursor(cursor) or "")
            assert places == sorted(places)
            assert len(set(seen)) == len(seen)
            assert before <= set(seen)
            looks += 1
            await asyncio.sleep(0)
        return looks

    looking = asyncio.ensure_future(look(several[0]))
    await asyncio.gather(*(make(services, f"m{n}") for n, services in enumerate(several)))
    stop.set()
    assert await looking > 0
    assert len(done) == 160
    assert await spread.lists_of(several[0].context.store, DEFAULT_TENANT) > 1
