"""`POST /v1/execute`: one stateless call."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.state import BEARER, KNOWN_QUERY, All, IdempotencyKey, Writer
from shoal.contract.execute import Execute, Executed
from shoal.contract.states import ActionStatus

router = APIRouter(prefix="/v1", tags=["execute"], dependencies=[BEARER, KNOWN_QUERY])


@router.post(
    "/execute",
    response_model=Executed,
    responses={202: {"model": Executed, "description": "It has not ended: ask again with the same id."}},
    summary="Run one program in a sandbox of its own",
)
async def execute(
    who: Writer, parts: All, body: Execute, response: Response, idempotency_key: IdempotencyKey = None
) -> Executed:
    """No session to manage: it is served from the ready sandboxes and gone afterwards. The same `id` joins the call
    or reads its result, for 7 days."""
    executed = await parts.executions.execute(who, body, idempotency_key=idempotency_key)
    under_way = executed.status in (ActionStatus.QUEUED, ActionStatus.RUNNING)
    response.status_code = 202 if under_way else 200
    return executed
