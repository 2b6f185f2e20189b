"""Sessions from creation to end, over fakes and in virtual time."""

from __future__ import annotations

import pytest

from provisioner import keys
from provisioner.auth import DEFAULT_TENANT
from provisioner.sessions.grants import held_by
from provisioner.spread import everything
from shoal.contract.errors import ErrorCode, Next, ShoalError
from shoal.contract.sessions import (
    SessionAck,
    SessionBatch,
    SessionCreate,
    SessionPatch,
    SessionReplace,
    SessionsDelete,
)
from shoal.contract.snapshots import SnapshotCreate
from shoal.contract.states import EndReason, Phase, SessionState, SnapshotState
from tests.unit.provisioner.world import IMAGE, WHO, World


@pytest.fixture
async def world() -> World:
    return await World().open()


async def held(world: World) -> dict[str, int]:
    taken = await held_by(world.services.context.store, DEFAULT_TENANT)
    return {name: value for name, value in taken.items() if value}


async def test_a_create_takes_one_transaction_one_call_and_one_transaction(world: World) -> None:
    """The create path is two writes and one call to an agent."""
    host = await world.host()
    # The tenant's first one also opens its quota.
    await world.create()
    await world.services.context.fleet.views()
    world.agents.calls.clear()
    world.store.calls.clear()  # type: ignore[attr-defined]
    created = await world.services.sessions.create(WHO, SessionCreate(image=IMAGE))
    assert created.created
    assert created.session.state is SessionState.RUNNING
    assert created.session.host == host.id
    assert len(world.agents.calls) == 1
    writes = [call for call in world.store.calls if call.startswith("transact")]  # type: ignore[attr-defined]
    assert len(writes) == 2


async def test_a_session_without_hosts_waits_and_runs_when_one_comes(world: World) -> None:
    """No capacity is no error: the session queues, the reconciler starts a host, the session runs."""
    id = await world.create(wait_s=0)
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.PENDING
    assert session.phase is Phase.WAITING_FOR_HOST
    await world.tick()
    await world.services.pump.drain()
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING


async def test_the_same_key_answers_the_same_session(world: World) -> None:
    """A lost create response makes no duplicate."""
    await world.host()
    first = await world.create(key="k1")
    assert await world.create(key="k1") == first
    with pytest.raises(ShoalError) as raised:
        await world.create(key="k1", labels={"a": "b"})
    assert raised.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    assert (await held(world))["sessions"] == 1


async def test_a_name_gets_or_creates_while_its_session_lives(world: World) -> None:
    """A restarted trainer finds its sessions by name; after their end the name is free."""
    await world.host()
    first = await world.create(run="r", name="n")
    assert await world.create(run="r", name="n") == first
    assert await world.create(run="other", name="n") != first
    with pytest.raises(ShoalError) as raised:
        await world.create(run="r", name="n", labels={"x": "y"})
    assert raised.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    await world.services.sessions.delete(WHO, first)
    assert await world.create(run="r", name="n") != first


async def test_delete_frees_quota_at_once_and_ends_everything(world: World) -> None:
    """Deleting is idempotent, frees quota on intent, leaves nothing on the host, and the tombstone tells why."""
    host = await world.host()
    id = await world.create(run="r")
    assert (await held(world))["sessions"] == 1
    session = await world.services.sessions.delete(WHO, id)
    assert session.end is not None
    assert session.end.reason is EndReason.DELETED
    assert await held(world) == {}
    again = await world.finish(world.services.sessions.delete(WHO, id, wait_s=5))
    assert again.state is SessionState.ENDED
    await world.run(1)
    assert host.sandboxes == {}
    page = await world.services.sessions.list(WHO)
    assert page.sessions == []
    ended = await world.services.sessions.list(WHO, state=SessionState.ENDED)
    assert [each.id for each in ended.sessions] == [id]


