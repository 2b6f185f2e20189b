"""Reading sessions and the pieces of transactions that write them: each list entry moves with its session."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from provisioner import keys, quota
from provisioner.auth import Principal
from provisioner.lifecycle import LIVE, SESSION, move
from provisioner.model import Assignment, PoolState, Queued, Session, Source, dump, load, replace
from provisioner.placement import warm_key
from provisioner.store.port import Absent, Delete, Exists, Key, Op, Put, Stored, Update, VersionIs
from provisioner.store.steady import SteadyStore
from shoal.contract.base import HostId, SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.sessions import End, Event
from shoal.contract.states import EndReason, Phase, SessionState

#: How many events are kept of one session before the oldest give way: of the control plane's, and of its hosts'.
EVENT_SLOTS = 500
#: Where the keys of events that hosts reported begin.
HOST_EVENTS = "EV#H"
_EVENTS_LIVE = timedelta(days=30)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A session as read, with the version that its next write must name."""

    session: Session
    version: int


def loaded(stored: Stored) -> Loaded:
    """From the store's item."""
    return Loaded(session=load(Session, stored.item), version=stored.version)


async def read(store: SteadyStore, id: SessionId) -> Loaded | None:
    """A session, or None."""
    stored = await store.get(keys.session(id))
    return loaded(stored) if stored else None


async def read_own(store: SteadyStore, who: Principal, id: SessionId) -> Loaded:
    """A session that this caller may see.

    Raises:
        ShoalError: NOT_FOUND, also for another tenant's.
    """
    found = await read(store, id)
    if found is None or found.session.tenant != who.tenant:
        raise ShoalError(ErrorCode.NOT_FOUND, f"No session {id}.")
    return found


async def not_scaling(store: SteadyStore, pool: str) -> str | None:
    """Why no host is being added to a pool, as the reconciler saw it last; None when nothing keeps it from it."""
    stored = await store.get(keys.pool(pool))
    return load(PoolState, stored.item).not_scaling if stored else None


def disk(session: Session) -> Source:
    """What the session's next (or present) sandbox starts from."""
    return session.restore_from or session.source


def moved(session: Session, state: SessionState, **changes: object) -> Session:
    """The session in another state; staying in one is no move.

    Raises:
        IllegalMove: The table does not have it.
    """
    if session.state is not state:
        move(SESSION, session.state, state)
    return replace(session, state=state, **changes)  # type: ignore[arg-type]


def queue_entry(session: Session) -> Put:
    """The session's place in its pool's queue."""
    entry = Queued(
        session=session.id,
        tenant=session.tenant,
        run=session.run,
        resources=session.resources,
        key=warm_key(disk(session).digest, session.substrate, session.resources.disk_mib),
        created_at=session.created_at,
        expires_at=session.expires_at,
        placer_until=session.placer_until,
    )
    return Put(key=_queued(session), item=dump(entry))


def leave_queue(session: Session) -> Delete:
    """The session waits no more."""
    return Delete(key=_queued(session))


def _queued(session: Session) -> Key:
    return keys.queued(session.pool, session.created_at, session.id, session.queue_shards)


def _live(session: Session) -> Key:
    return keys.live(session.tenant, session.created_at, session.id, session.shards)


def _run_live(session: Session, run: str) -> Key:
    return keys.run_live(session.tenant, run, session.created_at, session.id, session.shards)


def save(session: Session, version: int, *, expires_at: datetime | None = None) -> Put:
    """Write a session that was read with this version."""
    return Put(
        key=keys.session(session.id),
        item=dump(session),
        conditions=(VersionIs(version=version),),
        expires_at=expires_at,
    )


def insertion(session: Session, *, quota: Op | None) -> list[Op]:
    """Everything that a new session is, in one transaction; the session's own Put comes first."""
    entry = {"session": session.id}
    ops: list[Op] = [
        Put(key=keys.session(session.id), item=dump(session), conditions=(Absent(),)),
        Put(key=_live(session), item=entry),
        queue_entry(session),
    ]
    if session.run is not None:
        ops.append(Put(key=_run_live(session, session.run), item=entry))
    if session.name is not None:
        ops.append(
            Put(
                key=keys.name(session.tenant, session.run, session.name),
                item={"session": session.id, "request_hash": session.request_hash},
                conditions=(Absent(),),
            )
        )
    if quota is not None:
        ops.append(quota)
    return ops


