"""The session use cases as one object: what routes call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from provisioner import keys, spread
from provisioner.auth import Principal
from provisioner.context import Context
from provisioner.lifecycle import LIVE
from provisioner.model import Session
from provisioner.sessions import records
from provisioner.sessions.changing import Changing
from provisioner.sessions.create import Creating, Made, request_hash
from provisioner.sessions.ending import Ending
from provisioner.sessions.groups import Groups
from provisioner.sessions.placing import Placing
from provisioner.sessions.queries import Queries
from provisioner.sessions.records import Loaded
from shoal.contract import sessions as wire
from shoal.contract.base import HostId, SessionId, TenantId
from shoal.contract.errors import ErrorCode, ErrorDetail, ShoalError
from shoal.contract.states import EndReason, SessionState

_ON_ITS_WAY = frozenset({SessionState.PENDING, SessionState.STARTING, SessionState.RESTORING})
_DELETES_AT_ONCE = 64
_PLACES_AT_ONCE = 32
#: Seconds that a create which does not queue waits to learn whether there is room.
_PLACE_S = 25.0

Done = Callable[[Session], bool]


@dataclass(frozen=True, kw_only=True)
class Created:
    """A session, and whether this call made it (False: it was there under the same key or name)."""

    session: wire.Session
    created: bool


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a session is. `host` and `address` are None while it is on no host; `error` tells why its last start
    failed."""

    session: SessionId
    tenant: TenantId
    state: SessionState
    epoch: int
    host: HostId | None = None
    address: str | None = None
    end: wire.End | None = None
    error: ErrorDetail | None = None