@pytest.mark.parametrize("state", ["pending", "starting", "running", "restoring"])
async def test_delete_works_from_every_state(world: World, state: str) -> None:
    """No session is stuck in a state with its quota held."""
    if state == "pending":
        id = await world.create(wait_s=0)
    else:
        host = await world.host(cold=state == "starting")
        id = await world.create(wait_s=0)
        if state == "restoring":
            host.cold = True
            await world.finish(world.services.sessions.replace(WHO, id, SessionReplace(wait_s=0)))
            await world.services.context.background.idle()
    assert (await world.services.sessions.get(WHO, id)).state.value == state
    session = await world.finish(world.services.sessions.delete(WHO, id, wait_s=10))
    assert session.state is SessionState.ENDED
    await world.run(1)
    assert await held(world) == {}
    assert all(not host.live() for host in world.agents.hosts.values())


async def test_a_refusal_goes_to_the_next_host(world: World) -> None:
    """The agent has the last word: another host is tried."""
    await world.host(full=True)
    second = await world.host()
    world.services.context.fleet.stale()
    for _ in range(4):
        id = await world.create()
        assert (await world.services.sessions.get(WHO, id)).host == second.id


async def test_a_cold_start_is_starting_until_its_host_says_otherwise(world: World) -> None:
    """A start that takes long is recorded with its phase, and runs when the heartbeat says so."""
    host = await world.host(cold=True)
    id = await world.create(wait_s=0)
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.STARTING
    assert session.ready_at is None
    host.change(id, phase=Phase.FETCHING_IMAGE)
    await world.beat()
    assert (await world.services.sessions.get(WHO, id)).phase is Phase.FETCHING_IMAGE
    host.run_all()
    await world.beat()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.RUNNING
    assert session.ready_at is not None
    assert session.phase is None


async def test_a_report_that_was_overtaken_by_the_start_changes_nothing(world: World) -> None:
    """A heartbeat may say `starting` after the start's own answer said `running`: it is late, not a move back."""
    host = await world.host()
    id = await world.create()
    late = host.heartbeat(world.clock.now())
    sandboxes = [status.model_copy(update={"state": "starting"}) for status in late.sandboxes]
    await world.services.hosts.heartbeat(host.id, late.model_copy(update={"sandboxes": sandboxes}))
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING
    await world.beat()
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING


async def test_a_failed_start_is_tried_again_and_then_fails(world: World) -> None:
    """Starts are tried a few times, each in its own epoch; then the session ends with the cause."""
    host = await world.host(cold=True)
    id = await world.create(wait_s=0)
    detail = ShoalError(ErrorCode.IMAGE_PULL_FAILED, "no such layer").body().error
    for attempt in range(1, 4):
        assert (await world.services.sessions.get(WHO, id)).epoch == attempt
        host.change(id, state="failed", error=detail)
        await world.beat()
        await world.services.pump.drain()
    session = await world.services.sessions.get(WHO, id)
    assert session.end is not None
    assert session.end.reason is EndReason.FAILED
    assert "no such layer" in (session.end.detail or "")
    await world.run(1)
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.ENDED
    assert await held(world) == {}


@pytest.mark.parametrize("reason", [EndReason.TTL, EndReason.IDLE, EndReason.OOM])
async def test_a_host_ends_a_session_by_itself(world: World, reason: EndReason) -> None:
    """What the agent ends is ended with its cause, and forgotten on the host afterwards."""
    host = await world.host()
    id = await world.create()
    host.change(id, state="ended", end_reason=reason, journal_flushed=True, last_seq=7)
    await world.beat()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.ENDED
    assert session.end is not None
    assert session.end.reason is reason
    assert session.last_seq == 7
    assert await world.services.sessions.journals(WHO, id) == (1,)
    assert host.sandboxes == {}
    assert await held(world) == {}


