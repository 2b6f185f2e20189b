"""Making sessions: one transaction takes the quota and writes the session, its list entries and its place in the queue.

The ids of sessions made under an idempotency key are derived from it, so a repeat finds what it made with no record
in between, for as long as the session itself is kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta

from provisioner import keys, quota
from provisioner.auth import Principal
from provisioner.context import Context, log
from provisioner.lifecycle import LIVE
from provisioner.manifests import Resolved, canonical, merge_resources
from provisioner.model import Session, Source, replace
from provisioner.placement import Room
from provisioner.sessions import records
from provisioner.sessions.grants import Grants
from provisioner.sessions.placing import Placing
from provisioner.spread import QueueSpread, list_shards
from provisioner.store.port import ConditionFailed, Throttled
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.sessions import Resources, SessionCreate
from shoal.contract.states import Phase, SessionState

#: How often a name or a shard of the quota that was taken by others meanwhile is looked at anew.
_LOOKS = 3
_ROOMS = 50


@dataclass(frozen=True, kw_only=True)
class Made:
    """A session that a create answers, and whether this call made it."""

    session: Session
    version: int
    created: bool


def request_hash(body: object) -> str:
    """What tells a repeat from another request; how long the caller waits does not count."""
    assert hasattr(body, "model_copy")
    return hashlib.sha256(canonical(body.model_copy(update={"wait_s": 0.0}))).hexdigest()


class Creating:
    """Makes sessions, one or many, and sees to their placing."""

    def __init__(self, context: Context, placing: Placing) -> None:
        self._context = context
        self._placing = placing
        self.grants = Grants(context)
        self._queues = QueueSpread(context.store, context.clock)

    async def one(self, who: Principal, body: SessionCreate, key: str | None) -> Made:
        """Make one session (its quota with it) without placing it.

        Raises:
            ShoalError: QUOTA_EXCEEDED, IDEMPOTENCY_CONFLICT, INVALID_REQUEST, those of `Pins.resolve`.
        """
        hashed = request_hash(body)
        id = self._id(who, key, 0)
        if key is not None:
            known = await self._known(who, id, hashed)
            if known is not None:
                return known
        self.pool(body)
        resolved = await self._context.pins.resolve(who.tenant, body.run, body.image, body.snapshot)
        session = self.record(
            who, body, hashed, id, body.name, resolved.source, self.resources(body, resolved)
        )
        grant = await self.grants.shard(who.tenant, id)
        made = await self.insert(replace(await self.spread(session), grant=grant), takes=True)
        if made.created:
            self._context.demand.note(session.pool, session.source, session.substrate, session.resources)
        return made

    def _id(self, who: Principal, key: str | None, index: int) -> SessionId:
        if key is None:
            return SessionId(self._context.ids("ses"))
        return SessionId(keys.derived_id("ses", who.tenant, key, str(index)))

    def pool(self, body: SessionCreate) -> str:
        """The pool it goes to, if that can serve it.

        Raises:
            ShoalError: INVALID_REQUEST, SUBSTRATE_UNAVAILABLE, NOT_IMPLEMENTED; NO_CAPACITY while execution is off.
        """
        if not self._context.execution_enabled:
            raise execution_off()
        pool = self._context.settings.pool(body.pool)
        if pool is None:
            raise invalid("pool", f"there is no pool {body.pool}")
        if body.substrate not in pool.substrates:
            raise ShoalError(
                ErrorCode.SUBSTRATE_UNAVAILABLE, f"Pool {pool.name} has no {body.substrate.value} hosts."
            )
        unserved = _unserved(body)
        if unserved is not None:
            raise ShoalError(ErrorCode.NOT_IMPLEMENTED, unserved)
        return pool.name

    def resources(self, body: SessionCreate, resolved: Resolved) -> Resources:
        """The limits of its sandbox.

        Raises:
            ShoalError: NO_CAPACITY when no host of the pool is large enough.
        """
        resources = merge_resources(body.resources, resolved.resources)
        pool = self._context.settings.pool(body.pool)
        assert pool is not None
        shape = Room.of(pool.host_capacity)
        if pool.host_capacity is not None and not Room.for_one(resources).fits(shape):
            raise ShoalError(
                ErrorCode.NO_CAPACITY,
                f"No host of pool {pool.name} is large enough for these resources.",
                details={"host": pool.host_capacity.model_dump()},
            )
        return resources

    def record(
        self,
        who: Principal,
        body: SessionCreate,
        hashed: str,
        id: SessionId,
        name: str | None,
        source: Source,
        resources: Resources,
    ) -> Session:
        """The record of a new session; this replica places it, unless others wait in its pool."""
        now = self._context.clock.now()
        pool = self.pool(body)
        lease = {} if pool in self._placing.blocked else self._placing.lease()
        session = Session(
            id=id,
            tenant=who.tenant,
            key_id=who.key,
            request_hash=hashed,
            name=name,
            run=body.run,
            pool=pool,
            substrate=body.substrate,
            state=SessionState.PENDING,
            phase=Phase.PLACING if lease else Phase.QUEUED,
            epoch=1,
            source=source,
            resources=resources,
            env=body.env,
            workdir=body.workdir,
            user=body.user,
            on_start=tuple(body.on_start),
            network=body.network,
            labels=body.labels,
            created_at=now,
            expires_at=now + timedelta(seconds=body.ttl_s),
            # Nothing pauses yet, and a session does not say that it would: `_unserved` refuses who asks for it.
            idle_pause_s=None,
            idle_timeout_s=body.idle_timeout_s,
            on_host_loss=body.on_host_loss,
            durability=body.durability,
            snapshot_every=body.snapshot_every,
            queue=body.queue,
        )
        return replace(session, **lease)  # type: ignore[arg-type]

    async def spread(self, session: Session) -> Session:
        """A new session with its lists' shards."""
        shards = list_shards(await self.grants.shards(session.tenant))
        queue_shards = await self._queues.at_least(session.pool, shards)
        return replace(session, shards=shards, queue_shards=queue_shards)

    async def insert(self, session: Session, *, takes: bool) -> Made:
        """Write one session, or find the one that is there.

        Args:
            takes: Whether its quota is to be taken of its `grant`; False where it has been.

        Raises:
            ShoalError: QUOTA_EXCEEDED, IDEMPOTENCY_CONFLICT, UNAVAILABLE.
        """
        context = self._context
        amounts = quota.needed([session.resources])
        looks = rooms = 0
        cooled = False
        while looks < _LOOKS and rooms < _ROOMS:
            take = quota.take(session.tenant, session.grant, amounts) if takes else None
            ops = records.insertion(session, quota=take)
            try:
                await context.store.transact(ops)
            except ConditionFailed as error:
                failed = ops[error.index]
                if failed is take:
                    rooms += 1
                    grant = await self.grants.room_for(session.tenant, session.id, amounts)
                    session = replace(await self.spread(session), grant=grant)
                    continue
                looks += 1
                if error.current is None:
                    continue
                by_name = failed.key.pk.startswith("NAME#")
                id = SessionId(error.current.item["session"]) if by_name else session.id
                found = await records.read(context.store, id)
                # A name whose session has just ended is free at the next look.
                if found is None or (id != session.id and found.session.state not in LIVE):
                    continue
                if found.session.request_hash != session.request_hash:
                    raise name_conflict(session) if id != session.id else key_conflict() from error
                return Made(session=found.session, version=found.version, created=False)
            except ShoalError as error:
                if cooled or not isinstance(error.__cause__, Throttled):
                    raise
                # Too many writes for the partitions that this tenant has.
                cooled = True
                await self.grants.hot(session.tenant)
                session = await self.spread(session)
            else:
                log.info("session.created", session_id=session.id, tenant=session.tenant, run=session.run)
                return Made(session=session, version=1, created=True)
        raise ShoalError(
            ErrorCode.UNAVAILABLE,
            "The session's name is changing hands, or its quota is; try again.",
            retry_after_s=0.5,
        )

    async def _known(self, who: Principal, id: SessionId, hashed: str) -> Made | None:
        """What an earlier call with the same key made. Looked up first: its image may be gone by now."""
        found = await records.read(self._context.store, id)
        if found is None:
            return None
        if found.session.request_hash != hashed:
            raise key_conflict()
        return Made(session=found.session, version=found.version, created=False)


