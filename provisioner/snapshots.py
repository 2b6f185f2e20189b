"""Snapshots: taken by a host, committed here."""

from __future__ import annotations

from provisioner.auth import Principal
from shoal.contract import snapshots as wire
from shoal.contract.base import SessionId, SnapshotId


class Snapshots:
    """What routes call."""

    async def create(self, who: Principal, session: SessionId, body: wire.SnapshotCreate) -> wire.Snapshot:
        """Take a snapshot and wait up to `body.wait_s` for it to be durable."""
        raise NotImplementedError

    async def get(self, who: Principal, id: SnapshotId, *, wait_s: float = 0.0) -> wire.Snapshot:
        """A snapshot; `wait_s` waits while it is being made."""
        raise NotImplementedError

    async def list(
        self,
        who: Principal,
        *,
        session: SessionId | None = None,
        run: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.SnapshotPage:
        """Snapshots, newest first."""
        raise NotImplementedError

    async def delete(self, who: Principal, id: SnapshotId) -> None:
        """Take a snapshot away; repeatable. Sessions that started from it go on."""
        raise NotImplementedError
