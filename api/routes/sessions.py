"""Sessions: create, read, list, change, end, replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from api.state import BEARER, KNOWN_QUERY, LABEL_PREFIX, All, IdempotencyKey, Parts, Reader, Use, Writer
from shoal.contract.base import MAX_WAIT_S, SessionId
from shoal.contract.sessions import (
    Direct,
    EventPage,
    Session,
    SessionAck,
    SessionBatch,
    SessionCreate,
    SessionPage,
    SessionPatch,
    SessionReplace,
    Sessions,
    SessionsDelete,
    SessionsDeleted,
)
from shoal.contract.states import SessionState

router = APIRouter(prefix="/v1", tags=["sessions"], dependencies=[BEARER, KNOWN_QUERY])

Id = Annotated[SessionId, Path(description="The session's id.")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for a change of its state.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Items a page.")]
Cursor = Annotated[str | None, Query(description="Where the page before ended.")]

#: States in which nothing is left to wait for.
_SETTLED = (SessionState.RUNNING, SessionState.PAUSED, SessionState.ENDED)


def _count(parts: Parts, session: Session | None, *, created: bool = True) -> None:
    if session is None:
        outcome = "refused"
    elif not created:
        outcome = "existing"
    elif session.state is SessionState.RUNNING:
        outcome = "warm" if session.warm else "cold"
    else:
        outcome = "ended" if session.state is SessionState.ENDED else "pending"
    parts.metrics.created(outcome)


def _status(sessions: Sequence[Session | None], *, created: bool) -> int:
    if all(session is None or session.state in _SETTLED for session in sessions):
        return 201 if created else 200
    return 202


@router.post(
    "/sessions",
    response_model=Session | Sessions,
    status_code=201,
    responses={
        200: {"model": Session, "description": "It was there already, under this key or name."},
        202: {
            "model": Session | Sessions,
            "description": "It is queued or starting: `state` and `phase` tell.",
        },
    },
    summary="Create a session, or `count` of them",
)
async def create_session(
    who: Writer, parts: All, body: SessionCreate, response: Response, idempotency_key: IdempotencyKey = None
) -> Session | Sessions:
    """Makes a session and waits up to `wait_s` for it to run. With `count` over 1 the answer is `sessions`, each item
    with its own state. A `name` that the run has already answers the session there is."""
    if body.count > 1:
        made = await parts.services.sessions.create_many(who, body, idempotency_key=idempotency_key)
        for item in made.sessions:
            _count(parts, item.session)
        response.status_code = _status([item.session for item in made.sessions], created=True)
        return made
    one = await parts.services.sessions.create(who, body, idempotency_key=idempotency_key)
    _count(parts, one.session, created=one.created)
    response.status_code = _status([one.session], created=one.created)
    return one.session


@router.post(
    "/sessions:batch",
    response_model=Sessions,
    status_code=201,
    responses={202: {"model": Sessions, "description": "Some are queued or starting."}},
    summary="Create sessions that are not alike",
)
async def create_sessions(
    who: Writer, parts: All, body: SessionBatch, response: Response, idempotency_key: IdempotencyKey = None
) -> Sessions:
    """Each item is a create of its own: its answer is a session or an error, in the order asked."""
    made = await parts.services.sessions.create_batch(who, body, idempotency_key=idempotency_key)
    for item in made.sessions:
        _count(parts, item.session)
    response.status_code = _status([item.session for item in made.sessions], created=True)
    return made


@router.post(
    "/sessions:delete", response_model=SessionsDeleted, summary="End a run's sessions, or a list of them"
)
async def delete_sessions(who: Writer, parts: All, body: SessionsDelete) -> SessionsDeleted:
    """Repeatable; ids that are not there are left out of the answer."""
    deleted = await parts.services.sessions.delete_many(who, body)
    for id in deleted.ids:
        parts.routes.forget(id)
    return deleted


@router.get("/sessions", response_model=SessionPage, summary="List sessions")
async def list_sessions(
    who: Reader,
    use: Use,
    request: Request,
    run: Annotated[str | None, Query(description="Only of this run.")] = None,
    name: Annotated[str | None, Query(description="Only of this name.")] = None,
    state: Annotated[SessionState | None, Query(description="Only in this state.")] = None,
    label: Annotated[
        str | None,
        Query(
            alias=LABEL_PREFIX, description="`label.<key>=<value>`, any number of them: only with this label."
        ),
    ] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> SessionPage:
    """Oldest first. Ended sessions are listed only when their state is asked for."""
    labels = {
        key.removeprefix(LABEL_PREFIX): value
        for key, value in request.query_params.items()
        if key.startswith(LABEL_PREFIX) and key != LABEL_PREFIX
    }
    return await use.sessions.list(
        who, run=run, name=name, state=state, labels=labels or None, cursor=cursor, limit=limit
    )


@router.get("/sessions/{id}", response_model=Session, summary="Read a session, or wait for a change of it")
async def get_session(
    who: Reader,
    parts: All,
    id: Id,
    wait_s: Wait = 0.0,
    direct: Annotated[bool, Query(description="Also tell the way straight to its host.")] = False,
) -> Session:
    """An ended session stays readable, with its cause, for 7 days."""
    session = await parts.services.sessions.get(who, id, wait_s=wait_s)
    if direct and session.state is SessionState.RUNNING:
        location = await parts.services.sessions.locate(who, id)
        if location.host is not None and location.address is not None:
            token, _ = parts.services.sessions.token(who, location)
            session = session.model_copy(update={"direct": Direct(url=location.address, token=token)})
    return session


@router.get("/sessions/{id}/events", response_model=EventPage, summary="What happened to a session")
async def list_events(who: Reader, use: Use, id: Id, cursor: Cursor = None, limit: Limit = 100) -> EventPage:
    """Why it waited, where it was placed, restores, limits hit, its end. Oldest first."""
    return await use.sessions.events(who, id, cursor=cursor, limit=limit)


@router.patch("/sessions/{id}", response_model=Session, summary="Change a session")
async def patch_session(who: Writer, use: Use, id: Id, body: SessionPatch) -> Session:
    """Only the fields given change; `ttl_s` counts from now."""
    return await use.sessions.patch(who, id, body)


@router.delete(
    "/sessions/{id}",
    response_model=Session,
    responses={202: {"model": Session, "description": "It is ending."}},
    summary="End a session",
)
async def delete_session(who: Writer, parts: All, id: Id, response: Response, wait_s: Wait = 0.0) -> Session:
    """From any state, repeatable. `wait_s` waits until it has ended."""
    session = await parts.services.sessions.delete(who, id, wait_s=wait_s)
    parts.routes.forget(id)
    response.status_code = 200 if session.state is SessionState.ENDED else 202
    return session


@router.post(
    "/sessions/{id}/replace",
    response_model=Session,
    responses={202: {"model": Session, "description": "It is being replaced."}},
    summary="Throw the sandbox away and go on with a new one",
)
async def replace_session(
    who: Writer, parts: All, id: Id, body: SessionReplace, response: Response
) -> Session:
    """Same session, next epoch, from its image or its last snapshot. Actions are then refused with
    `session_rewound` until the rewind is acknowledged."""
    session = await parts.services.sessions.replace(who, id, body)
    parts.routes.forget(id)
    response.status_code = _status([session], created=False)
    return session


@router.post("/sessions/{id}/ack", response_model=Session, summary="Acknowledge a rewind")
async def acknowledge_rewind(who: Writer, use: Use, id: Id, body: SessionAck) -> Session:
    """The caller has seen `restored`; lost steps may run anew from here on."""
    return await use.sessions.acknowledge(who, id, body)
