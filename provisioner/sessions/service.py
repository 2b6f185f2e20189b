"""The session use cases as one object: what routes call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from provisioner.auth import Principal
from shoal.contract import sessions as wire
from shoal.contract.base import HostId, SessionId, TenantId
from shoal.contract.errors import ErrorDetail
from shoal.contract.states import SessionState


@dataclass(frozen=True, kw_only=True)
class Created:
    """A session, and whether this call made it (False: it was there under the same key or name)."""

    session: wire.Session
    created: bool


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a session is. `host` and `address` are None while it is on no host; `error` tells why its last start
    failed."""

    session: SessionId
    tenant: TenantId
    state: SessionState
    epoch: int
    host: HostId | None = None
    address: str | None = None
    end: wire.End | None = None
    error: ErrorDetail | None = None


class Sessions:
    """What routes call."""

    async def create(
        self,
        who: Principal,
        body: wire.SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> Created:
        """Make one session and wait up to `wait_s` (None: the body's) for it to run; it may come back queued."""
        raise NotImplementedError

    async def create_many(
        self,
        who: Principal,
        body: wire.SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> wire.Sessions:
        """Make `body.count` sessions that are alike, in the order of their index."""
        raise NotImplementedError

    async def create_batch(
        self, who: Principal, body: wire.SessionBatch, *, idempotency_key: str | None = None
    ) -> wire.Sessions:
        """Make sessions that are not alike, in the order asked."""
        raise NotImplementedError

    async def get(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> wire.Session:
        """A session; `wait_s` waits for its state to change."""
        raise NotImplementedError

    async def list(
        self,
        who: Principal,
        *,
        run: str | None = None,
        name: str | None = None,
        state: SessionState | None = None,
        labels: Mapping[str, str] | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.SessionPage:
        """Sessions by age, oldest first; ending and ended ones only when their state is asked for."""
        raise NotImplementedError

    async def events(
        self, who: Principal, id: SessionId, *, cursor: str | None = None, limit: int = 100
    ) -> wire.EventPage:
        """What happened to a session, oldest first."""
        raise NotImplementedError

    async def patch(self, who: Principal, id: SessionId, body: wire.SessionPatch) -> wire.Session:
        """Change what can change."""
        raise NotImplementedError

    async def delete(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> wire.Session:
        """End a session, from any state; repeatable. `wait_s` waits until it has ended."""
        raise NotImplementedError

    async def delete_many(self, who: Principal, body: wire.SessionsDelete) -> wire.SessionsDeleted:
        """End many; ids that are not there are left out of the answer."""
        raise NotImplementedError

    async def replace(self, who: Principal, id: SessionId, body: wire.SessionReplace) -> wire.Session:
        """Throw the sandbox away; the session goes on in the next epoch."""
        raise NotImplementedError

    async def acknowledge(self, who: Principal, id: SessionId, body: wire.SessionAck) -> wire.Session:
        """The caller has seen that the disk was rewound."""
        raise NotImplementedError

    async def locate(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Location:
        """Where a session is; one on its way is waited for."""
        raise NotImplementedError

    def token(self, who: Principal, location: Location) -> tuple[str, float]:
        """A route token for a located session that is on a host, and for how many seconds it is good."""
        raise NotImplementedError

    async def journals(self, who: Principal, id: SessionId) -> tuple[int, ...]:
        """The epochs whose journals are in the blob store, oldest first."""
        raise NotImplementedError
