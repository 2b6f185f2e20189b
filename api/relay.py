"""The relay: passes requests of a session to the agent of its host, as bytes.

Bodies are not parsed, answers are not kept: what goes through costs one hop. What it adds is the route (found,
cached, renewed once when the agent says it is stale) and typed errors where the way is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import aiohttp
import structlog
from pydantic import ValidationError
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from api import calls
from api.auth import Gate
from api.bodies import Body, ClientGone, receive_body
from api.calls import Call, Kind
from api.errors import request_id_of, unknown_query
from api.front import send_error
from api.large import Large
from api.routing import Ended, Route
from api.settings import ApiSettings
from api.upstream import BROKEN, Failure, Unreachable, Upstream, broken_off, error_of, harmless, is_stale
from provisioner.auth import Principal
from provisioner.sessions import Location
from shoal.contract.actions import ActionList, ActionRecord, ActionRequest
from shoal.contract.base import MAX_WAIT_S, SessionId, whole_number
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.streams import replayed_events, resume_offsets

log = structlog.get_logger("api.relay")

#: Answers up to this size are passed on in one piece.
_SMALL_BYTES = 262_144
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


class Archive(Protocol):
    """Journals of sessions that have no sandbox any more."""

    async def action(self, who: Principal, location: Location, action: str) -> ActionRecord:
        """The record of one action.

        Raises:
            ShoalError: NOT_FOUND.
        """

    async def replay(
        self, who: Principal, location: Location, asked: ActionRequest
    ) -> ActionRecord | ActionList | None:
        """What a request that was made before was answered; None when it was not.

        Raises:
            ShoalError: ACTION_CONFLICT, SESSION_NOT_READY.
        """

    def trajectory(self, who: Principal, location: Location, after_seq: int) -> AsyncIterator[bytes]:
        """The log as JSON lines, in order."""


class Relay:
    """Relays calls."""

    def __init__(
        self, *, gate: Gate, upstream: Upstream, archive: Archive, large: Large, settings: ApiSettings
    ) -> None:
        self._gate = gate
        self._large = large
        self._upstream = upstream
        self._archive = archive
        self._settings = settings

    def match(self, scope: Scope) -> Call | None:
        """The relayed call that this request is; None when it is for another part."""
        return calls.match(scope)

    async def serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a relayed call.

        Raises:
            ShoalError: What the caller is told; nothing has been sent then.
        """
        caller = await self._gate.admit(scope["headers"], call.operation.scopes)
        unknown = call.unknown_query()
        if unknown:
            raise unknown_query(unknown)
        if call.operation.kind is Kind.PORT:
            raise ShoalError(ErrorCode.NOT_IMPLEMENTED, "ports of a sandbox are not proxied yet")
        try:
            body = await self._body(call, scope, receive)
        except ClientGone:
            return
        try:
            await self._carry(call, caller, scope, body, receive, send)
        except Ended as ended:
            await self._from_archive(call, caller, ended, scope, body, send)

    async def _body(self, call: Call, scope: Scope, receive: Receive) -> Body:
        if scope["method"] in _NO_BODY:
            return Body(held=b"", first=None, receive=receive, length=None)
        is_file = call.operation.kind is Kind.FILE_PUT
        limits = [None if is_file else self._settings.max_action_bytes, self._large.limit_bytes]
        return await receive_body(
            scope,
            receive,
            hold_bytes=self._settings.buffer_body_bytes,
            limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        )

    async def _carry(
        self, call: Call, caller: Principal, scope: Scope, body: Body, receive: Receive, send: Send
    ) -> None:
        async def attempt(route: Route) -> Failure | None:
            if call.operation.kind is Kind.FILE_GET and call.by_transfer:
                return await self._large.go_on(caller, call, route, send)
            return await self._attempt(call, caller, scope, route, body, receive, send)

        await self._upstream.follow(
            caller,
            SessionId(call.session),
            attempt,
            wait_s=lambda: _wait_s(call, scope, body),
            may_repeat=lambda failure: (
                body.can_be_sent_again
                and harmless(failure, repeatable=call.operation.repeatable or _runs_once(call, body))
            ),
        )

    async def _attempt(
        self,
        call: Call,
        caller: Principal,
        scope: Scope,
        route: Route,
        body: Body,
        receive: Receive,
        send: Send,
    ) -> Failure | None:
        try:
            response = await self._send(scope, call, route, body)
        except Unreachable as unreachable:
            # What broke the way may have been the caller's own doing.
            if body.refusal is not None:
                raise body.refusal from None
            if body.gone:
                return None
            return unreachable
        try:
            if response.status < 400:
                self._upstream.count("ok")
                if self._large.limit_bytes is None or call.operation.kind is Kind.STREAM:
                    await self._pass_on(response, receive, send)
                    return None
                return await self._pass_on_within(call, caller, route, response, send)
            self._upstream.count("error")
            error = await error_of(response)
            if body.held is None:
                response.close()  # the agent may have refused in the middle of the body
        finally:
            response.release()
        if is_stale(error):
            return error
        if error.code is ErrorCode.INTERNAL:
            error.details.setdefault("request_id", request_id_of(scope))
        await send_error(error, send)
        return None

    async def _send(self, scope: Scope, call: Call, route: Route, body: Body) -> aiohttp.ClientResponse:
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name not in _NOT_SENT
        }
        headers["x-request-id"] = request_id_of(scope)
        method: str = scope["method"]
        data: bytes | AsyncIterator[bytes] | None = None
        if method not in _NO_BODY:
            data = body.data()
            if body.held is None and body.length is not None:
                headers["content-length"] = str(body.length)
        return await self._upstream.send(route, method, call.target, headers=headers, data=data)

    async def _pass_on_within(
        self, call: Call, caller: Principal, route: Route, response: aiohttp.ClientResponse, send: Send
    ) -> Failure | None:
        """Pass on what this entrance carries; a file that is larger goes another way."""
        within = await self._large.within(call, response.content.iter_any())
        if within is None or within.more:
            response.close()  # the rest is not wanted
        if within is None:
            if call.operation.kind is Kind.FILE_GET:
                return await self._large.begin(caller, call, route, send)
            raise self._large.refusal(call)
        left_out = _NOT_ANSWERED | {b"content-length"} if within.more else _NOT_ANSWERED
        headers = [pair for pair in response.raw_headers if pair[0].lower() not in left_out]
        headers += within.headers
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": within.content})
        return None

    async def _pass_on(self, response: aiohttp.ClientResponse, receive: Receive, send: Send) -> None:
        headers = [pair for pair in response.raw_headers if pair[0].lower() not in _NOT_ANSWERED]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        length = response.content_length
        if length is not None and length <= _SMALL_BYTES:
            try:
                content = await response.read()
            except BROKEN as error:
                raise broken_off(error) from error
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
        except BROKEN as error:
            # The head is sent. Not finishing the answer makes the server cut the connection, which is the only way
            # left to say that it is not whole.
            if not gone.done():
                log.warning("relay.cut_short", reason=type(error).__name__)
        finally:
            gone.cancel()

    async def _from_archive(
        self, call: Call, caller: Principal, ended: Ended, scope: Scope, body: Body, send: Send
    ) -> None:
        if call.operation.kind is Kind.ACT:
            await self._replay(caller, ended, body, send)
        elif call.operation.kind is Kind.ACTION:
            record = await self._archive.action(caller, ended.location, call.action)
            content = record.model_dump_json().encode()
            await _send_whole(content, "application/json", send)
        elif call.operation.kind is Kind.STREAM:
            # Nothing comes any more: what was kept of the output, from where the reader was, and the end.
            stdout, stderr = resume_offsets(
                Headers(scope=scope).get("last-event-id"),
                QueryParams(scope["query_string"]).get("last_event_id"),
            )
            record = await self._archive.action(caller, ended.location, call.action)
            events = replayed_events(record.model_dump_json().encode(), stdout, stderr)
            await _send_whole(b"".join(events), "text/event-stream", send)
        elif call.operation.kind is Kind.TRAJECTORY:
            after = whole_number(QueryParams(scope["query_string"]).get("after_seq", "0"))
            if after is None:
                raise invalid("query.after_seq", "is not a number")
            lines = self._archive.trajectory(caller, ended.location, after)
            if self._large.limit_bytes is None:
                await _send_lines(lines, send)
                return
            within = await self._large.within(call, lines)
            if within is None:
                raise self._large.refusal(call)
            await _send_whole(within.content, "application/x-ndjson", send, within.headers)
        else:
            raise ended.refusal()

    async def _replay(self, caller: Principal, ended: Ended, body: Body, send: Send) -> None:
        """Answer a step that was made before the session ended, as its host did."""
        try:
            content = await body.whole()
        except ClientGone:
            return
        if content is None:
            # It was streamed to a host that had ended the session. Sent anew, it comes here at once.
            raise ShoalError(
                ErrorCode.SESSION_NOT_READY,
                f"session {ended.location.session} has just ended; repeat the request under the same id",
                retry_after_s=0.1,
            )
        try:
            asked = ActionRequest.model_validate_json(content)
        except ValidationError:
            raise ended.refusal() from None
        told = await self._archive.replay(caller, ended.location, asked)
        if told is None:
            raise ended.refusal()
        await _send_whole(told.model_dump_json().encode(), "application/json", send)


def _wait_s(call: Call, scope: Scope, body: Body) -> float:
    """How long the caller is ready to wait, for a session that does not run yet."""
    if call.operation.kind in (Kind.ACT, Kind.INPUT):
        return body.wait_s()
    asked = QueryParams(scope["query_string"]).get("wait_s")
    try:
        wait_s = float(asked) if asked is not None else MAX_WAIT_S
    except ValueError:
        return 0.0
    return min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0


def _runs_once(call: Call, body: Body) -> bool:
    """Whether the request's own id makes a second one harmless."""
    if call.operation.kind is Kind.FILE_PUT:
        return call.by_transfer
    return call.operation.kind is Kind.ACT and isinstance(body.field("id"), str)


async def _hung_up(receive: Receive) -> None:
    """Returns when the caller closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(
    content: bytes, kind: str, send: Send, more: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode()), *more]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _send_lines(lines: AsyncIterator[bytes], send: Send) -> None:
    # The first before the head: a refusal is then still an error answer.
    line = await anext(lines, None)
    headers = [(b"content-type", b"application/x-ndjson")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while line is not None:
        await send({"type": "http.response.body", "body": line, "more_body": True})
        line = await anext(lines, None)
    await send({"type": "http.response.body", "body": b""})