def _unserved(body: SessionCreate) -> str | None:
    """What the contract has and this version does not do, of what a body asks for; None when it does it all."""
    if body.network.mode == "allowlist":
        return "Network allowlists are not served yet."
    if body.durability == "remote":
        return "The durability `remote` is not served yet."
    if body.snapshot_every is not None:
        return "Automatic snapshots are not served yet: take them with POST .../snapshots."
    if body.idle_pause_s is not None and "idle_pause_s" in body.model_fields_set:
        return "Sessions are not paused yet: leave out `idle_pause_s`, or ask for `idle_timeout_s`."
    return None


def execution_off() -> ShoalError:
    """Spending is frozen: nothing new is taken."""
    return ShoalError(
        ErrorCode.NO_CAPACITY,
        "Execution is switched off here: no session is made and no host is started until an operator sets "
        "`execution_enabled`.",
        retry_after_s=60.0,
        details={"reason": "execution_disabled"},
    )


def key_conflict() -> ShoalError:
    """The key was used with another body."""
    return ShoalError(
        ErrorCode.IDEMPOTENCY_CONFLICT, "This idempotency key was used with another body; use another key."
    )


def name_conflict(session: Session) -> ShoalError:
    """The name belongs to another request's session."""
    return ShoalError(
        ErrorCode.IDEMPOTENCY_CONFLICT,
        f"The run has a session {session.name!r} that was made by another request.",
    )
