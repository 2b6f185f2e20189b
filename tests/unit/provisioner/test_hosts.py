"""Hosts: how they register, what heartbeats change, what they may read and write, and how they go."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from provisioner import keys
from provisioner.auth import DEFAULT_TENANT
from provisioner.blobs import names
from provisioner.capacity.port import HostStart
from provisioner.model import Host, load
from provisioner.sessions.records import EVENT_SLOTS
from provisioner.store.fake import FakeStore
from shoal.contract.base import HostId, SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Register, SandboxStatus, SessionEvent
from shoal.contract.sessions import Event, SessionAck, SessionPatch, SessionReplace
from shoal.contract.states import EndReason, HostState, SessionState, Substrate
from shoal.contract.urls import JournalGet, JournalPut, LayerGet, LayerPut, UrlsAsked
from shoal.contract.usage import UsageRecord
from tests.unit.provisioner.world import SHAPE, WHO, World


@pytest.fixture
async def world() -> World:
    return await World().open()


def register(start: HostStart, boot: str = "boot") -> Register:
    return Register(
        join_token=start.join_token,
        boot_id=boot,
        address="http://h",
        capacity=SHAPE,
        substrates=[Substrate.CONTAINER],
        version="1",
    )


async def test_a_join_token_works_once(world: World) -> None:
    """Another boot cannot use a join token again; the same boot may repeat its registration and gets the
    same token, whichever of its tries is carried out last."""
    await world.services.reconciler._executor._start("default", 1)
    start = world.capacity.starts[-1]
    first = await world.services.hosts.register(register(start))
    second = await world.services.hosts.register(register(start))
    assert first.host == second.host == start.host
    assert first.token == second.token
    await world.services.hosts.authenticate(first.host, second.token)
    for body in (
        register(start, "other"),
        register(replace(start, join_token=start.join_token + "x")),
        register(replace(start, join_token="hst_none.secret")),
    ):
        with pytest.raises(ShoalError) as raised:
            await world.services.hosts.register(body)
        assert raised.value.code is ErrorCode.UNAUTHENTICATED
    with pytest.raises(ShoalError):
        await world.services.hosts.authenticate(first.host, start.join_token)
    with pytest.raises(ShoalError):
        await world.services.hosts.authenticate(HostId("hst_x"), second.token)


async def test_secrets_are_kept_hashed(world: World) -> None:
    """Neither join tokens nor host tokens nor API keys stand in the store."""
    await world.host()
    new = await world.services.auth.make_key(DEFAULT_TENANT, "k", ())
    assert isinstance(world.store, FakeStore)
    everything = repr(world.store.dump())
    assert world.capacity.starts[-1].join_token not in everything
    assert next(iter(world.tokens.values())) not in everything
    assert new.secret not in everything


async def test_an_idle_hosts_heartbeat_writes_one_item_at_the_most(world: World) -> None:
    """Heartbeats where nothing changed write at most the host's own item, and not each time."""
    host = await world.host()
    await world.create()
    await world.run(2)
    store = world.store
    assert isinstance(store, FakeStore)
    writes = []
    for _ in range(10):
        await world.clock.advance(1)
        before = len(store.calls)
        await world.beat(host.id)
        writes.append([call for call in store.calls[before:] if call.startswith("transact")])
    assert all(len(each) <= 1 for each in writes)
    assert all(call.count("Put:") == 1 for each in writes for call in each)
    assert sum(len(each) for each in writes) <= 5


async def test_unknown_sandboxes_are_released(world: World) -> None:
    """What no record owns is torn down; what has ended and nobody knows is forgotten."""
    host = await world.host()
    for session, state in (("ses_ghost", "running"), ("ses_dead", "ended")):
        host.sandboxes[(SessionId(session), 1)] = SandboxStatus(
            session=SessionId(session), epoch=1, state=state
        )  # type: ignore[arg-type]
    reply = await world.services.hosts.heartbeat(host.id, host.heartbeat(world.clock.now()))
    assert [each.session for each in reply.release] == ["ses_ghost"]
    assert [each.session for each in reply.forget] == ["ses_dead"]


async def test_a_sandbox_of_an_old_epoch_is_released(world: World) -> None:
    """A host that runs what was placed elsewhere since is told to let go."""
    host = await world.host()
    id = await world.create()
    status = host.sandboxes[(id, 1)]
    other = await world.host()
    other.sandboxes[(id, 1)] = status
    reply = await world.services.hosts.heartbeat(other.id, other.heartbeat(world.clock.now()))
    assert [(each.session, each.epoch) for each in reply.release] == [(id, 1)]
    assert (await world.services.sessions.get(WHO, id)).host == host.id


