"""The outermost layer: gives each request an id, counts it, and sends it to the relay or to the routes.

The relayed routes leave here, before FastAPI: they are the hot path, and their bodies are not for us to parse.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import by_function
from api.errors import REQUEST_ID_KEY, error_body, error_headers, from_dependency, internal_error, status_of
from api.metrics import Metrics
from shoal.contract.base import new_id
from shoal.contract.errors import ErrorCode, ShoalError

log = structlog.get_logger("api.front")

#: What callers may name their requests; anything else gets an id of ours.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}\Z")
TEMPLATE_KEY = "shoal.route"


#: What lasts as long as the app is served; and what waits for what is left to do, at most so many seconds.
Lifespan = Callable[[], AbstractAsyncContextManager[None]]
Settle = Callable[[float], Awaitable[None]]


class RelayedRoute(Protocol):
    """What the front needs to know of a relayed route."""

    @property
    def template(self) -> str: ...


class Relaying(Protocol):
    """The relay, as the front uses it."""

    def match(self, scope: Scope) -> Any | None:
        """The relayed call that this request is; None when it is none."""

    async def serve(self, call: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it."""


class Front:
    """The ASGI application that the server runs."""

    def __init__(
        self,
        *,
        app: ASGIApp,
        relay: Relaying,
        metrics: Metrics,
        lifespan: Lifespan | None = None,
        settle: Settle | None = None,
    ) -> None:
        self._app = app
        self._lifespan = lifespan
        self._settle = settle
        self._relay = relay
        self._metrics = metrics
        self._draining = self._leaving = False
        self._open: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The app's lifespan, for whoever serves it without a server."""
        if self._lifespan is None:
            yield
            return
        async with self._lifespan():
            yield

    async def settle(self, within_s: float) -> None:
        """Wait for what answered requests left to do in this process, at most so many seconds."""
        if self._settle is not None:
            await self._settle(within_s)

    def leave(self) -> None:
        """Say that this replica is not ready any more, and serve on while whoever sends callers looks elsewhere."""
        self._leaving = True

    async def idle(self, within_s: float) -> None:
        """Wait until nothing is open, at most so many seconds."""
        if self._open and within_s > 0:
            await asyncio.wait(set(self._open), timeout=within_s)

    def drain(self) -> None:
        """Refuse callers from now on; hosts' agents are still heard, so that they can report what ends."""
        self._draining = True

    def cut(self) -> None:
        """Answer `unavailable` to whoever still waits, instead of leaving them to a closed connection."""
        self._draining = True
        for task in self._open:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [by_function.HEADER] if by_function.has_prefix(scope["path"]) else []
        scope = by_function.without_prefix(scope)
        request_id = _request_id(scope)
        scope[REQUEST_ID_KEY] = request_id
        headers.append((b"x-request-id", request_id.encode()))
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        task = asyncio.current_task()
        assert task is not None, "a server runs each request in a task"
        started = time.perf_counter()
        self._metrics.in_flight.inc()
        self._open.add(task)
        try:
            if self._leaving and scope["path"] == "/readyz":
                raise _stopping()
            if self._draining and scope["path"].startswith("/v1/"):
                raise _stopping()
            call = self._relay.match(scope)
            if call is not None:
                scope[TEMPLATE_KEY] = call.template
                await self._relay.serve(call, scope, receive, noting)
            else:
                await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if not self._draining:
                raise
            task.uncancel()
            if not status:
                await send_error(_stopping(), noting)
        except ShoalError as error:
            if not status:
                await send_error(error, noting)
            else:
                # The answer had begun: leaving it unfinished is what tells the caller.
                log.warning("request.cut_short", request_id=request_id, code=error.code.value)
        except Exception as error:
            log.error(
                "request.failed",
                request_id=request_id,
                method=scope["method"],
                route=template_of(scope),
                exc_info=error,
            )
            if not status:
                await send_error(from_dependency(error) or internal_error(request_id), noting)
        finally:
            self._open.discard(task)
            self._metrics.in_flight.dec()
            self._metrics.observe(template_of(scope), scope["method"], status, time.perf_counter() - started)


def _stopping() -> ShoalError:
    return ShoalError(ErrorCode.UNAVAILABLE, "the service is stopping", retry_after_s=5.0)


def template_of(scope: Scope) -> str:
    """The route's template, such as `/v1/sessions/{id}`; paths that are no route of ours are one, `unmatched`."""
    known = scope.get(TEMPLATE_KEY)
    if known is None:
        known = getattr(scope.get("route"), "path", None)
    return str(known) if known else "unmatched"


async def send_error(error: ShoalError, send: Send) -> None:
    """Answer with an error, at the level of ASGI."""
    body = error_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in error_headers(error).items()),
    ]
    await send({"type": "http.response.start", "status": status_of(error), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.match(value):
            return bytes(value).decode()
    return new_id("req")