async def test_count_makes_them_all_or_none(world: World) -> None:
    """The quota of a group is taken once; over it, none is made."""
    await world.host()
    made = await world.finish(
        world.services.sessions.create_many(WHO, SessionCreate(image=IMAGE, count=5, name="g", run="r"))
    )
    names = [item.session.name for item in made.sessions if item.session]
    assert names == ["g/0", "g/1", "g/2", "g/3", "g/4"]
    assert (await held(world))["sessions"] == 5
    again = await world.finish(
        world.services.sessions.create_many(WHO, SessionCreate(image=IMAGE, count=5, name="g", run="r"))
    )
    assert [item.session.id for item in again.sessions if item.session] == [
        item.session.id for item in made.sessions if item.session
    ]
    assert (await held(world))["sessions"] == 5
    assert await everything(world.services.context.store, keys.groups()) == []


async def test_two_hundred_at_once(world: World) -> None:
    """A large group is written in chunks, each of at most 100 operations; all are there, by their key."""
    body = SessionCreate(image=IMAGE, count=200, wait_s=0, run="r")
    first = await world.finish(world.services.sessions.create_many(WHO, body, idempotency_key="k"))
    second = await world.finish(world.services.sessions.create_many(WHO, body, idempotency_key="k"))
    ids = [item.session.id for item in first.sessions if item.session]
    assert len(set(ids)) == 200
    assert [item.session.id for item in second.sessions if item.session] == ids
    assert (await held(world))["sessions"] == 200
    deleted = await world.finish(world.services.sessions.delete_many(WHO, SessionsDelete(run="r")))
    assert len(deleted.ids) == 200
    assert await held(world) == {}


async def test_a_batch_tells_each_items_error(world: World) -> None:
    """Sessions that are not alike: what is wrong with one is that one's error."""
    await world.host()
    body = SessionBatch(items=[SessionCreate(image=IMAGE), SessionCreate(image="nope:1")], wait_s=1)
    made = await world.finish(world.services.sessions.create_batch(WHO, body))
    assert made.sessions[0].session is not None
    assert made.sessions[1].error is not None
    assert made.sessions[1].error.code == ErrorCode.IMAGE_NOT_FOUND
    assert (await held(world))["sessions"] == 1


async def test_another_replica_finishes_a_group(world: World) -> None:
    """A maker that dies after the quota was taken leaves a note; the reconciler makes the rest."""
    body = SessionCreate(image=IMAGE, count=60, wait_s=0)
    store = world.store
    reads = len(store.calls)  # type: ignore[attr-defined]
    task = world.services.sessions.create_many(WHO, body, idempotency_key="k")
    # The note and the quota are written, then the first chunk's answer never comes and the process is gone.
    original = store.transact

    async def dies(ops, *, token=None):  # type: ignore[no-untyped-def]
        if sum(op.key.pk.startswith("SES#") for op in ops) > 1:
            raise RuntimeError("the process died")
        await original(ops, token=token)

    store.transact = dies  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await world.finish(task)
    store.transact = original  # type: ignore[method-assign]
    assert reads
    assert (await held(world))["sessions"] == 60
    other = world.replica("two")
    await other.signer.refresh()
    await world.clock.advance(60)
    await other.reconciler.tick()
    lists = keys.partitions(keys.live_list(DEFAULT_TENANT), keys.LIST_SHARDS)
    assert len(await everything(world.services.context.store, lists)) == 60
    assert (await held(world))["sessions"] == 60


async def test_lists_filter_and_page(world: World) -> None:
    """Lists go by age with a cursor, filtered by run, state, name and labels; every read sees the caller's writes."""
    await world.host()
    ids = [await world.create(run="r", labels={"n": str(n % 2)}, name=f"s{n}") for n in range(6)]
    first = await world.services.sessions.list(WHO, run="r", limit=4)
    assert [each.id for each in first.sessions] == ids[:4]
    second = await world.services.sessions.list(WHO, run="r", limit=4, cursor=first.cursor)
    assert [each.id for each in second.sessions] == ids[4:]
    assert second.cursor is None
    odd = await world.services.sessions.list(WHO, labels={"n": "1"})
    assert [each.id for each in odd.sessions] == ids[1::2]
    named = await world.services.sessions.list(WHO, run="r", name="s3")
    assert [each.id for each in named.sessions] == [ids[3]]
    running = await world.services.sessions.list(WHO, state=SessionState.RUNNING)
    assert len(running.sessions) == 6
    await world.services.sessions.delete(WHO, ids[0])
    assert ids[0] not in [each.id for each in (await world.services.sessions.list(WHO)).sessions]
    with pytest.raises(ShoalError):
        await world.services.sessions.list(WHO, cursor="!!!")


