"""The agent port: what the control plane asks of a host's agent (see `shoal.contract.host`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.contract.base import HostId, SessionId, SnapshotId
from shoal.contract.host import SandboxPatch, SandboxStart, SandboxStatus, SnapshotTake, SnapshotTaken
from shoal.contract.states import EndReason


@dataclass(frozen=True, kw_only=True)
class HostRef:
    """A host to dial: its id, for the token, and where it listens, as `http://address:port`."""

    id: HostId
    address: str


class AgentClient(Protocol):
    """Commands to agents. Each may be repeated without harm: a sandbox is named by session and epoch.

    Every method raises `ShoalError`: what the agent answered, or HOST_UNREACHABLE when there was no answer in time;
    its `details.sent` is False when the command certainly did not arrive, else it may have been carried out.
    """

    async def start(self, host: HostRef, start: SandboxStart) -> SandboxStatus:
        """Start a sandbox, or say how it is; waits up to `start.wait_s` for it to run.

        Raises:
            ShoalError: HOST_REFUSED when there is no room: nothing was started.
        """

    async def status(self, host: HostRef, session: SessionId, *, wait_s: float = 0.0) -> SandboxStatus:
        """How a sandbox is; `wait_s` waits for a change.

        Raises:
            ShoalError: NOT_FOUND when the host knows nothing of it.
        """

    async def patch(self, host: HostRef, session: SessionId, patch: SandboxPatch) -> SandboxStatus:
        """Change what can change while it runs."""

    async def end(
        self, host: HostRef, session: SessionId, *, epoch: int, reason: EndReason, wait_s: float = 0.0
    ) -> SandboxStatus:
        """End a sandbox; waits up to `wait_s` until it is gone and its journal is in the blob store.

        Raises:
            ShoalError: NOT_FOUND when the host knows nothing of it.
        """

    async def take_snapshot(self, host: HostRef, session: SessionId, take: SnapshotTake) -> SnapshotTaken:
        """Begin a snapshot; waits up to `take.wait_s` for its upload."""

    async def snapshot_status(
        self, host: HostRef, session: SessionId, snapshot: SnapshotId, *, wait_s: float = 0.0
    ) -> SnapshotTaken:
        """How far a snapshot is.

        Raises:
            ShoalError: NOT_FOUND when the host knows nothing of it.
        """

    async def close(self) -> None:
        """Drop the connections."""
