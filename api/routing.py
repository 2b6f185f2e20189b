"""From a session's id to where it runs: cached, renewed when an agent refuses, waited for when it does not run yet.

The cache is only a shortcut: a fresh replica, or one that lost its cache, finds the same in the store.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from provisioner.auth import Principal
from provisioner.sessions import Location
from shoal.contract.base import HostId, KeyId, SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.sessions import End
from shoal.contract.states import SessionState

#: Seconds before its expiry at which a token is not used any more.
_TOKEN_MARGIN_S = 5.0


class Locator(Protocol):
    """What routing needs of the provisioner."""

    async def locate(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Location:
        """Where a session is; one that is on its way (pending, starting, restoring) is waited for up to `wait_s`.

        Raises:
            ShoalError: NOT_FOUND when this caller sees no such session.
        """

    def token(self, who: Principal, location: Location) -> tuple[str, float]:
        """A route token for it, and for how many seconds it is good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way to a session's sandbox, ready to use.

    Attributes:
        authorization: The header that the agent accepts.
        until: When to stop using it, on the monotonic clock.
    """

    session: SessionId
    host: HostId
    epoch: int
    address: str
    authorization: str
    until: float

    def same_place(self, other: Route) -> bool:
        """Whether both lead to the same sandbox."""
        return (self.host, self.epoch, self.address) == (other.host, other.epoch, other.address)


class Ended(Exception):
    """The session has ended; what is left of it is its record and its journals."""

    def __init__(self, location: Location) -> None:
        super().__init__(location.session)
        self.location = location

    def refusal(self) -> ShoalError:
        """What an action on it answers."""
        return session_ended(self.location.session, self.location.end)


def session_ended(session: SessionId, end: End | None) -> ShoalError:
    """The refusal of whatever needs a living session."""
    cause = f" ({end.reason.value})" if end is not None else ""
    details = {"end": end.model_dump(mode="json")} if end is not None else {}
    return ShoalError(ErrorCode.SESSION_ENDED, f"session {session} has ended{cause}", details=details)


class Routes:
    """Finds and remembers routes; one per API process."""

    def __init__(
        self,
        locator: Locator,
        *,
        cache_s: float,
        size: int = 50_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._locator = locator
        self._cache_s = cache_s
        self._size = size
        self._clock = clock
        self._known: OrderedDict[SessionId, dict[KeyId, Route]] = OrderedDict()

    def known(self, caller: Principal, session: SessionId) -> Route | None:
        """The remembered route, while it is fresh."""
        routes = self._known.get(session)
        route = routes.get(caller.key) if routes is not None else None
        if route is None or route.until <= self._clock():
            return None
        return route

    def forget(self, session: SessionId) -> None:
        """Do not use what is remembered of a session again: it moved, or ends."""
        self._known.pop(session, None)

    async def find(self, caller: Principal, session: SessionId, *, wait_s: float) -> Route:
        """The route, from memory or from the store.

        Args:
            wait_s: How long to wait for a session that is on its way.

        Raises:
            Ended: The session has ended or is ending.
            ShoalError: NOT_FOUND; SESSION_NOT_READY when it did not run in time.
        """
        route = self.known(caller, session)
        if route is not None:
            return route
        location = await self._locator.locate(caller, session, wait_s=wait_s)
        if location.state in (SessionState.ENDED, SessionState.ENDING):
            raise Ended(location)
        if location.state is not SessionState.RUNNING or location.host is None or location.address is None:
            raise not_ready(location)
        token, good_s = self._locator.token(caller, location)
        route = Route(
            session=session,
            host=location.host,
            epoch=location.epoch,
            address=location.address,
            authorization=f"Bearer {token}",
            until=self._clock() + max(0.0, min(self._cache_s, good_s - _TOKEN_MARGIN_S)),
        )
        self._known.setdefault(session, {})[caller.key] = route
        if len(self._known) > self._size:
            self._known.popitem(last=False)
        return route


def not_ready(location: Location) -> ShoalError:
    """The refusal of what needs a running session; it may run soon."""
    return ShoalError(
        ErrorCode.SESSION_NOT_READY,
        f"session {location.session} is {location.state.value}; ask again, or wait for it with "
        f"GET /v1/sessions/{location.session}?wait_s=25",
        retry_after_s=1.0,
        details={"state": location.state.value, "epoch": location.epoch},
    )
