"""The session use cases against a model, with every call failing once: nothing is lost, and the quota is exact.

A scenario runs over the fake store and over SQLite; the n-th call of the store (or of the agents) fails, or takes
effect and loses its answer, for every n there is. Whatever the caller was told, after some quiet time the records, the
lists, the hosts and the quota must agree.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from provisioner import keys
from provisioner.auth import DEFAULT_TENANT
from provisioner.model import Assignment, Session, load
from provisioner.placement import Room
from provisioner.sessions.grants import held_by
from provisioner.spread import everything
from provisioner.store.fake import FakeStore
from provisioner.store.port import Conflict, StoreUnavailable, Throttled
from provisioner.store.sqlite import SqliteStore
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, Next, ShoalError
from shoal.contract.sessions import SessionCreate, SessionReplace, SessionsDelete
from shoal.contract.states import SessionState
from tests.unit.provisioner.world import IMAGE, WHO, World

LIVE = {SessionState.PENDING, SessionState.STARTING, SessionState.RUNNING, SessionState.RESTORING}


async def sessions_of(world: World) -> dict[SessionId, Session]:
    """All sessions, by the lists: live, and ended."""
    store = world.services.context.store
    found: dict[SessionId, Session] = {}
    for family in (keys.live_list(DEFAULT_TENANT), keys.ended_list(DEFAULT_TENANT)):
        for entry in await everything(store, keys.partitions(family, keys.LIST_SHARDS)):
            id = SessionId(entry.item["session"])
            assert id not in found, "one session in two lists"
            stored = await store.get(keys.session(id))
            assert stored is not None, "a list names what is not there"
            found[id] = load(Session, stored.item)
            assert (found[id].state in LIVE) == family.startswith("LIVE"), (family, found[id].state)
    return found


async def check(world: World) -> dict[SessionId, Session]:
    """Records, lists, queue, hosts and quota tell one story."""
    store = world.services.context.store
    sessions = await sessions_of(world)
    live = {id: session for id, session in sessions.items() if session.state in LIVE}
    held = Room()
    for session in live.values():
        held = held + Room.for_one(session.resources)
    assert await held_by(store, DEFAULT_TENANT) == {
        "sessions": held.sandboxes,
        "cpu_millis": held.cpu_millis,
        "memory_mib": held.memory_mib,
    }
    queues = keys.partitions(keys.queue_list("default"), keys.LIST_SHARDS)
    queue = {SessionId(item.item["session"]) for item in await everything(store, queues)}
    assert queue == {id for id, session in live.items() if session.host is None}
    assigned: set[tuple[str, str, int]] = set()
    for host in world.agents.hosts:
        for item in await store.query_all(f"ON#{host}"):
            each = load(Assignment, item.item)
            assigned.add((each.host, each.session, each.epoch))
    assert assigned == {
        (session.host, id, session.epoch)
        for id, session in sessions.items()
        if session.host and session.state in LIVE
    }
    places = keys.partitions(f"NAME#{DEFAULT_TENANT}#r", keys.NAME_SHARDS)
    names = {item.item["session"] for item in await everything(store, places)}
    assert names == {id for id, session in live.items() if session.name}
    running = {
        (host.id, status.session, status.epoch)
        for host in world.agents.hosts.values()
        for status in host.live()
    }
    assert running == assigned
    return sessions


async def quietly(world: World, seconds: float = 60.0) -> None:
    """Time without failures: heartbeats, the queue's pump, the reconciler."""
    if isinstance(world.store, FakeStore):
        world.store.script.clear()
    world.agents.script.clear()
    for second in range(round(seconds)):
        for host in world.agents.hosts.values():
            host.run_all()
        await world.clock.advance(1.0)
        await world.beat()
        await world.drive(world.services.reconciler.tick())
        await world.arrive()
        await world.drive(world.services.pump.drain())
        await world.drive(world.services.context.background.idle())
        if second % 5 == 4:
            try:
                await check(world)
            except AssertionError:
                # Not at rest yet; what is wrong for good is found by the last look.
                continue
            return