async def test_nothing_of_another_tenant_is_visible(world: World) -> None:
    """Another tenant's session is not found, whatever is asked of it."""
    from dataclasses import replace

    await world.host()
    id = await world.create()
    other = replace(WHO, tenant="ten_other")  # type: ignore[arg-type]
    sessions = world.services.sessions
    for call in (
        sessions.get(other, id),
        sessions.delete(other, id),
        sessions.events(other, id),
        sessions.locate(other, id),
        sessions.patch(other, id, SessionPatch(ttl_s=5)),
        sessions.replace(other, id, SessionReplace()),
    ):
        with pytest.raises(ShoalError) as raised:
            await call
        assert raised.value.code is ErrorCode.NOT_FOUND
    assert (await sessions.list(other)).sessions == []
    assert (await sessions.delete_many(other, SessionsDelete(ids=[id]))).ids == []


async def test_patch_reaches_the_sandbox(world: World) -> None:
    """A changed time to live and labels are written down and told to the host."""
    host = await world.host()
    id = await world.create()
    session = await world.services.sessions.patch(WHO, id, SessionPatch(ttl_s=60, labels={"k": "v"}))
    assert (session.expires_at - world.clock.now()).total_seconds() == 60
    assert session.labels == {"k": "v"}
    assert host.patches[-1].expires_at == session.expires_at
    assert host.patches[-1].idle_timeout_s is None
    assert "idle_timeout_s" not in host.patches[-1].model_fields_set


async def test_replace_goes_on_in_the_next_epoch(world: World) -> None:
    """The broken sandbox is thrown away; steps after the restored moment are lost until acknowledged."""
    host = await world.host()
    id = await world.create()
    host.change(id, last_seq=5)
    session = await world.finish(world.services.sessions.replace(WHO, id, SessionReplace()))
    assert session.state is SessionState.RUNNING
    assert session.epoch == 2
    assert session.restored is not None
    assert session.restored.seq == 0
    assert not session.restored.acknowledged
    start = host.starts[id]
    assert start.epoch == 2
    assert start.first_seq == 6
    assert start.rewound
    assert start.history == [1]
    with pytest.raises(ShoalError) as raised:
        await world.services.sessions.acknowledge(WHO, id, SessionAck(epoch=1))
    assert raised.value.code is ErrorCode.EPOCH_MISMATCH
    acknowledged = await world.services.sessions.acknowledge(WHO, id, SessionAck(epoch=2))
    assert acknowledged.restored is not None
    assert acknowledged.restored.acknowledged
    assert host.patches[-1].acknowledged
    await world.run(1)
    assert [status.epoch for status in host.live()] == [2]


async def test_replace_from_the_last_snapshot(world: World) -> None:
    """A session goes back to its snapshot's seq; without one it cannot."""
    host = await world.host()
    id = await world.create()
    with pytest.raises(ShoalError) as raised:
        await world.services.sessions.replace(
            WHO, id, SessionReplace.model_validate({"from": "last_snapshot"})
        )
    assert raised.value.code is ErrorCode.CONFLICT
    host.change(id, last_seq=3)
    snapshot = await take(world, id)
    host.change(id, last_seq=9)
    body = SessionReplace.model_validate({"from": "last_snapshot"})
    session = await world.finish(world.services.sessions.replace(WHO, id, body))
    assert session.restored is not None
    assert session.restored.from_ == snapshot
    assert session.restored.seq == 3
    assert host.starts[id].source.snapshot == snapshot
    assert host.starts[id].restored_seq == 3
    assert host.starts[id].first_seq == 10


