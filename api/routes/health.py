"""Whether the process lives, whether it can serve, and its metrics. Without a key: they tell nothing of tenants."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from pydantic import BaseModel

from api.state import All, Use
from provisioner import keys
from provisioner.auth import DEFAULT_TENANT
from provisioner.blobs.port import Counted
from provisioner.store.port import Counted as CountedStore
from provisioner.store.port import StoreError
from shoal.contract.errors import ErrorCode, ShoalError

router = APIRouter(tags=["health"])
#: How long the store may take to answer before this replica is not ready.
_STORE_S = 2.0


class Health(BaseModel):
    """That it is well."""

    status: str = "ok"


@router.get("/healthz", response_model=Health, summary="Whether the process lives")
async def healthz() -> Health:
    """Asks nobody."""
    return Health()


@router.get("/readyz", response_model=Health, summary="Whether it can serve")
async def readyz(use: Use) -> Health:
    """Reads from the store; 503 `unavailable` when that does not answer."""
    try:
        async with asyncio.timeout(_STORE_S):
            await use.store.get(keys.tenant(DEFAULT_TENANT))
    except (StoreError, TimeoutError, OSError) as error:
        raise ShoalError(ErrorCode.UNAVAILABLE, "the store does not answer", retry_after_s=1.0) from error
    return Health()


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
async def metrics(parts: All) -> Response:
    """Requests and relaying of this process; sessions, hosts and the queue as the store has them."""
    counts = await parts.services.counts()
    page = parts.metrics
    page.set_level("shoal_sessions", counts.sessions)
    page.set_level("shoal_hosts", counts.hosts)
    page.set_level("shoal_queue_length", counts.queue)
    page.set_level("shoal_queue_age_seconds", counts.queue_age_s)
    page.set_level("shoal_warm_sandboxes", counts.warm)
    if isinstance(parts.services.store, CountedStore):
        page.set_level("shoal_store_counts", parts.services.store.counts)
    if isinstance(parts.services.blobs, Counted):
        page.set_level("shoal_blob_troubles", parts.services.blobs.counts)
    return Response(page.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