class Sessions:
    """What routes call. `ending`, `placing`, `creating`, `groups` and `changing` are its parts, for the reconciler and
    for heartbeats."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.ending = Ending(context)
        self.placing = Placing(context, self.ending)
        self.creating = Creating(context, self.placing)
        self.groups = Groups(context, self.creating)
        self.changing = Changing(context, self.ending, self.placing)
        self._queries = Queries(context)

    async def create(
        self,
        who: Principal,
        body: wire.SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> Created:
        """Make one session and wait up to `wait_s` (None: the body's) for it to run; it may come back queued.

        Raises:
            ShoalError: QUOTA_EXCEEDED, IDEMPOTENCY_CONFLICT, IMAGE_NOT_FOUND and their like: nothing was made.
        """
        wait_s = body.wait_s if wait_s is None else wait_s
        began = self._context.clock.monotonic()
        made = await self.creating.one(who, body, idempotency_key)
        placed = await self._placed([made], wait_s if body.queue else _PLACE_S)
        session = placed.get(made.session.id, made.session)
        if session.state in _ON_ITS_WAY:
            left = wait_s - (self._context.clock.monotonic() - began)
            session = await self._settled(session.id, left) or session
        if made.created and session.error is not None and session.error.code == ErrorCode.NO_CAPACITY:
            raise ShoalError.from_detail(session.error)
        return Created(session=await self._queries.told(session), created=made.created)

    async def create_many(
        self,
        who: Principal,
        body: wire.SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> wire.Sessions:
        """Make `body.count` sessions that are alike, in the order of their index; a name becomes `name/0`, `name/1` ...

        Raises:
            ShoalError: QUOTA_EXCEEDED for all together, IDEMPOTENCY_CONFLICT.
        """
        bodies = [body] * body.count
        wait_s = body.wait_s if wait_s is None else wait_s
        return await self._many(who, bodies, request_hash(body), idempotency_key, wait_s)

    async def create_batch(
        self, who: Principal, body: wire.SessionBatch, *, idempotency_key: str | None = None
    ) -> wire.Sessions:
        """Make sessions that are not alike, in the order asked. Errors as for `create_many`."""
        return await self._many(who, [*body.items], request_hash(body), idempotency_key, body.wait_s)

    async def get(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> wire.Session:
        """A session; `wait_s` waits for its state or phase to change.

        Raises:
            ShoalError: NOT_FOUND.
        """
        first = (await records.read_own(self._context.store, who, id)).session
        if wait_s <= 0 or first.state is SessionState.ENDED:
            return await self._queries.told(first)
        seen = (first.state, first.epoch, first.phase)

        async def read() -> Session:
            return (await records.read_own(self._context.store, who, id)).session

        session = await self._context.waiters.until(
            id, read, lambda now: (now.state, now.epoch, now.phase) != seen, wait_s
        )
        return await self._queries.told(session)

    async def list(
        self,
        who: Principal,
        *,
        run: str | None = None,
        name: str | None = None,
        state: SessionState | None = None,
        labels: Mapping[str, str] | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.SessionPage:
        """Sessions by age, oldest first; ending and ended ones only when their state is asked for.

        Raises:
            ShoalError: INVALID_REQUEST for a limit or cursor that is none.
        """
        return await self._queries.page(
            who, run=run, name=name, state=state, labels=labels or {}, cursor=cursor, limit=limit
        )

    async def events(
        self, who: Principal, id: SessionId, *, cursor: str | None = None, limit: int = 100
    ) -> wire.EventPage:
        """What happened to a session, oldest first.

        Raises:
            ShoalError: NOT_FOUND, INVALID_REQUEST.
        """
        return await self._queries.events(who, id, cursor=cursor, limit=limit)

    async def patch(self, who: Principal, id: SessionId, body: wire.SessionPatch) -> wire.Session:
        """Change what can change; errors as for `Changing.patch`, and the host's own."""
        return self._queries.tell(await self.changing.patch(who, id, body))

    async def delete(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> wire.Session:
        """End a session, from any state; repeatable. `wait_s` waits until it has ended.

        Raises:
            ShoalError: NOT_FOUND.
        """
        found = await records.read_own(self._context.store, who, id)
        session = await self.ending.end(found, EndReason.DELETED)
        if session.state is not SessionState.ENDED and wait_s > 0:
            session = await self._until(id, lambda now: now.state is SessionState.ENDED, wait_s) or session
        return self._queries.tell(session)

    async def delete_many(self, who: Principal, body: wire.SessionsDelete) -> wire.SessionsDeleted:
        """End many; ids that are not there are left out of the answer, as are those of a run that had ended before."""
        ids = [*(body.ids or [])]
        if body.run is not None:
            store, family = self._context.store, keys.run_list(who.tenant, body.run)
            entries = await spread.everything(
                store, keys.partitions(family, await spread.lists_of(store, who.tenant))
            )
            ids = [SessionId(entry.item["session"]) for entry in entries]
        limit = asyncio.Semaphore(_DELETES_AT_ONCE)

        async def one(id: SessionId) -> SessionId | None:
            async with limit:
                found = await records.read(self._context.store, id)
                if found is None or found.session.tenant != who.tenant:
                    return None
                await self.ending.end(found, EndReason.DELETED)
                return id

        done = await asyncio.gather(*(one(id) for id in dict.fromkeys(ids)))
        return wire.SessionsDeleted(ids=[id for id in done if id is not None])

    async def replace(self, who: Principal, id: SessionId, body: wire.SessionReplace) -> wire.Session:
        """Throw the sandbox away; the session goes on in the next epoch. Waits up to `body.wait_s` for it to run.

        Raises:
            ShoalError: NOT_FOUND, SESSION_ENDED; CONFLICT without an available snapshot.
        """
        session = await self.changing.replace(who, id, from_snapshot=body.from_ == "last_snapshot")
        settled = await self._settled(session.id, body.wait_s)
        return self._queries.tell(settled or session)

    async def acknowledge(self, who: Principal, id: SessionId, body: wire.SessionAck) -> wire.Session:
        """The caller has seen that the disk was rewound; errors as for `Changing.acknowledge`."""
        return self._queries.tell(await self.changing.acknowledge(who, id, body))

    async def locate(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Location:
        """Where a session is; one on its way is waited for.

        Raises:
            ShoalError: NOT_FOUND.
        """
        found = await records.read_own(self._context.store, who, id)
        session = found.session
        if session.state in _ON_ITS_WAY and wait_s > 0:
            session = await self._settled(id, wait_s) or session
        on_host = session.host is not None and session.state in LIVE
        return Location(
            session=session.id,
            tenant=session.tenant,
            state=session.state,
            epoch=session.epoch,
            host=session.host if on_host else None,
            address=session.address if on_host else None,
            end=session.end,
            error=session.error,
        )

    def token(self, who: Principal, location: Location) -> tuple[str, float]:
        """A route token for a located session that is on a host, and for how many seconds it is good."""
        assert location.host is not None
        assert location.address is not None
        return self._context.signer.session_for(
            who, location.host, location.address, location.session, location.epoch
        )

    async def journals(self, who: Principal, id: SessionId) -> tuple[int, ...]:
        """The epochs whose journals are in the blob store, oldest first.

        Raises:
            ShoalError: NOT_FOUND.
        """
        return tuple(sorted((await records.read_own(self._context.store, who, id)).session.journals))

    async def _many(
        self,
        who: Principal,
        bodies: Sequence[wire.SessionCreate],
        hashed: str,
        key: str | None,
        wait_s: float,
    ) -> wire.Sessions:
        began = self._context.clock.monotonic()
        outcomes = await self.groups.make(who, [*bodies], hashed, key)
        made = [outcome for outcome in outcomes if isinstance(outcome, Made)]
        await self._placed(made, wait_s)
        left = wait_s - (self._context.clock.monotonic() - began)
        settled = await asyncio.gather(*(self._settled(each.session.id, left) for each in made))
        sessions = {each.session.id: now or each.session for each, now in zip(made, settled, strict=True)}
        items = [self._item(outcome, sessions) for outcome in outcomes]
        return wire.Sessions(sessions=items)

    def _item(self, outcome: Made | ShoalError, sessions: Mapping[SessionId, Session]) -> wire.SessionItem:
        if isinstance(outcome, ShoalError):
            return wire.SessionItem(error=outcome.body().error)
        return wire.SessionItem(session=self._queries.tell(sessions[outcome.session.id]))

    async def _placed(self, made: Sequence[Made], wait_s: float) -> Mapping[SessionId, Session]:
        """Place what was made, and go on with it when the caller leaves or does not want to wait. Answers the sessions
        as they then are, none when the time was too short."""
        task = self._context.background.start(self._place(made), "place new sessions")
        if wait_s > 0:
            await asyncio.wait({task}, timeout=wait_s)
        return task.result() if task.done() else {}

    async def _place(self, made: Sequence[Made]) -> Mapping[SessionId, Session]:
        mine = [each for each in made if each.created and each.session.placer == self._context.replica]
        if len(mine) < len(made):
            self._context.wake_queue.set()
            self._context.wake_reconciler.set()
        limit = asyncio.Semaphore(_PLACES_AT_ONCE)

        async def one(each: Made) -> Session:
            async with limit:
                return await self.placing.place(Loaded(session=each.session, version=each.version))

        placed = await asyncio.gather(*(one(each) for each in mine))
        return {session.id: session for session in placed}

    async def _settled(self, id: SessionId, wait_s: float) -> Session | None:
        """The session once it is no longer on its way, or when the time is over."""
        return await self._until(id, lambda session: session.state not in _ON_ITS_WAY, wait_s)

    async def _until(self, id: SessionId, done: Done, wait_s: float) -> Session | None:
        async def read() -> Session | None:
            found = await records.read(self._context.store, id)
            return found.session if found else None

        return await self._context.waiters.until(
            id, read, lambda session: session is None or done(session), wait_s
        )
