"""Tokens, keys, tables of moves, waiting, ids, records: the small parts that others stand on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner import keys
from provisioner.auth import DEFAULT_TENANT, Auth
from provisioner.clock import ManualClock
from provisioner.codec import RecordTooNew, dump, load
from provisioner.lifecycle import DIAGRAMS, SESSION, IllegalMove, diagram, move
from provisioner.model import ApiKey, Tenant
from provisioner.route_tokens import REUSE_S, RouteSigner
from provisioner.store.fake import FakeStore
from provisioner.store.port import Key, Put
from provisioner.waiters import Waiters
from runtime_image.agent.tokens import TokenVerifier
from shoal.contract.base import HostId, SessionId, new_id
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.route import MAX_TOKEN_AGE_S
from shoal.contract.states import Scope, SessionState
from tests.unit.provisioner.world import WHO

HOST, SESSION_ID, ADDRESS = HostId("hst_1"), SessionId("ses_1"), "http://127.0.0.1:1"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> FakeStore:
    return FakeStore(clock=clock.now)


async def signer(store: FakeStore, clock: ManualClock, life_s: float = 1000.0) -> RouteSigner:
    made = RouteSigner(store, clock, key_life_s=life_s)
    await made.refresh()
    return made


async def test_agents_accept_what_is_signed_here(store: FakeStore, clock: ManualClock) -> None:
    """The agent's own verifier takes a token for its host, session and epoch, and no one else's."""
    one = await signer(store, clock)
    token = one.session(WHO, HOST, ADDRESS, SESSION_ID, 3)
    verifier = TokenVerifier(clock)
    verifier.trust(HOST, one.public_keys)
    claims = verifier.verify(f"Bearer {token}")
    assert (claims.sub, claims.epo, claims.ten, claims.key) == (SESSION_ID, 3, WHO.tenant, WHO.key)
    assert claims.exp - claims.iat <= MAX_TOKEN_AGE_S
    assert verifier.verify(f"Bearer {one.control(HOST, ADDRESS)}").kind == "control"
    stranger = TokenVerifier(clock)
    stranger.trust("hst_2", one.public_keys)
    with pytest.raises(ShoalError):
        stranger.verify(f"Bearer {token}")


async def test_tokens_are_reused_for_a_while_only(store: FakeStore, clock: ManualClock) -> None:
    """The same token is handed out for some seconds, per session, host, epoch and key; never one about to expire."""
    one = await signer(store, clock)
    first, good_for = one.session_for(WHO, HOST, ADDRESS, SESSION_ID, 1)
    assert good_for > MAX_TOKEN_AGE_S - REUSE_S
    assert one.session(WHO, HOST, ADDRESS, SESSION_ID, 1) == first
    assert one.session(WHO, HOST, ADDRESS, SESSION_ID, 2) != first
    assert one.session(replace(WHO, key="key_2"), HOST, ADDRESS, SESSION_ID, 1) != first  # type: ignore[arg-type]
    clock.tick(REUSE_S)
    assert one.session(WHO, HOST, ADDRESS, SESSION_ID, 1) != first


async def test_keys_change_without_a_gap(store: FakeStore, clock: ManualClock) -> None:
    """Replicas share their keys; a new one is known to agents before it signs, the old one is accepted after it."""
    one, two = await signer(store, clock), await signer(store, clock)
    assert one.public_keys == two.public_keys
    old = jwt.get_unverified_header(one.control(HOST, ADDRESS))["kid"]
    clock.tick(950)
    await one.refresh()
    assert len(one.public_keys) == 2
    assert jwt.get_unverified_header(one.control(HOST, ADDRESS))["kid"] == old
    clock.tick(MAX_TOKEN_AGE_S + 1)
    await one.refresh()
    await two.refresh()
    new = jwt.get_unverified_header(one.control(HOST, ADDRESS))["kid"]
    assert new != old
    assert jwt.get_unverified_header(two.control(HOST, ADDRESS))["kid"] == new
    assert {key.kid for key in two.public_keys} == {old, new}
    clock.tick(1000)
    await one.refresh()
    assert old not in {key.kid for key in one.public_keys}


async def test_two_replicas_make_one_first_key(store: FakeStore, clock: ManualClock) -> None:
    """Of replicas that start at once one makes the key, the others take it."""
    signers = [RouteSigner(store, clock, key_life_s=1000) for _ in range(8)]
    await asyncio.gather(*(each.refresh() for each in signers))
    assert len({each.public_keys[0].kid for each in signers}) == 1


async def test_the_first_start_makes_one_admin_key(store: FakeStore, clock: ManualClock) -> None:
    """The key is told once, works, and only its hash is kept; a second start makes none."""
    auth = Auth(store, clock)
    made = await asyncio.gather(*(Auth(store, clock).bootstrap() for _ in range(4)))
    (new,) = [each for each in made if each is not None]
    who = await auth.authenticate(new.secret)
    assert who.tenant == DEFAULT_TENANT
    assert who.may(Scope.SESSIONS)
    assert await auth.bootstrap() is None
    assert new.secret not in repr(store.dump())


@pytest.mark.parametrize("how", ["unknown", "expired", "revoked"])
async def test_keys_that_do_not_work_are_told_so(store: FakeStore, clock: ManualClock, how: str) -> None:
    """An unknown, expired or revoked key is unauthenticated; a revoked one after some seconds at the latest."""
    auth = Auth(store, clock)
    new = await auth.make_key(DEFAULT_TENANT, "k", (Scope.READ,))
    secret = new.secret
    assert not (await auth.authenticate(secret)).may(Scope.SESSIONS)
    if how == "unknown":
        secret += "x"
    else:
        changes = {"expires_at": clock.now()} if how == "expired" else {"revoked_at": clock.now()}
        record = replace(new.key, **changes)  # type: ignore[arg-type]
        await store.transact([Put(key=keys.api_key(record.hash), item=dump(record))])
        clock.tick(10)
    with pytest.raises(ShoalError) as raised:
        await auth.authenticate(secret)
    assert raised.value.code is ErrorCode.UNAUTHENTICATED


def test_illegal_moves_raise() -> None:
    """An ended session never moves; a running one does not go back to the queue."""
    for old, new in (
        (SessionState.ENDED, SessionState.RUNNING),
        (SessionState.RUNNING, SessionState.PENDING),
    ):
        with pytest.raises(IllegalMove):
            move(SESSION, old, new)
    assert move(SESSION, SessionState.PENDING, SessionState.STARTING) is SessionState.STARTING


@pytest.mark.parametrize("kind", sorted(DIAGRAMS))
def test_every_state_is_reached_and_can_end(kind: str) -> None:
    """Each table names every state, each is reachable from the first, and from each an end can be reached."""
    table = DIAGRAMS[kind]
    states = set(type(next(iter(table))))
    assert set(table) == states
    reached = {next(iter(table))}
    while more := {new for old in reached for new in table[old]} - reached:
        reached |= more
    assert reached == states
    last = {state for state in states if not table[state] or kind == "image"}
    ends = set(last)
    while more := {old for old in states if table[old] & ends} - ends:
        ends |= more
    assert ends == states
    drawn = diagram(table)
    assert drawn.startswith("stateDiagram-v2\n    [*] --> ")
    assert all(f"{old.value} --> {new.value}" in drawn for old in table for new in table[old])


async def test_waiting_ends_at_once_when_told(clock: ManualClock) -> None:
    """A change told here wakes the waiter at once; one made elsewhere is found by looking; time ends the wait."""
    waiters = Waiters(clock)
    value = 0

    async def read() -> int:
        return value

    task = asyncio.create_task(waiters.until("x", read, lambda now: now > 0, 20))
    await clock.advance(0.1)
    value = 1
    waiters.notify("x")
    await clock.advance(0)
    assert task.done()
    assert task.result() == 1
    task = asyncio.create_task(waiters.until("x", read, lambda now: now > 1, 20))
    await clock.advance(5)
    value = 2
    await clock.advance(0.6)
    assert task.result() == 2
    task = asyncio.create_task(waiters.until("x", read, lambda now: now > 2, 20))
    await clock.advance(20.1)
    assert task.result() == 2
    assert waiters._waiting == {}


@given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_derived_ids_are_the_same_for_the_same(one: list[str], other: list[str]) -> None:
    """A derived id is a function of its parts, and looks like any other id."""
    made = keys.derived_id("ses", *one)
    assert made == keys.derived_id("ses", *one)
    assert len(made) == len(new_id("ses"))
    if "\0".join(one) != "\0".join(other):
        assert made != keys.derived_id("ses", *other)


def test_records_of_a_newer_shape_are_refused(clock: ManualClock) -> None:
    """A record comes back as it was; one of a newer program is not half understood."""
    tenant = Tenant(id=DEFAULT_TENANT, name="t", parent=None, created_at=clock.now())
    item = dump(tenant)
    assert load(Tenant, item) == tenant
    with pytest.raises(RecordTooNew):
        load(ApiKey, {**item, "v": 99})


def test_keys_sort_by_time(clock: ManualClock) -> None:
    """Sort keys of later moments are later, whatever their length would be as plain numbers."""
    moments = [clock.now() + timedelta(microseconds=n * 7) for n in range(5)]
    assert sorted(keys.moment(when) for when in reversed(moments)) == [keys.moment(when) for when in moments]
    assert isinstance(keys.host(HOST), Key)