async def test_a_sandbox_that_vanished_ends_its_session(world: World) -> None:
    """A session whose host does not report it any more is lost, but not before a report could have named it."""
    host = await world.host()
    id = await world.create()
    host.sandboxes.clear()
    await world.run(5)
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING
    await world.run(8)
    session = await world.services.sessions.get(WHO, id)
    assert session.state is SessionState.ENDED
    assert session.end is not None
    assert session.end.reason is EndReason.HOST_LOST


async def test_an_older_heartbeat_is_ignored(world: World) -> None:
    """A report that arrives late changes nothing."""
    host = await world.host()
    early = host.heartbeat(world.clock.now())
    id = await world.create()
    await world.run(12)
    reply = await world.services.hosts.heartbeat(host.id, early)
    assert reply.release == []
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING


async def test_a_restarted_agent_may_count_from_one_again(world: World) -> None:
    """Beats that begin anew, later by the host's own clock, are taken."""
    host = await world.host()
    id = await world.create()
    await world.run(3)
    host.beat = 0
    host.change(id, state="ended", end_reason=EndReason.IDLE, journal_flushed=True)
    await world.clock.advance(1)
    await world.beat()
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.ENDED


async def test_another_boot_cannot_speak_for_a_host(world: World) -> None:
    """A heartbeat of another boot id is refused."""
    host = await world.host()
    host.boot_id = "other"
    with pytest.raises(ShoalError) as raised:
        await world.services.hosts.heartbeat(host.id, host.heartbeat(world.clock.now()))
    assert raised.value.code is ErrorCode.UNAUTHENTICATED


async def test_a_lost_host_that_comes_back_must_end_all(world: World) -> None:
    """Its sessions are elsewhere by now: the reply is to shut down."""
    host = await world.host()
    await world.create()
    await world.run(45, beats=False)
    await world.services.reconciler.tick()
    reply = await world.services.hosts.heartbeat(host.id, host.heartbeat(world.clock.now()))
    assert reply.shutdown
    assert reply.drain


async def test_usage_and_events_are_stored_once(world: World) -> None:
    """Repeated records and events change nothing; what was stored is acknowledged."""
    host = await world.host()
    id = await world.create()
    await world.beat()
    now = world.clock.now()
    record = UsageRecord(
        tenant=DEFAULT_TENANT, session=id, epoch=1, host=host.id, pool="default", substrate=Substrate.CONTAINER,
        condition="running", start=now, end=now + timedelta(seconds=60), reserved_cpu_s=60, used_cpu_s=1,
        reserved_memory_mib_s=60, used_memory_mib_s=30, disk_mib_s=60,
    )  # fmt: skip
    event = SessionEvent(n=3, session=id, event=Event(at=now, kind="limit.oom", message="out of memory"))
    foreign = SessionEvent(n=4, session=SessionId("ses_other"), event=event.event)
    for _ in range(3):
        body = host.heartbeat(now).model_copy(update={"usage": [record], "events": [event, foreign]})
        reply = await world.services.hosts.heartbeat(host.id, body)
        assert reply.acked_usage == 1
        assert reply.acked_event == 4
    page = await world.services.usage.query(
        WHO, since=now - timedelta(days=1), until=now + timedelta(hours=1)
    )
    assert page.records == [record]
    events = (await world.services.sessions.events(WHO, id)).events
    assert [each.kind for each in events].count("limit.oom") == 1
    assert (await world.store.query("SES#ses_other")).items == ()


async def test_usage_is_paged_and_filtered(world: World) -> None:
    """Records come by time over days, by pages, by run and session."""
    host = await world.host()
    start = world.clock.now()
    records = [
        UsageRecord(
            tenant=DEFAULT_TENANT, run="a" if n % 2 else "b", session=SessionId(f"ses_{n}"), epoch=1, host=host.id,
            pool="default", substrate=Substrate.CONTAINER, condition="running", start=start + timedelta(hours=n * 9),
            end=start + timedelta(hours=n * 9, seconds=60), reserved_cpu_s=1, used_cpu_s=1, reserved_memory_mib_s=1,
            used_memory_mib_s=1, disk_mib_s=1,
        )
        for n in range(7)
    ]  # fmt: skip
    await world.services.usage.store(host.id, records)
    until = start + timedelta(days=10)
    found: list[UsageRecord] = []
    cursor: str | None = None
    while True:
        page = await world.services.usage.query(WHO, since=start, until=until, cursor=cursor, limit=2)
        found += page.records
        cursor = page.cursor
        if cursor is None:
            break
    assert found == records
    odd = await world.services.usage.query(WHO, since=start, until=until, run="a")
    assert odd.records == records[1::2]
    one = await world.services.usage.query(WHO, since=start, until=until, session=SessionId("ses_4"))
    assert one.records == [records[4]]
    part = await world.services.usage.query(
        WHO, since=start + timedelta(hours=1), until=start + timedelta(hours=19)
    )
    assert part.records == records[1:3]
    with pytest.raises(ShoalError):
        await world.services.usage.query(WHO, since=start - timedelta(days=100), until=start)