async def persistently(world: World, call: Any) -> Any:
    """What the SDK does: repeat under the same key while the answer says so; None when it gives up or is refused."""
    for _ in range(5):
        try:
            return await world.finish(call())
        except ShoalError as error:
            if error.next not in (Next.RETRY, Next.WAIT):
                return None
            await world.run(1.0)
    return None


async def story(world: World) -> dict[str, Any]:
    """One session made, one replaced, a group made, some deleted: each as a careful client does it."""
    sessions = world.services.sessions
    told: dict[str, Any] = {}
    one = SessionCreate(image=IMAGE, run="r", name="one", wait_s=2)
    told["one"] = await persistently(world, lambda: sessions.create(WHO, one, idempotency_key="k1"))
    group = SessionCreate(image=IMAGE, run="r", count=3, wait_s=2)
    told["group"] = await persistently(world, lambda: sessions.create_many(WHO, group, idempotency_key="k2"))
    if told["one"] is not None:
        id = told["one"].session.id
        await persistently(world, lambda: sessions.replace(WHO, id, SessionReplace(wait_s=2)))
    if told["group"] is not None:
        ids = [item.session.id for item in told["group"].sessions if item.session][:2]
        await persistently(world, lambda: sessions.delete_many(WHO, SessionsDelete(ids=ids)))
        told["deleted"] = ids
    return told


async def prepared(store: Any = None) -> World:
    world = await World(store).open()
    await world.host()
    await world.host()
    return world


async def verify(world: World, told: dict[str, Any]) -> None:
    await quietly(world)
    found = await check(world)
    if told["one"] is not None:
        session = found[told["one"].session.id]
        assert session.state is SessionState.RUNNING, session
        assert session.epoch >= 1
    if told["group"] is not None:
        ids = [item.session.id for item in told["group"].sessions if item.session]
        assert len(set(ids)) == 3
        for id in ids:
            ended = found[id].state is SessionState.ENDED
            assert ended == (id in told.get("deleted", [])), found[id]
    # No key made two of anything.
    assert sum(session.name == "one" for session in found.values()) <= 1
    assert len(found) <= 4


async def calls_of_a_story() -> tuple[int, int]:
    world = await prepared()
    assert isinstance(world.store, FakeStore)
    store_before, agents_before = len(world.store.calls), len(world.agents.calls)
    told = await story(world)
    counts = len(world.store.calls) - store_before, len(world.agents.calls) - agents_before
    await verify(world, told)
    return counts


async def test_the_story_without_failures() -> None:
    """The scenario itself: all its calls succeed and the model holds."""
    store, agents = await calls_of_a_story()
    assert store > 20
    assert agents > 6


@pytest.mark.parametrize("after", [False, True], ids=["failed", "answer-lost"])
@pytest.mark.parametrize("error", [Conflict, Throttled, StoreUnavailable])
async def test_each_store_call_failing_once(error: type[Exception], after: bool) -> None:
    """Whichever store call fails or loses its answer, the caller gets its sessions, once each."""
    if after and error is not StoreUnavailable:
        pytest.skip("these say that nothing was written")
    count, _ = await calls_of_a_story()
    # Each run is a whole world. What passes is repeated alike whichever it is, so one kind goes through every call.
    offset, stride = {Conflict: (0, 5), Throttled: (1, 5)}.get(error, (0, 1))
    for number in range(1 + offset, count + 1, stride):
        world = await prepared()
        assert isinstance(world.store, FakeStore)
        world.store.fail_call(number, error("scripted"), after=after)  # type: ignore[arg-type]
        told = await story(world)
        assert told["one"] is not None, number
        assert told["group"] is not None, number
        await verify(world, told)