async def take(world: World, id: str) -> str:
    """Take a snapshot whose layer reaches the blob store."""
    from provisioner.blobs import names

    body = SnapshotCreate(id="s1", wait_s=0)
    snapshot = await world.services.snapshots.create(WHO, id, body)  # type: ignore[arg-type]
    digest = "sha256:" + snapshot.id.encode().hex().ljust(64, "0")[:64]
    world.blobs.objects[names.layer(digest)] = b"0123456789"
    got = await world.finish(world.services.snapshots.get(WHO, snapshot.id, wait_s=5))
    assert got.state is SnapshotState.AVAILABLE, got
    return snapshot.id


async def test_a_snapshot_is_idempotent_and_forks(world: World) -> None:
    """The same id answers the same snapshot; any number of sessions start from it."""
    host = await world.host()
    id = await world.create()
    host.change(id, last_seq=2)
    snapshot = await take(world, id)
    again = await world.services.snapshots.create(WHO, id, SnapshotCreate(id="s1", wait_s=0))
    assert again.id == snapshot
    assert again.state is SnapshotState.AVAILABLE
    assert again.seq == 2
    assert again.layers == 2
    assert (await world.services.sessions.get(WHO, id)).last_snapshot == snapshot
    body = SessionCreate(snapshot=snapshot, count=3)  # type: ignore[arg-type]
    forks = await world.finish(world.services.sessions.create_many(WHO, body))
    assert all(item.session and item.session.state is SessionState.RUNNING for item in forks.sessions)
    page = await world.services.snapshots.list(WHO, session=id)
    assert [each.id for each in page.snapshots] == [snapshot]
    await world.services.snapshots.delete(WHO, snapshot)  # type: ignore[arg-type]
    assert (await world.services.snapshots.list(WHO)).snapshots == []


async def test_a_snapshot_whose_layer_did_not_arrive_fails(world: World) -> None:
    """Available only once durable: a layer that is not in the blob store fails the snapshot, and says so."""
    await world.host()
    id = await world.create()
    snapshot = await world.finish(world.services.snapshots.create(WHO, id, SnapshotCreate(wait_s=5)))
    assert snapshot.state is SnapshotState.FAILED
    with pytest.raises(ShoalError) as refused:
        await world.services.sessions.create(WHO, SessionCreate(snapshot=snapshot.id, wait_s=0))
    assert refused.value.next is Next.FIX, "it can never be started from: no use to try again"
    assert snapshot.error is not None
    assert (await world.services.sessions.get(WHO, id)).last_snapshot is None
    assert await everything(world.services.context.store, keys.snapshots_open()) == []


@pytest.mark.parametrize("policy", ["fail", "restore"])
async def test_a_lost_host(world: World, policy: str) -> None:
    """A lost host's sessions end with `host_lost`, or go on elsewhere, rewound and never silently blank."""
    host = await world.host()
    id = await world.create(on_host_loss=policy)
    host.change(id, last_seq=4)
    await world.run(12)
    host.reachable = False
    await world.run(45, beats=False)
    await world.tick()
    await world.services.context.background.idle()
    session = await world.services.sessions.get(WHO, id)
    if policy == "fail":
        assert session.state is SessionState.ENDED
        assert session.end is not None
        assert session.end.reason is EndReason.HOST_LOST
        assert await held(world) == {}
        return
    await world.tick()
    await world.services.pump.drain()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.RUNNING
    assert session.epoch == 2
    assert session.restored is not None
    assert not session.restored.acknowledged
    other = world.agents.hosts[session.host]  # type: ignore[index]
    assert other is not host
    assert other.starts[id].first_seq > 4
    assert other.starts[id].rewound


async def test_events_tell_the_story(world: World) -> None:
    """Events say when it was made, where it was placed and how it ended, oldest first, with a cursor."""
    await world.host()
    id = await world.create()
    await world.finish(world.services.sessions.delete(WHO, id, wait_s=5))
    page = await world.services.sessions.events(WHO, id)
    kinds = [event.kind for event in page.events]
    assert kinds == ["session.created", "session.placed", "session.ended"]
    first = await world.services.sessions.events(WHO, id, limit=2)
    rest = await world.services.sessions.events(WHO, id, limit=2, cursor=first.cursor)
    assert [*first.events, *rest.events] == page.events


