"""The relay: passes requests of a session to the agent of its host, as bytes.

Bodies are not parsed, answers are not kept: what goes through costs one hop. What it adds is the route (found,
cached, renewed once when the agent says it is stale) and typed errors where the way is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import aiohttp
import structlog
from pydantic import ValidationError
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send
from yarl import URL

from api import calls
from api.auth import Gate
from api.bodies import Body, ClientGone, receive_body
from api.calls import Call, Kind
from api.front import send_error
from api.metrics import Metrics
from api.routing import Caller, Ended, Location, Route, Routes
from api.settings import ApiSettings
from shoal.contract.actions import ActionRecord
from shoal.contract.base import MAX_WAIT_S, SessionId
from shoal.contract.errors import ErrorBody, ErrorCode, ShoalError

log = structlog.get_logger("api.relay")

#: Answers up to this size are passed on in one piece.
_SMALL_BYTES = 262_144
_MAX_ERROR_BYTES = 1_048_576
_NO_BODY = frozenset(("GET", "HEAD", "DELETE"))
#: Headers that belong to one hop, or that we set ourselves.
_NOT_SENT = frozenset(
    (
        b"host", b"authorization", b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"content-length",
        b"accept-encoding", b"cookie", b"x-request-id", b"user-agent",
    )
)  # fmt: skip
_NOT_ANSWERED = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"server", b"date")
)
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


class Archive(Protocol):
    """Journals of sessions that have no sandbox any more."""

    async def action(self, location: Location, action: str) -> ActionRecord:
        """The record of one action.

        Raises:
            ShoalError: NOT_FOUND.
        """

    def trajectory(self, location: Location, after_seq: int) -> AsyncIterator[bytes]:
        """The log as JSON lines, in order."""


class Unreachable(Exception):
    """The agent did not answer. `never_sent`: it cannot have seen the request."""

    def __init__(self, reason: str, *, never_sent: bool) -> None:
        super().__init__(reason)
        self.never_sent = never_sent


class Relay:
    """Relays calls; an async context manager that holds the connections to the agents."""

    def __init__(
        self, *, gate: Gate, routes: Routes, archive: Archive, metrics: Metrics, settings: ApiSettings
    ) -> None:
        self._gate = gate
        self._routes = routes
        self._archive = archive
        self._metrics = metrics
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Relay:
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

    def match(self, scope: Scope) -> Call | None:
        """The relayed call that this request is; None when it is for another part."""
        return calls.match(scope)

    async def serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a relayed call.

        Raises:
            ShoalError: What the caller is told; nothing has been sent then.
        """
        caller = await self._gate.admit(scope["headers"], call.operation.scopes)
        if call.operation.kind is Kind.PORT:
            raise ShoalError(ErrorCode.NOT_IMPLEMENTED, "ports of a sandbox are not proxied yet")
        try:
            body = await self._body(call, scope, receive)
        except ClientGone:
            return
        try:
            await self._carry(call, caller, scope, body, receive, send)
        except Ended as ended:
            await self._from_archive(call, ended, scope, send)

    async def _body(self, call: Call, scope: Scope, receive: Receive) -> Body:
        if scope["method"] in _NO_BODY:
            return Body(held=b"", first=None, receive=receive, length=None)
        is_file = call.operation.kind is Kind.FILE_PUT
        return await receive_body(
            scope,
            receive,
            hold_bytes=self._settings.buffer_body_bytes,
            limit_bytes=None if is_file else self._settings.max_action_bytes,
        )

    async def _carry(
        self, call: Call, caller: Caller, scope: Scope, body: Body, receive: Receive, send: Send
    ) -> None:
        session = SessionId(call.session)
        route = self._routes.known(caller, session)
        if route is None:
            route = await self._routes.find(caller, session, wait_s=_wait_s(call, scope, body))
        failure = await self._attempt(call, scope, route, body, receive, send)
        if failure is None:
            return
        # The route may be old: look it up anew, once. A session that is being restored is waited for.
        self._routes.forget(caller, session)
        if body.gone:
            return
        wait_s = _wait_s(call, scope, body) if _may_repeat(call, body, failure) else 0.0
        fresh = await self._routes.find(caller, session, wait_s=wait_s)
        moved = not fresh.same_place(route)
        if _may_repeat(call, body, failure) and (moved or _worth_repeating(failure)):
            self._metrics.relayed("retried")
            failure = await self._attempt(call, scope, fresh, body, receive, send)
            if failure is None:
                return
            self._routes.forget(caller, session)
        raise _told(failure, session)

    async def _attempt(
        self, call: Call, scope: Scope, route: Route, body: Body, receive: Receive, send: Send
    ) -> ShoalError | Unreachable | None:
        """Send the request once. None: it was answered. An error that may come from an old route, or an agent that
        did not answer, is returned; whatever else went wrong is answered or raised."""
        try:
            response = await self._send(call, scope, route, body)
        except Unreachable as unreachable:
            self._metrics.relayed("unreachable")
            return unreachable
        try:
            if response.status < 400:
                self._metrics.relayed("ok")
                await self._pass_on(response, receive, send)
                return None
            self._metrics.relayed("error")
            error = await _error_of(response)
            if body.held is None:
                response.close()  # the agent may have refused in the middle of the body
        finally:
            response.release()
        if error.code in _STALE:
            return error
        await send_error(error, send)
        return None

    async def _send(self, call: Call, scope: Scope, route: Route, body: Body) -> aiohttp.ClientResponse:
        assert self._http is not None, "the relay is used as a context manager"
        headers = {"authorization": route.authorization}
        for name, value in scope["headers"]:
            if name not in _NOT_SENT:
                headers[name.decode("latin-1")] = value.decode("latin-1")
        method: str = scope["method"]
        data: bytes | AsyncIterator[bytes] | None = None
        if method not in _NO_BODY:
            data = body.data()
            if body.held is None and body.length is not None:
                headers["content-length"] = str(body.length)
        try:
            return await self._http.request(
                method,
                URL(route.address + call.target, encoded=True),
                headers=headers,
                data=data,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(type(error).__name__, never_sent=True) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise Unreachable(type(error).__name__, never_sent=False) from error

    async def _pass_on(self, response: aiohttp.ClientResponse, receive: Receive, send: Send) -> None:
        headers = [pair for pair in response.raw_headers if pair[0].lower() not in _NOT_ANSWERED]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        length = response.content_length
        if length is not None and length <= _SMALL_BYTES:
            try:
                content = await response.read()
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                raise _broken_off(error) from error
            await send(start)
            await send({"type": "http.response.body", "body": content})
            return
        await send(start)
        gone = asyncio.ensure_future(_hung_up(receive))
        # Closing the agent's connection is what ends the loop below, and what tells the agent.
        gone.add_done_callback(lambda _: response.close())
        try:
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            # The head is sent. Not finishing the answer makes the server cut the connection, which is the only way
            # left to say that it is not whole.
            if not gone.done():
                log.warning("relay.cut_short", reason=type(error).__name__)
        finally:
            gone.cancel()

    async def _from_archive(self, call: Call, ended: Ended, scope: Scope, send: Send) -> None:
        if call.operation.kind is Kind.ACTION:
            record = await self._archive.action(ended.location, call.action)
            content = record.model_dump_json().encode()
            await _send_json(content, send)
        elif call.operation.kind is Kind.TRAJECTORY:
            after = QueryParams(scope["query_string"]).get("after_seq", "0")
            if not after.isdigit():
                raise ShoalError(ErrorCode.INVALID_REQUEST, "query.after_seq: not a number")
            lines = self._archive.trajectory(ended.location, int(after))
            await _send_lines(lines, send)
        else:
            raise ended.refusal()


def _wait_s(call: Call, scope: Scope, body: Body) -> float:
    """How long the caller is ready to wait, for a session that does not run yet."""
    if call.operation.kind in (Kind.ACT, Kind.INPUT):
        return body.wait_s()
    asked = QueryParams(scope["query_string"]).get("wait_s")
    try:
        return min(max(float(asked), 0.0), MAX_WAIT_S) if asked is not None else MAX_WAIT_S
    except ValueError:
        return 0.0


def _may_repeat(call: Call, body: Body, failure: ShoalError | Unreachable) -> bool:
    """Whether sending it again can do no harm: the agent refused it or never saw it, or its id makes it run once."""
    if not body.can_be_sent_again:
        return False
    if isinstance(failure, ShoalError) or failure.never_sent or call.operation.repeatable:
        return True
    return call.operation.kind is Kind.ACT and isinstance(body.field("id"), str)


def _worth_repeating(failure: ShoalError | Unreachable) -> bool:
    """Whether the same place may answer otherwise: with a new token, or over a new connection."""
    if isinstance(failure, Unreachable):
        return not failure.never_sent
    return failure.code is ErrorCode.TOKEN_REFUSED


def _told(failure: ShoalError | Unreachable, session: SessionId) -> ShoalError:
    if isinstance(failure, ShoalError):
        return failure
    return ShoalError(
        ErrorCode.HOST_UNREACHABLE,
        f"the host of session {session} does not answer; repeat the request under the same id",
        retry_after_s=1.0,
        details={"sent": not failure.never_sent},
    )


def _broken_off(error: BaseException) -> ShoalError:
    return ShoalError(
        ErrorCode.HOST_UNREACHABLE,
        "the host broke off its answer; repeat the request under the same id",
        retry_after_s=1.0,
        details={"reason": type(error).__name__, "sent": True},
    )


async def _error_of(response: aiohttp.ClientResponse) -> ShoalError:
    """The error an agent answers; one that is not an ErrorBody is ours."""
    try:
        content = await response.content.read(_MAX_ERROR_BYTES)
        while not response.content.at_eof() and len(content) < _MAX_ERROR_BYTES:
            content += await response.content.read(_MAX_ERROR_BYTES - len(content))
        return ShoalError.from_detail(ErrorBody.model_validate_json(content).error)
    except ValidationError:
        return ShoalError(
            ErrorCode.UNAVAILABLE,
            "the session's host answered with something that is not of this service",
            retry_after_s=1.0,
            details={"status": response.status},
        )
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        return _broken_off(error)


async def _hung_up(receive: Receive) -> None:
    """Returns when the caller closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(content: bytes, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _send_lines(lines: AsyncIterator[bytes], send: Send) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"application/x-ndjson")],
        }
    )
    async for line in lines:
        await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