async def test_urls_are_for_what_concerns_the_host(world: World) -> None:
    """A host reads layers of its sessions, writes journals of its own, and nothing of anyone else's."""
    host = await world.host()
    other = await world.host()
    (layer,) = (await world.services.images.get(WHO, "code", "1")).layers
    id = await world.create()
    owner = world.agents.hosts[(await world.services.sessions.get(WHO, id)).host]  # type: ignore[index]
    stranger = other if owner is host else host
    mine = UrlsAsked(
        items=[
            LayerGet(digest=layer.digest),
            JournalPut(session=id, epoch=1),
            JournalGet(session=id, epoch=1),
            LayerPut(digest=layer.digest, size_bytes=layer.size_bytes),
            LayerPut(digest="sha256:" + "0" * 64, size_bytes=5),
        ]
    )
    urls = (await world.services.hosts.urls(owner.id, mine)).urls
    assert [url.exists for url in urls] == [False, False, False, True, False]
    assert names.journal(id, 1) in urls[1].url
    for item in mine.items:
        with pytest.raises(ShoalError) as raised:
            await world.services.hosts.urls(stranger.id, UrlsAsked(items=[item]))
        assert raised.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(ShoalError):
        await world.services.hosts.urls(owner.id, UrlsAsked(items=[JournalPut(session=id, epoch=2)]))


async def test_leaving_ends_or_moves_what_is_left(world: World) -> None:
    """A host that goes leaves no session behind in a running state; leaving is repeatable."""
    host = await world.host()
    id = await world.create()
    await world.services.hosts.leave(host.id)
    await world.services.hosts.leave(host.id)
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.ENDED
    stored = await world.store.get(keys.host(host.id))
    assert stored is not None
    assert load(Host, stored.item).state is HostState.GONE


async def test_the_pool_breathes_from_zero_to_zero(world: World) -> None:
    """No host at rest; demand starts one; idle takes it away, drained and stopped; no record is left."""
    assert (await world.services.pools.get(WHO, "default")).hosts == {}
    id = await world.create(wait_s=0)
    await world.tick()
    await world.services.pump.drain()
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING
    await world.services.sessions.delete(WHO, id)
    for _ in range(330):
        await world.clock.advance(1)
        await world.beat()
        await world.services.reconciler.tick()
        await world.services.context.background.idle()
    assert world.capacity.stopped == ["i-" + world.capacity.starts[0].host]
    (start,) = world.capacity.starts
    assert (await world.store.query(keys.HOSTS)).items == ()
    assert await world.store.get(keys.host(start.host)) is None
    assert await world.store.get(keys.orders(start.host)) is None
    assert len(world.capacity.starts) == 1


async def test_a_host_that_ends_in_good_order_hands_its_sessions_on(world: World) -> None:
    """A session that may be restored goes on elsewhere with its steps known to the last; others end with the cause."""
    host = await world.host()
    ends = await world.create()
    moves = await world.create(on_host_loss="restore")
    for id in (ends, moves):
        host.change(id, state="ended", end_reason=EndReason.HOST_LOST, journal_flushed=True, last_seq=6)
    await world.beat()
    assert host.sandboxes == {}
    await world.services.hosts.leave(host.id)
    assert (await world.services.sessions.get(WHO, ends)).state is SessionState.ENDED
    session = await world.services.sessions.get(WHO, moves)
    assert session.state is SessionState.RESTORING
    assert session.last_seq == 6
    other = await world.host()
    await world.services.pump.drain()
    assert (await world.services.sessions.get(WHO, moves)).state is SessionState.RUNNING
    assert other.starts[moves].first_seq == 7
    assert other.starts[moves].history == [1]
    assert other.starts[moves].rewound


