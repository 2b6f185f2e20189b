"""The app as a Lambda function runs it: one request at a time, answered whole, and nothing goes on after the answer.

What differs from a server, and why (quotas read 2026-11):

- The process is frozen once it has answered: each request is a turn (`provisioner.turns`), and the answer is held back
  until what it began is done, within a bound.
- An answer is one JSON document of at most 6 MB, binary bodies in base64: a larger one would reach the caller as a bare
  502. What carries more is told before that (`api.large`); here is the last look, over any route.
- Nothing streams. A stream of server-sent events is answered as a long poll: what is there, at the latest after
  `STREAM_S`; readers go on after the last event they have (`Last-Event-ID`), as after any connection that broke off.
- An HTTP API hands the path on decoded. It is encoded again, so that the relay sees what a server would.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any
from urllib.parse import quote

import structlog
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from api import by_function
from api.app import create_app
from api.errors import from_dependency, internal_error, request_id_of
from api.front import Front, send_error
from api.settings import ApiSettings
from provisioner.services import Services
from provisioner.turns import SETTLE_S
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.route import BY_FUNCTION
from shoal.contract.streams import chunk, output_event, resume_offsets

log = structlog.get_logger("api.function")

#: The largest body of an answer: in base64, with its head, it stays below Lambda's 6 MB (6,291,456 bytes).
ANSWER_BYTES = 4_500_000
#: Seconds after which an HTTP API gives up (30, fixed), less what the way back takes.
ANSWER_S = 28.5
#: Seconds before that at which what is not answered is cut, so that what it began can settle.
CUT_S = 1.0
#: Seconds that a stream is waited for, and those in which what follows its first events is gathered.
STREAM_S = 20.0
GATHER_S = 0.3
_STREAM = re.compile(r"/v1/sessions/[^/]+/actions/.+/stream\Z")
_ACTION = re.compile(r"(/v1/sessions/[^/]+/actions/)(.+?)(/(?:stream|stdin|resize))?\Z")

Opening = Callable[[], AbstractAsyncContextManager[Services]]


class Function:
    """The ASGI application of a function. Services are opened by the first request and stay.

    Args:
        opening: Opens the services.
    """

    def __init__(
        self, opening: Opening, settings: ApiSettings | None = None, *, stream_s: float = STREAM_S
    ) -> None:
        self._opening = opening
        settings = settings or ApiSettings()
        self._limit = settings.answer_limit_bytes or ANSWER_BYTES
        self._settings = settings.model_copy(update={"answer_limit_bytes": self._limit})
        self._stream_s = stream_s
        self._stack = AsyncExitStack()
        self._opened: tuple[Services, Front] | None = None

    async def close(self) -> None:
        """Close what was opened; for tests, since a function is frozen and never closed."""
        self._opened = None
        await self._stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # What happened to idle connections while the process was frozen is seen before one of them is used again.
        await asyncio.sleep(0)
        left = _left(scope)
        scope = {**scope, "raw_path": _raw_path(scope)}
        answer = _Answer(self._limit)
        try:
            services, front = await self._open()
            async with services.turns.turn(left):
                if scope["method"] == "GET" and _STREAM.match(by_function.without_prefix(scope)["path"]):
                    await self._poll_stream(front, scope, receive, answer)
                else:
                    await self._answer(front, scope, receive, answer, left)
                await front.settle(min(left(), SETTLE_S))
            if answer.over:
                raise _too_large(self._limit)
        except ShoalError as error:
            await self._refuse(error, answer)
        except Exception as error:
            log.error("request.failed", exc_info=error)
            await self._refuse(from_dependency(error) or internal_error(request_id_of(scope)), answer)
        await answer.give(send)

    async def _open(self) -> tuple[Services, Front]:
        if self._opened is None:
            async with AsyncExitStack() as stack:
                services = await stack.enter_async_context(self._opening())
                front = create_app(services, self._settings)
                await stack.enter_async_context(front.running())
                self._stack = stack.pop_all()
            self._opened = (services, front)
        return self._opened

    async def _refuse(self, error: ShoalError, answer: _Answer) -> None:
        answer.clear()
        await send_error(error, answer.take)

    async def _answer(
        self, front: Front, scope: Scope, receive: Receive, answer: _Answer, left: Callable[[], float]
    ) -> None:
        """Have it answered, while there is time. An action may wait for its session first and for its own end then: the
        gateway would give up, and the caller be told nothing that it can act on.

        Raises:
            ShoalError: UNAVAILABLE: it takes longer. What was begun goes on; the same request finds it.
        """
        answering = asyncio.create_task(front(scope, receive, answer.take), name="request")
        try:
            await asyncio.wait({answering}, timeout=max(left() - CUT_S, 0.0))
            in_time = answering.done()
        finally:
            answering.cancel()
            (outcome,) = await asyncio.gather(answering, return_exceptions=True)
        if not in_time:
            raise ShoalError(
                ErrorCode.UNAVAILABLE,
                "this takes longer than this entrance can wait; repeat the request under the same id",
                retry_after_s=0.1,
            )
        if isinstance(outcome, BaseException):
            raise outcome

    async def _poll_stream(self, front: Front, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Follow a stream until it has told something, and answer that."""
        following = asyncio.create_task(front(scope, receive, answer.take), name="stream")
        telling = asyncio.create_task(answer.told.wait())
        try:
            await asyncio.wait(
                {following, telling}, timeout=self._stream_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not following.done() and answer.told.is_set():
                await asyncio.wait({following}, timeout=GATHER_S)
        finally:
            telling.cancel()
            cut = not following.done()
            following.cancel()
            outcome, _ = await asyncio.gather(following, telling, return_exceptions=True)
        if cut or answer.over:
            answer.cut(_nothing_yet(scope))
        elif isinstance(outcome, BaseException):
            raise outcome


class _Answer:
    """An answer on its way, held until it may be given.

    Attributes:
        told: Set once there is a whole event of a stream.
        over: Whether it is larger than can be given.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start: Message | None = None
        self._body = bytearray()
        self.told = asyncio.Event()
        self.over = False

    async def take(self, message: Message) -> None:
        """Take a message of the app."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if len(self._body) > self._limit:
            # Whoever sends it stops at this; what is answered instead is told in its place.
            self.over = True
            raise _too_large(self._limit)
        if not self.told.is_set() and b"data:" in self._body and b"\n\n" in self._body:
            self.told.set()

    def clear(self) -> None:
        """Forget all: another answer is given."""
        self.over = False
        self._start = None
        self._body.clear()

    def cut(self, nothing: bytes) -> None:
        """End a stream after its last whole event; with none yet, by `nothing`."""
        if self._start is None:
            headers = [(b"content-type", b"text/event-stream")]
            self._start = {"type": "http.response.start", "status": 200, "headers": headers}
        self.over = False
        end = self._body.rfind(b"\n\n", 0, self._limit)
        del self._body[end + 2 if end >= 0 else 0 :]
        if b"data:" not in self._body:
            self._body[:] = nothing

    async def give(self, send: Send) -> None:
        """Hand it on. An answer that was broken off is none: the caller must not take it for whole."""
        if self._start is None:
            self.clear()
            error = ShoalError(ErrorCode.UNAVAILABLE, "the answer broke off; try again", retry_after_s=1.0)
            await send_error(error, self.take)
        assert self._start is not None
        await send(self._start)
        await send({"type": "http.response.body", "body": bytes(self._body)})


def _too_large(limit: int) -> ShoalError:
    return ShoalError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"the answer is over {limit} bytes, which is all that this entrance carries; ask for a page (limit, cursor), "
        "or use the data plane's entrance",
        details={"limit_bytes": limit, "direction": "answer"},
    )


