"""Usage: what sandboxes reserved and used."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query

from api.routes.sessions import Cursor, Limit
from api.state import BEARER, KNOWN_QUERY, CostReader, Use
from shoal.contract.base import SessionId
from shoal.contract.errors import invalid
from shoal.contract.usage import UsagePage

router = APIRouter(prefix="/v1", tags=["usage"], dependencies=[BEARER, KNOWN_QUERY])


def _aware(name: str, value: datetime | None) -> datetime | None:
    if value is not None and value.tzinfo is None:
        raise invalid(f"query.{name}", "a time needs an offset, such as 2026-01-31T12:00:00Z")
    return value


@router.get("/usage", response_model=UsagePage, summary="Usage records")
async def list_usage(
    who: CostReader,
    use: Use,
    since: Annotated[
        datetime | None, Query(description="Records that began at or after; None: a day ago.")
    ] = None,
    until: Annotated[datetime | None, Query(description="Records that began before; None: now.")] = None,
    run: Annotated[str | None, Query(description="Only of this run.")] = None,
    session: Annotated[SessionId | None, Query(description="Only of this session.")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> UsagePage:
    """One record a sandbox and interval, oldest first."""
    return await use.usage.query(
        who,
        since=_aware("since", since),
        until=_aware("until", until),
        run=run,
        session=session,
        cursor=cursor,
        limit=limit,
    )
