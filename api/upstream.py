"""Requests to hosts' agents: connections that are kept, failures that are typed, and a stale route followed once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import aiohttp
from pydantic import ValidationError
from yarl import URL

from api.metrics import Metrics
from api.routing import Route, Routes
from api.settings import ApiSettings
from provisioner.auth import Principal
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorBody, ErrorCode, ShoalError

_MAX_ERROR_BYTES = 1_048_576
#: Codes of an agent that may mean that our route is old.
_STALE = frozenset(
    (
        ErrorCode.TOKEN_REFUSED,
        ErrorCode.NOT_FOUND,
        ErrorCode.EPOCH_MISMATCH,
        ErrorCode.SANDBOX_LOST,
        ErrorCode.SESSION_ENDED,
        ErrorCode.HOST_FENCED,
    )
)

#: What may go wrong in the middle of reading an agent's answer.
BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError)


class Unreachable(Exception):
    """The agent did not answer. `never_sent`: it cannot have seen the request."""

    def __init__(self, reason: str, *, never_sent: bool) -> None:
        super().__init__(reason)
        self.never_sent = never_sent


Failure = ShoalError | Unreachable
#: Sends a request by a route. None: it was answered. A failure that another route may mend is returned, others raise.
Attempt = Callable[[Route], Awaitable[Failure | None]]


class Upstream:
    """The connections to the agents; an async context manager."""

    def __init__(self, *, routes: Routes, metrics: Metrics, settings: ApiSettings) -> None:
        self.routes = routes
        self._metrics = metrics
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=20.0),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._settings.connect_timeout_s,
                sock_read=self._settings.agent_silence_s,
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=262_144,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def send(
        self,
        route: Route,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        data: bytes | AsyncIterator[bytes] | None,
    ) -> aiohttp.ClientResponse:
        """Send one request; the answer's head has come when this returns.

        Args:
            target: Path and query, encoded as they are to be sent.

        Raises:
            Unreachable: There was no answer.
        """
        assert self._http is not None, "Upstream is used as a context manager"
        try:
            return await self._http.request(
                method,
                URL(route.address + target, encoded=True),
                headers={"authorization": route.authorization, **headers},
                data=data,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._metrics.relayed("unreachable")
            raise Unreachable(type(error).__name__, never_sent=True) from error
        except BROKEN as error:
            self._metrics.relayed("unreachable")
            raise Unreachable(type(error).__name__, never_sent=False) from error

    async def follow(
        self,
        caller: Principal,
        session: SessionId,
        attempt: Attempt,
        *,
        wait_s: Callable[[], float],
        may_repeat: Callable[[Failure], bool],
    ) -> None:
        """Make an attempt by the session's route, and where that route was old, or broke, one more by a fresh one.

        Args:
            wait_s: How long a session that does not run yet is waited for; asked only when it must be known.
            may_repeat: Whether sending it again after a failure can do no harm.

        Raises:
            Ended: The session has ended.
            ShoalError: NOT_FOUND, SESSION_NOT_READY, HOST_UNREACHABLE, or what the agent refused with.
        """
        route = self.routes.known(caller, session)
        if route is None:
            route = await self.routes.find(caller, session, wait_s=wait_s())
        failure = await attempt(route)
        if failure is None:
            return
        self.routes.forget(session)
        repeat = may_repeat(failure)
        fresh = await self.routes.find(caller, session, wait_s=wait_s() if repeat else 0.0)
        if repeat and (not fresh.same_place(route) or _worth_repeating(failure)):
            self._metrics.relayed("retried")
            failure = await attempt(fresh)
            if failure is None:
                return
            self.routes.forget(session)
        raise told(failure, session)

    def count(self, outcome: str) -> None:
        """Count an answer."""
        self._metrics.relayed(outcome)


def is_stale(error: ShoalError) -> bool:
    """Whether an agent's refusal may mean that the route is old."""
    return error.code in _STALE


def harmless(failure: Failure, *, repeatable: bool) -> bool:
    """Whether a request may be sent again: it was refused or never seen, or repeating it does no harm."""
    return repeatable or isinstance(failure, ShoalError) or failure.never_sent


def _worth_repeating(failure: Failure) -> bool:
    """Whether the same place may answer otherwise: with a new token, or over a new connection."""
    if isinstance(failure, Unreachable):
        return not failure.never_sent
    return failure.code is ErrorCode.TOKEN_REFUSED


def told(failure: Failure, session: SessionId) -> ShoalError:
    """A failure as the caller is told it."""
    if isinstance(failure, ShoalError):
        return failure
    return ShoalError(
        ErrorCode.HOST_UNREACHABLE,
        f"the host of session {session} does not answer; repeat the request under the same id",
        retry_after_s=1.0,
        details={"sent": not failure.never_sent},
    )


def broken_off(error: BaseException) -> ShoalError:
    """An answer that ended in the middle."""
    return ShoalError(
        ErrorCode.HOST_UNREACHABLE,
        "the host broke off its answer; repeat the request under the same id",
        retry_after_s=1.0,
        details={"reason": type(error).__name__, "sent": True},
    )


async def error_of(response: aiohttp.ClientResponse) -> ShoalError:
    """The error an agent answers; one that is not an ErrorBody is ours."""
    try:
        content = bytearray()
        while len(content) < _MAX_ERROR_BYTES and not response.content.at_eof():
            content += await response.content.read(_MAX_ERROR_BYTES - len(content))
        return ShoalError.from_detail(ErrorBody.model_validate_json(bytes(content)).error)
    except ValidationError:
        return ShoalError(
            ErrorCode.UNAVAILABLE,
            "the session's host answered with something that is not of this service",
            retry_after_s=1.0,
            details={"status": response.status},
        )
    except BROKEN as error:
        return broken_off(error)
