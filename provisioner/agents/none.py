"""No agents: for a process that may not reach hosts (the reconciler outside the network of the hosts).

What it would tell a host is told by others: the records say what is wanted, and heartbeats are answered by them.
"""

from __future__ import annotations

from typing import NoReturn

from provisioner.agents.port import HostRef
from shoal.contract.base import SessionId, SnapshotId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxPatch, SandboxStart, SandboxStatus, SnapshotTake, SnapshotTaken
from shoal.contract.states import EndReason


class NoAgents:
    """The `AgentClient` port, answering that no host was reached, without trying."""

    async def start(self, host: HostRef, start: SandboxStart) -> SandboxStatus:
        """As the port says."""
        _refuse(host)

    async def status(self, host: HostRef, session: SessionId, *, wait_s: float = 0.0) -> SandboxStatus:
        """As the port says."""
        _refuse(host)

    async def patch(self, host: HostRef, session: SessionId, patch: SandboxPatch) -> SandboxStatus:
        """As the port says."""
        _refuse(host)

    async def end(
        self, host: HostRef, session: SessionId, *, epoch: int, reason: EndReason, wait_s: float = 0.0
    ) -> SandboxStatus:
        """As the port says."""
        _refuse(host)

    async def take_snapshot(self, host: HostRef, session: SessionId, take: SnapshotTake) -> SnapshotTaken:
        """As the port says."""
        _refuse(host)

    async def snapshot_status(
        self, host: HostRef, session: SessionId, snapshot: SnapshotId, *, wait_s: float = 0.0
    ) -> SnapshotTaken:
        """As the port says."""
        _refuse(host)

    async def close(self) -> None:
        """As the port says."""


def _refuse(host: HostRef) -> NoReturn:
    details = {"host": host.id, "sent": False, "cause": "NoAgents"}
    raise ShoalError(ErrorCode.HOST_UNREACHABLE, f"Host {host.id} is not reached from here.", details=details)
