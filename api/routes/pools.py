"""Pools: what capacity there is, and capacity made ready before a run starts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from api.state import BEARER, KNOWN_QUERY, IdempotencyKey, Reader, Use, Writer
from shoal.contract.base import MAX_WAIT_S
from shoal.contract.pools import Pool, PoolPage, Prepare, Prepared, PreparedPage

router = APIRouter(prefix="/v1/pools", tags=["pools"], dependencies=[BEARER, KNOWN_QUERY])

PoolName = Annotated[str, Path(description="The pool's name.")]
PrepareId = Annotated[str, Path(description="The prepare's id.")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for it to be ready.")]


@router.get("", response_model=PoolPage, summary="List pools")
async def list_pools(who: Reader, use: Use) -> PoolPage:
    """By name: hosts, ready and busy sandboxes, who waits, and why no host is being added."""
    return await use.pools.list(who)


@router.get("/{pool}", response_model=Pool, summary="Read a pool")
async def get_pool(who: Reader, use: Use, pool: PoolName) -> Pool:
    """As it is now."""
    return await use.pools.get(who, pool)


@router.post(
    "/{pool}/prepare",
    response_model=Prepared,
    status_code=201,
    responses={202: {"model": Prepared, "description": "It is being made ready: `waiting_for` tells."}},
    summary="Have sandboxes made ready",
)
async def prepare_pool(
    who: Writer,
    use: Use,
    pool: PoolName,
    body: Prepare,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Prepared:
    """Capacity before a run starts; kept for `ttl_s` when nobody claims it."""
    prepared = await use.pools.prepare(who, pool, body, idempotency_key=idempotency_key)
    response.status_code = 201 if prepared.done else 202
    return prepared


@router.get("/{pool}/prepare", response_model=PreparedPage, summary="List a pool's prepares")
async def list_prepares(who: Reader, use: Use, pool: PoolName) -> PreparedPage:
    """Those that have not expired."""
    return await use.pools.prepares(who, pool)


@router.get(
    "/{pool}/prepare/{id}",
    response_model=Prepared,
    responses={202: {"model": Prepared, "description": "It is not ready yet."}},
    summary="How far a prepare is",
)
async def get_prepare(
    who: Reader, use: Use, pool: PoolName, id: PrepareId, response: Response, wait_s: Wait = 0.0
) -> Prepared:
    """`wait_s` waits for it to be done."""
    found = await use.pools.prepared(who, pool, id, wait_s=wait_s)
    response.status_code = 200 if found.done else 202
    return found


@router.delete("/{pool}/prepare/{id}", status_code=204, summary="Release a prepare")
async def release_prepare(who: Writer, use: Use, pool: PoolName, id: PrepareId) -> None:
    """What it holds ready may go. Repeatable."""
    await use.pools.release(who, pool, id)