async def test_events_say_why_a_session_waited_and_how_long(world: World) -> None:
    """A session without room tells so, once for each time it is sent back, and its placing how long it took."""
    id = await world.create(wait_s=0)
    await world.run(5)
    await world.tick()
    await world.services.pump.drain()
    events = (await world.services.sessions.events(WHO, id)).events
    assert [event.kind for event in events] == ["session.created", "session.waiting", "session.placed"]
    assert "default" in events[1].message
    assert events[2].data["waited_s"] == pytest.approx((events[2].at - events[0].at).total_seconds())
    assert events[2].at > events[1].at


async def test_waiting_long_is_said_once(world: World) -> None:
    """However often a session is looked at in vain, its events tell that it waits once, and keep their beginning."""
    id = await world.create(wait_s=0)
    for _ in range(20):
        await world.services.pump.drain()
        await world.run(1)
    kinds = [event.kind for event in (await world.services.sessions.events(WHO, id)).events]
    assert kinds.count("session.waiting") == 1
    assert kinds[0] == "session.created"


async def test_waiting_in_the_queue_ends_with_the_ttl(world: World) -> None:
    """A session whose time ends in the queue is ended by the reconciler."""
    id = await world.create(wait_s=0, ttl_s=5)
    await world.run(6)
    await world.tick()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.ENDED
    assert session.end is not None
    assert session.end.reason is EndReason.TTL


async def test_no_queue_means_no_capacity(world: World) -> None:
    """Who does not want to wait is told so, and nothing is held."""
    with pytest.raises(ShoalError) as raised:
        await world.create(queue=False)
    assert raised.value.code is ErrorCode.NO_CAPACITY
    assert await held(world) == {}


async def test_quota_bounds_a_tenant(world: World) -> None:
    """A tenant never holds more than its quota; what is deleted can be used again at once."""
    from dataclasses import replace

    from provisioner.model import Tenant, dump, load
    from provisioner.store.port import Put

    stored = await world.store.get(keys.tenant(DEFAULT_TENANT))
    assert stored is not None
    tenant = replace(load(Tenant, stored.item), max_sessions=2)
    await world.store.transact([Put(key=keys.tenant(DEFAULT_TENANT), item=dump(tenant))])
    await world.host()
    first = await world.create()
    await world.create()
    with pytest.raises(ShoalError) as raised:
        await world.create()
    assert raised.value.code is ErrorCode.QUOTA_EXCEEDED
    await world.services.sessions.delete(WHO, first)
    await world.create()


async def test_an_unconfirmed_sandbox_is_adopted_when_its_placer_died(world: World) -> None:
    """A replica that dies between the agent's answer and its own note loses nothing: the heartbeat confirms."""
    host = await world.host()
    original = world.store.transact

    async def dies(ops, *, token=None):  # type: ignore[no-untyped-def]
        if any(op.key.pk.startswith("ON#") for op in ops):
            raise RuntimeError("the process died")
        await original(ops, token=token)

    world.store.transact = dies  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await world.finish(world.services.sessions.create(WHO, SessionCreate(image=IMAGE)), beats=False)
    world.store.transact = original  # type: ignore[method-assign]
    (status,) = host.live()
    session = await world.services.sessions.get(WHO, status.session)
    assert session.state is SessionState.PENDING
    await world.run(40)
    session = await world.services.sessions.get(WHO, status.session)
    assert session.state is SessionState.RUNNING
    assert session.host == host.id
    assert await world.store.get(keys.queued("default", session.created_at, session.id)) is None


