"""What hosts' agents ask of the control plane. Authorised by their own tokens; not for trainers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from api.auth import bearer
from api.state import Use, services_of
from shoal.contract.base import HostId
from shoal.contract.host import Heartbeat, HeartbeatReply, Register, Registered
from shoal.contract.urls import Urls, UrlsAsked

router = APIRouter(prefix="/internal/v1", tags=["internal"], include_in_schema=False)


async def _authorised(request: Request, host: HostId) -> HostId:
    token = bearer(request.headers.get("authorization", "").encode("latin-1"))
    await services_of(request).hosts.authenticate(host, token)
    return host


Self = Annotated[HostId, Depends(_authorised)]


@router.post("/hosts:register", response_model=Registered)
async def register(use: Use, body: Register) -> Registered:
    """A host introduces itself; the join token in the body authorises it."""
    return await use.hosts.register(body)


@router.post("/hosts/{host}/heartbeat", response_model=HeartbeatReply)
async def heartbeat(use: Use, host: Self, body: Heartbeat) -> HeartbeatReply:
    """What the host knows, for what it is to do."""
    return await use.hosts.heartbeat(host, body)


@router.post("/hosts/{host}/urls", response_model=Urls)
async def urls(use: Use, host: Self, body: UrlsAsked) -> Urls:
    """Short-lived URLs of objects that concern sessions on this host."""
    return await use.hosts.urls(host, body)


@router.post("/hosts/{host}/leave", status_code=204)
async def leave(use: Use, host: Self) -> None:
    """The host has drained and goes."""
    await use.hosts.leave(host)
