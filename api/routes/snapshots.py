"""Snapshots: take, read, list, delete. Sessions start from one with `snapshot`."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from api.routes.sessions import Cursor, Limit
from api.state import BEARER, KNOWN_QUERY, IdempotencyKey, Reader, Use, Writer
from shoal.contract.base import MAX_WAIT_S, SessionId, SnapshotId
from shoal.contract.snapshots import Snapshot, SnapshotCreate, SnapshotPage
from shoal.contract.states import SnapshotState

router = APIRouter(prefix="/v1", tags=["snapshots"], dependencies=[BEARER, KNOWN_QUERY])

Id = Annotated[SnapshotId, Path(description="The snapshot's id.")]
SessionPath = Annotated[SessionId, Path(description="The session's id.")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait while it is being made.")]


def _status(snapshot: Snapshot, settled: int) -> int:
    return 202 if snapshot.state is SnapshotState.CREATING else settled


@router.post(
    "/sessions/{id}/snapshots",
    response_model=Snapshot,
    status_code=201,
    responses={202: {"model": Snapshot, "description": "It is being made: `state` tells."}},
    summary="Take a snapshot of a session's disk",
)
async def create_snapshot(
    who: Writer,
    use: Use,
    id: SessionPath,
    body: SnapshotCreate,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Snapshot:
    """Consistent (the sandbox is frozen while its disk is copied) and incremental; `available` only once it is
    durable. The `id` of the body makes it idempotent, as the header does where the body has none."""
    if body.id is None and idempotency_key is not None:
        name = "key-" + hashlib.sha256(idempotency_key.encode()).hexdigest()[:40]
        body = body.model_copy(update={"id": name})
    snapshot = await use.snapshots.create(who, id, body)
    response.status_code = _status(snapshot, 201)
    return snapshot


@router.get("/sessions/{id}/snapshots", response_model=SnapshotPage, summary="List a session's snapshots")
async def list_session_snapshots(
    who: Reader, use: Use, id: SessionPath, cursor: Cursor = None, limit: Limit = 100
) -> SnapshotPage:
    """Newest first."""
    return await use.snapshots.list(who, session=id, cursor=cursor, limit=limit)


@router.get("/snapshots", response_model=SnapshotPage, summary="List snapshots")
async def list_snapshots(
    who: Reader,
    use: Use,
    session: Annotated[SessionId | None, Query(description="Only of this session.")] = None,
    run: Annotated[str | None, Query(description="Only of this run.")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> SnapshotPage:
    """Newest first."""
    return await use.snapshots.list(who, session=session, run=run, cursor=cursor, limit=limit)


@router.get(
    "/snapshots/{id}",
    response_model=Snapshot,
    responses={202: {"model": Snapshot, "description": "It is still being made."}},
    summary="Read a snapshot, or wait for it",
)
async def get_snapshot(who: Reader, use: Use, id: Id, response: Response, wait_s: Wait = 0.0) -> Snapshot:
    """`failed` comes with its error; a failed snapshot leaves nothing behind."""
    snapshot = await use.snapshots.get(who, id, wait_s=wait_s)
    response.status_code = _status(snapshot, 200)
    return snapshot


@router.delete("/snapshots/{id}", status_code=204, summary="Delete a snapshot")
async def delete_snapshot(who: Writer, use: Use, id: Id) -> None:
    """Repeatable. Sessions that started from it go on."""
    await use.snapshots.delete(who, id)