async def test_a_rewind_is_told_also_when_no_record_shows_a_step(world: World) -> None:
    """Steps made since the last heartbeat die with their host unseen: seq is not used again, the loss is told."""
    host = await world.host()
    id = await world.create(on_host_loss="restore")
    other = await world.host()
    victim = host if (await world.services.sessions.get(WHO, id)).host == host.id else other
    victim.reachable = False
    world.capacity.kill(f"i-{victim.id}", "killed: secrets of other tenants")
    await world.tick()
    await world.services.pump.drain()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.RUNNING
    assert session.restored is not None
    assert not session.restored.acknowledged
    start = next(each for each in world.agents.hosts.values() if each.id == session.host).starts[id]
    assert start.rewound
    assert start.first_seq > 1000
    assert "secrets" not in str(await world.services.sessions.events(WHO, id))


async def test_a_heartbeat_built_before_the_start_was_answered_changes_nothing(world: World) -> None:
    """A report that still says `starting` of a session that runs is old news, and no error."""
    host = await world.host()
    id = await world.create()
    host.change(id, state="starting", phase=Phase.STARTING_SANDBOX)
    reply = await world.services.hosts.heartbeat(host.id, host.heartbeat(world.clock.now()))
    assert reply.release == []
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING


@pytest.mark.parametrize("how", ["failed", "host lost"])
async def test_a_replaced_sandbox_whose_start_fails_is_started_again(world: World, how: str) -> None:
    """A replace goes on through failed starts and lost hosts, from the source it was asked to."""
    host = await world.host(cold=True)
    id = await world.create(wait_s=0)
    session = await world.finish(world.services.sessions.replace(WHO, id, SessionReplace(wait_s=0)))
    await world.run(1)
    assert session.state is SessionState.RESTORING
    if how == "failed":
        host.change(id, state="failed")
        await world.beat()
    else:
        host.reachable = False
        world.capacity.kill(f"i-{host.id}")
        await world.tick()
        await world.tick()
    await world.services.pump.drain()
    for each in world.agents.hosts.values():
        each.run_all()
    await world.beat()
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.RUNNING
    assert session.epoch == 3


async def test_a_tombstone_stays_seven_days(world: World) -> None:
    """An ended session is readable with its cause for a week, then it and its entries are cleaned away."""
    await world.host()
    id = await world.create(run="r", name="n", key="k")
    await world.finish(world.services.sessions.delete(WHO, id, wait_s=5))
    await world.clock.advance(7 * 86_400 - 60)
    await world.services.reconciler.tick()
    assert (await world.services.sessions.get(WHO, id)).end is not None
    assert await world.create(run="r", name="n", key="k") == id
    await world.clock.advance(400)
    await world.services.reconciler.tick()
    with pytest.raises(ShoalError) as raised:
        await world.services.sessions.get(WHO, id)
    assert raised.value.code is ErrorCode.NOT_FOUND
    assert (await world.services.sessions.list(WHO, state=SessionState.ENDED)).sessions == []


UNSERVED = [{"durability": "remote"}, {"snapshot_every": 60}, {"idle_pause_s": 60}]


@pytest.mark.parametrize("asked", UNSERVED, ids=lambda asked: next(iter(asked)))
async def test_what_is_not_served_is_refused(world: World, asked: dict[str, object]) -> None:
    """What the contract has and this version does not do is never behind a success, by whatever way it is asked."""
    sessions = world.services.sessions
    for body in (SessionCreate(image=IMAGE, **asked), SessionCreate(image=IMAGE, run="r", **asked)):
        with pytest.raises(ShoalError) as raised:
            await sessions.create(WHO, body)
        assert raised.value.code is ErrorCode.NOT_IMPLEMENTED
    batch = await sessions.create_batch(WHO, SessionBatch(items=[body], wait_s=0))
    assert [item.error and item.error.code for item in batch.sessions] == [ErrorCode.NOT_IMPLEMENTED]
    assert (await sessions.list(WHO)).sessions == []
    if "idle_pause_s" in asked:
        await world.host()
        id = await world.create()
        with pytest.raises(ShoalError) as raised:
            await sessions.patch(WHO, id, SessionPatch(idle_pause_s=60))
        assert raised.value.code is ErrorCode.NOT_IMPLEMENTED
        assert (await sessions.get(WHO, id)).idle_pause_s is None
