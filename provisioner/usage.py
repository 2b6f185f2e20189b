"""Usage records: stored once each, told by time."""

from __future__ import annotations

from datetime import datetime

from provisioner.auth import Principal
from shoal.contract import usage as wire
from shoal.contract.base import SessionId


class Usage:
    """What routes call."""

    async def query(
        self,
        who: Principal,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        run: str | None = None,
        session: SessionId | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.UsagePage:
        """Records that began in `since..until` (None: the last day, now), oldest first."""
        raise NotImplementedError