async def test_no_event_of_a_session_takes_the_place_of_another(world: World) -> None:
    """Numbers of a host's events may be any distance apart, and other hosts' numbers may be the same: all are told."""
    first = await world.host()
    id = await world.create(on_host_loss="restore")
    now = world.clock.now()

    def event(n: int, kind: str) -> SessionEvent:
        return SessionEvent(n=n, session=id, event=Event(at=now, kind=kind, message=""))

    numbers = [1, 2, 501, 502, 1001, 100_001, 2**53]
    reported = [event(n, f"first.{n}") for n in numbers]
    body = first.heartbeat(now).model_copy(update={"events": reported})
    assert (await world.services.hosts.heartbeat(first.id, body)).acked_event == 2**53
    first.change(id, state="ended", end_reason=EndReason.HOST_LOST, journal_flushed=True)
    await world.beat()
    await world.services.hosts.leave(first.id)
    second = await world.host()
    await world.services.pump.drain()
    body = second.heartbeat(now).model_copy(update={"events": [event(n, f"second.{n}") for n in numbers]})
    await world.services.hosts.heartbeat(second.id, body)
    kinds = [each.kind for each in (await world.services.sessions.events(WHO, id)).events]
    for n in numbers:
        assert kinds.count(f"first.{n}") == kinds.count(f"second.{n}") == 1


async def test_a_flood_of_events_leaves_the_newest(world: World) -> None:
    """What is kept of a session is bounded, the oldest give way, and other sessions lose nothing."""
    host = await world.host()
    quiet, loud = await world.create(), await world.create()
    start = world.clock.now()

    def event(n: int, session: SessionId) -> SessionEvent:
        at = start + timedelta(seconds=n)
        return SessionEvent(n=n, session=session, event=Event(at=at, kind=f"e.{n}", message=""))

    total = 2 * EVENT_SLOTS
    for first in range(1, total + 1, 100):
        events = [event(n, loud) for n in range(first, first + 100)]
        if first == 1:
            events[0] = event(1, quiet)
        body = host.heartbeat(world.clock.now()).model_copy(update={"events": events})
        await world.services.hosts.heartbeat(host.id, body)
        await world.clock.advance(0.5)
    kept = await world.services.context.store.query_all(keys.session(loud).pk, prefix="EV#H")
    assert EVENT_SLOTS <= len(kept) < EVENT_SLOTS + 100
    kinds = {stored.item["kind"] for stored in kept}
    assert {f"e.{n}" for n in range(total - EVENT_SLOTS + 1, total + 1)} <= kinds
    assert "e.1" in [each.kind for each in (await world.services.sessions.events(WHO, quiet)).events]


@pytest.mark.parametrize(
    "change",
    [
        SessionPatch(ttl_s=60),
        SessionPatch(idle_timeout_s=7),
        SessionPatch(idle_timeout_s=None),
        SessionPatch(labels={"k": "v"}),
        SessionPatch(labels={}),
        SessionPatch(ttl_s=90, idle_timeout_s=9, labels={"a": "b"}),
    ],
)
@pytest.mark.parametrize("after", [False, True])
async def test_a_patch_that_the_host_did_not_hear_reaches_it_later(
    world: World, change: SessionPatch, after: bool
) -> None:
    """Whatever a patch changes: if the host cannot be reached then, its heartbeats bring it, and only as often as
    needed. One whose answer alone was lost is not sent again."""
    host = await world.host()
    id = await world.create(idle_timeout_s=30, labels={"old": "label"})
    await world.run(6)
    world.agents.fail_call(1, after=after)
    with pytest.raises(ShoalError):
        await world.services.sessions.patch(WHO, id, change)
    session = await world.services.sessions.get(WHO, id)
    await world.run(6)
    told = host.starts[id]
    assert told.expires_at == session.expires_at
    assert told.labels == session.labels == ({"old": "label"} if change.labels is None else change.labels)
    assert told.idle_timeout_s == (
        change.idle_timeout_s if "idle_timeout_s" in change.model_fields_set else 30
    )
    patches = len(host.patches)
    assert patches == 1
    await world.run(12)
    assert len(host.patches) == patches


async def test_an_acknowledgement_that_the_host_did_not_hear_reaches_it_later(world: World) -> None:
    """A rewind that the record says is acknowledged does not hold up the sandbox for good."""
    host = await world.host()
    id = await world.create()
    host.change(id, last_seq=5)
    await world.finish(world.services.sessions.replace(WHO, id, SessionReplace()))
    world.agents.fail_call(1)
    with pytest.raises(ShoalError):
        await world.services.sessions.acknowledge(WHO, id, SessionAck(epoch=2))
    assert (id, 2) not in host.acknowledged
    await world.run(6)
    assert (id, 2) in host.acknowledged


async def test_a_host_that_stays_out_of_reach_is_told_again_until_it_hears(world: World) -> None:
    """One repeat that is lost too is not the last."""
    host = await world.host()
    id = await world.create()
    await world.run(6)
    for call in (1, 2, 3):
        world.agents.fail_call(call)
    with pytest.raises(ShoalError):
        await world.services.sessions.patch(WHO, id, SessionPatch(ttl_s=60))
    await world.run(20)
    assert host.starts[id].expires_at == (await world.services.sessions.get(WHO, id)).expires_at