def _nothing_yet(scope: Scope) -> bytes:
    """An event of no output, where the reader is: a reader that saw none at all would take the service for broken."""
    try:
        stdout, stderr = resume_offsets(
            Headers(scope=scope).get("last-event-id"),
            QueryParams(scope["query_string"]).get("last_event_id"),
        )
    except ShoalError:
        return b""
    return output_event("stdout", stdout, stderr, chunk(b"", stdout, 0))


def _raw_path(scope: Scope) -> bytes:
    """The path as a server would have got it.

    An HTTP API decodes it, an encoded slash too. Ids of actions may have slashes; nothing else that is matched by its
    shape does, so what stands between `actions/` and a known last part is one id. A path that still has something
    encoded is as it came (function URLs, some emulators).
    """
    told: str = scope.get("aws.event", {}).get("rawPath") or scope["path"]
    if "%" in told:
        return told.encode()
    prefix = BY_FUNCTION if by_function.has_prefix(told) else ""
    action = _ACTION.match(told.removeprefix(prefix))
    if action is not None:
        before, id, after = action.groups(default="")
        return (prefix + quote(before) + quote(id, safe="") + after).encode()
    return quote(told, safe="/:@!$&'()*+,;=~").encode()


def _left(scope: Scope) -> Callable[[], float]:
    """How many seconds there are until the gateway gives up: it began to count before this process was asked, by the
    time of a cold start perhaps."""
    about: dict[str, Any] = scope.get("aws.event", {}).get("requestContext", {})
    spent = time.time() - float(about.get("timeEpoch") or 0) / 1000
    began = time.monotonic() - (spent if 0 < spent < ANSWER_S else 0.0)
    return lambda: ANSWER_S - (time.monotonic() - began)
