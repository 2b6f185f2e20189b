"""`POST /v1/actions:wait`: one poll for many steps."""

from __future__ import annotations

from fastapi import APIRouter

from api.state import BEARER, KNOWN_QUERY, All, Reader
from api.waits import wait_for_actions
from shoal.contract.actions import ActionsWait, ActionsWaited

router = APIRouter(prefix="/v1", tags=["actions"], dependencies=[BEARER, KNOWN_QUERY])


@router.post("/actions:wait", response_model=ActionsWaited, summary="Wait for any, or all, of many actions")
async def wait_actions(who: Reader, parts: All, body: ActionsWait) -> ActionsWaited:
    """Answers every id asked for, in the order asked, once `mode` is reached or `wait_s` has passed. Outputs are not
    in it: read the actions that are done."""
    return await wait_for_actions(parts.acting, who, body, fan_out=parts.settings.fan_out)