def assign(session: Session, host: HostId, now: datetime) -> Put:
    """The session's entry in its host's list."""
    assignment = Assignment(
        session=session.id,
        epoch=session.epoch,
        host=host,
        resources=session.resources,
        key=warm_key(disk(session).digest, session.substrate, session.resources.disk_mib),
        since=now,
    )
    return Put(key=keys.assigned(host, session.id, session.epoch), item=dump(assignment))


def look_again(session: Session, mark: str) -> Update:
    """Have the heartbeats of the session's host compare it with its record soon. `mark`: another one each time."""
    assert session.host is not None
    return Update(
        key=keys.assigned(session.host, session.id, session.epoch),
        set={"look": mark},
        conditions=(Exists(),),
    )


def unassign(host: HostId, session: SessionId, epoch: int) -> Delete:
    """The sandbox is no more on that host."""
    return Delete(key=keys.assigned(host, session, epoch))


def give_back(session: Session) -> Update:
    """Free what one session held of its tenant's quota."""
    return quota.give_back(session.tenant, session.grant, quota.needed([session.resources]))


def ending(
    session: Session, version: int, end: End, now: datetime, keep: timedelta
) -> tuple[Session, list[Op]]:
    """The intent to end a session, and at once its end when it has no sandbox: quota, name and lists are free then."""
    assert session.state in LIVE
    has_sandbox = session.host is not None
    state = SessionState.ENDING if has_sandbox else SessionState.ENDED
    new = moved(
        session,
        state,
        phase=Phase.FLUSHING_JOURNAL if has_sandbox else None,
        end=end,
        ended_at=None if has_sandbox else now,
        holds_quota=False,
        placer=None,
        placer_until=None,
        retiring=None,
    )
    gone = now + keep
    ops: list[Op] = [
        save(new, version, expires_at=None if has_sandbox else gone),
        Delete(key=_live(session)),
        Put(
            key=keys.ended(session.tenant, session.created_at, session.id, session.shards),
            item={"session": session.id},
            expires_at=gone,
        ),
    ]
    if not has_sandbox:
        # Who has a host left the queue with the write that says so.
        ops.append(leave_queue(session))
    if session.run is not None:
        ops.append(Delete(key=_run_live(session, session.run)))
    if session.name is not None:
        ops.append(Delete(key=keys.name(session.tenant, session.run, session.name)))
    if session.retiring is not None:
        # Its host reports it, and is told to release it.
        ops.append(unassign(session.retiring.host, session.id, session.retiring.epoch))
    if session.holds_quota:
        ops.append(give_back(session))
    return new, ops


def end_of(reason: EndReason, detail: str | None = None) -> End:
    """Why a session ends; the detail is kept short."""
    return End(reason=reason, detail=detail[:2000] if detail else None)


def event_op(session: Session, version: int, at: datetime, kind: str, message: str, **data: object) -> Put:
    """An event that is written with the write that follows `version`."""
    return _event_at(session, f"C{version % EVENT_SLOTS:04d}", at, kind, message, data)


def standing_event_op(session: Session, at: datetime, kind: str, message: str, **data: object) -> Put:
    """An event of which an epoch has one: what holds again and again takes the place of what was said before."""
    return _event_at(session, f"S{session.epoch:06d}#{kind}", at, kind, message, data)


def _event_at(
    session: Session, slot: str, at: datetime, kind: str, message: str, data: dict[str, object]
) -> Put:
    event = Event(at=at, kind=kind, message=message, data=data)
    return Put(
        key=keys.event(session.id, slot),
        item=event.model_dump(mode="json"),
        expires_at=at + _EVENTS_LIVE,
    )


def host_event_op(session: SessionId, host: HostId, n: int, event: Event) -> Put:
    """An event that a host reported. Its number is the host's own, over all sessions: only the whole of it, with the
    host, is a place that no other event has; a repeat takes the same."""
    return Put(
        key=keys.event(session, f"H{n:020d}#{host}"),
        item=event.model_dump(mode="json"),
        expires_at=event.at + _EVENTS_LIVE,
    )