@pytest.mark.parametrize("after", [False, True], ids=["failed", "answer-lost"])
async def test_the_store_gone_for_a_while(after: bool) -> None:
    """A store that fails eight calls in a row, from any call on: the client is told to retry, and nothing is lost."""
    count, _ = await calls_of_a_story()
    for number in range(1, count + 1, 7):
        world = await prepared()
        assert isinstance(world.store, FakeStore)
        for step in range(8):
            world.store.fail_call(number + step, after=after)
        told = await story_of_a_bad_time(world)
        await verify(world, told)


async def story_of_a_bad_time(world: World) -> dict[str, Any]:
    try:
        return await story(world)
    except (ShoalError, StoreUnavailable):
        return {"one": None, "group": None}


@pytest.mark.parametrize("after", [False, True], ids=["failed", "answer-lost"])
@pytest.mark.parametrize(
    "code", [ErrorCode.HOST_UNREACHABLE, ErrorCode.HOST_REFUSED, ErrorCode.SANDBOX_START_FAILED]
)
async def test_each_agent_call_failing_once(code: ErrorCode, after: bool) -> None:
    """Whichever call to an agent fails or loses its answer, the session runs in one place in the end."""
    if after and code is not ErrorCode.HOST_UNREACHABLE:
        pytest.skip("an answer that refuses was carried out in no part")
    _, count = await calls_of_a_story()
    for number in range(1, count + 1):
        world = await prepared()
        world.agents.fail_call(number, ShoalError(code, "scripted", details={"sent": after}), after=after)
        told = await story(world)
        await verify(world, told)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["fake", "sqlite"])
async def test_random_histories(kind: str, seed: int, tmp_path: Path) -> None:
    """Random creates, deletes, replaces, host deaths and endings, with random failures: the model holds at rest."""
    chance = random.Random(seed)
    store = FakeStore() if kind == "fake" else SqliteStore(tmp_path / "state.db")
    world = await prepared(store)
    sessions = world.services.sessions
    ids: list[SessionId] = []
    keys_used: dict[str, set[SessionId]] = {}

    async def step(number: int) -> None:
        choice = chance.random()
        if isinstance(store, FakeStore) and chance.random() < 0.3:
            store.fail_call(chance.randint(1, 6), after=chance.random() < 0.5)
        if chance.random() < 0.2:
            world.agents.fail_call(chance.randint(1, 2), after=chance.random() < 0.5)
        if choice < 0.4 or not ids:
            key = f"k{chance.randint(0, number)}"
            name = chance.choice([None, f"n{chance.randint(0, 3)}"])
            labels = {"key": key, "name": name or ""}
            policy = chance.choice(["fail", "restore"])
            body = SessionCreate(
                image=IMAGE,
                run="r",
                name=name,
                labels=labels,
                wait_s=0,
                on_host_loss=policy,  # type: ignore[arg-type]
            )
            created = await sessions.create(WHO, body, idempotency_key=key)
            ids.append(created.session.id)
            if created.created:
                keys_used.setdefault(key, set()).add(created.session.id)
        elif choice < 0.6:
            await sessions.delete(WHO, chance.choice(ids))
        elif choice < 0.7:
            await sessions.replace(WHO, chance.choice(ids), SessionReplace(wait_s=0))
        elif choice < 0.8:
            host = chance.choice(list(world.agents.hosts.values()))
            live = host.live()
            if live:
                host.change(
                    chance.choice(live).session, state="ended", end_reason="idle", journal_flushed=True
                )
        elif choice < 0.85:
            hosts = [host for host in world.agents.hosts.values() if host.reachable]
            if len(hosts) > 1:
                dead = chance.choice(hosts)
                dead.reachable = False
                dead.sandboxes.clear()
                world.capacity.kill(f"i-{dead.id}")
        else:
            await world.run(chance.random() * 5)

    for number in range(30):
        try:
            await world.finish(step(number))
        except ShoalError:
            continue
        except StoreUnavailable:
            continue
    await quietly(world, 90)
    found = await check(world)
    for made in keys_used.values():
        assert len(made) == 1
    for session in found.values():
        assert session.state in (SessionState.RUNNING, SessionState.ENDED), session
    await asyncio.sleep(0)
    await store.close()
