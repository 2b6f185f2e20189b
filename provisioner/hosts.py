"""What hosts' agents ask of the control plane: the use cases behind the internal routes."""

from __future__ import annotations

from shoal.contract.base import HostId
from shoal.contract.host import Heartbeat, HeartbeatReply, Register, Registered, Urls, UrlsAsked


class Hosts:
    """What the internal routes call."""

    async def register(self, body: Register) -> Registered:
        """A host introduces itself with its one-time join token; the same boot may repeat it.

        Raises:
            ShoalError: UNAUTHENTICATED for a token that is unknown or used by another boot.
        """
        raise NotImplementedError

    async def authenticate(self, host: HostId, token: str) -> None:
        """Check the token of a host's own requests.

        Raises:
            ShoalError: UNAUTHENTICATED.
        """
        raise NotImplementedError

    async def heartbeat(self, host: HostId, body: Heartbeat) -> HeartbeatReply:
        """Take in what a host knows; answer what it is to do."""
        raise NotImplementedError

    async def urls(self, host: HostId, body: UrlsAsked) -> Urls:
        """Presigned URLs, only for what concerns the sessions on this host."""
        raise NotImplementedError

    async def leave(self, host: HostId) -> None:
        """The host has drained and goes; repeatable."""
        raise NotImplementedError
