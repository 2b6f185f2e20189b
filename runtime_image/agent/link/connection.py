"""The link itself: greeting, requests and their answers, frames of processes, and its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self

from runtime_image.guest import wire

from .errors import LinkClosedError, LinkViolationError, OperationError
from .pipes import pack_map, unpack_map
from .process import GuestProcess
from .records import GuestHello
from .transport import Transport

# What an earlier agent left unread in the socket buffer is a handful of frames.
_STALE_FRAMES = 4096


class Connection:
    """What `GuestLink` speaks through. The guest is not trusted: sizes, types, ids and credit of
    everything it sends are checked, what is kept of it is bounded, and the first frame that breaks
    the protocol closes the link with `LinkViolationError` for everybody who waits.

    Attributes:
        hello: what the guest said of itself.
        closed: set once the link is gone, whatever the reason.
    """

    hello: GuestHello

    def __init__(self, sock: socket.socket) -> None:
        self.closed = asyncio.Event()
        self._error: LinkClosedError | None = None
        self._nonce = os.urandom(16)
        self._greeting: asyncio.Future[GuestHello] | None = asyncio.get_running_loop().create_future()
        self._stale = 0
        self._ids = itertools.count(1)
        self._requests: dict[int, asyncio.Future[dict[str, Any]]] = {}
        # Requests whose caller was cancelled; their answers still come.
        self._abandoned: set[int] = set()
        self._processes: dict[int, GuestProcess] = {}
        self._transport = Transport(sock, on_frame=self._on_frame, on_closed=self._on_gone)

    @classmethod
    async def connect(cls, sock: socket.socket, *, timeout_s: float = 10.0) -> Self:
        """Greet the guest behind `sock` (SOCK_SEQPACKET); the link owns the socket from now on.

        Raises:
            LinkClosedError: no guest, another protocol version, or none answered in time.
        """
        link = cls(sock)
        greeting = link._greeting
        assert greeting is not None
        try:
            hello = {"version": wire.VERSION, "nonce": link._nonce}
            link._transport.send(wire.frame(wire.HELLO, 0, 0, pack_map(hello)))
            async with asyncio.timeout(timeout_s):
                link.hello = await greeting
        except TimeoutError:
            link.close()
            raise LinkClosedError(f"the guest did not answer within {timeout_s} s") from None
        except BaseException:
            link.close()
            raise
        link._greeting = None
        return link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the guest; its processes live on as long as someone holds the socket's end."""
        self._shut(LinkClosedError("the link was closed"))

    def check_open(self) -> None:
        """Raises the error that closed the link, if one did."""
        if self._error is not None:
            raise self._error

    async def send(self, frame: bytes) -> None:
        """Send a frame, after those before it; waits while the socket is full."""
        self.check_open()
        self._transport.send(frame)
        await self._transport.drain()
        self.check_open()

    def send_nowait(self, frame: bytes) -> None:
        """Send or queue a frame of bounded rate (credit)."""
        self._transport.send(frame)

    async def request(self, body: Mapping[str, Any], fds: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Ask the guest; descriptors are passed by name and stay the caller's.

        Raises:
            OperationError: the guest refused.
            LinkClosedError: it is gone.
        """
        return await self.finish_request(*self.begin_request(body, fds or {}))

    def begin_request(
        self, body: Mapping[str, Any], fds: Mapping[str, int]
    ) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        """Send a request; `finish_request` or `abandon_request` must follow."""
        self.check_open()
        packed = pack_map({**body, "fds": list(fds)})
        if len(packed) > wire.REQUEST_LIMIT:
            raise OperationError(7, f"a request of {len(packed)} bytes; {wire.REQUEST_LIMIT} are allowed")
        ident = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # The link may end while nobody waits for this answer any more.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._requests[ident] = future
        self._send_pieces(ident, packed, list(fds.values()))
        return ident, future

    async def finish_request(self, ident: int, future: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """The answer, raising what it says went wrong."""
        try:
            answer = await future
        except asyncio.CancelledError:
            self.abandon_request(ident, cancel=False)
            raise
        number = answer.get("errno")
        if number is not None:
            message, stage = answer.get("message"), answer.get("stage")
            if not (isinstance(number, int) and isinstance(message, str) and isinstance(stage, str)):
                raise self.violation("a failure without its reason")
            failure = OperationError(number, message[:4096])
            failure.stage = stage[:64]
            raise failure
        return answer

    def abandon_request(self, ident: int, *, cancel: bool) -> None:
        """Nobody waits for this answer any more; with `cancel` the guest ends its helper. Repeatable."""
        future = self._requests.pop(ident, None)
        if future is None or self._error is not None:
            return
        self._abandoned.add(ident)
        if cancel:
            other = next(self._ids)
            self._abandoned.add(other)
            self._send_pieces(other, pack_map({"op": "cancel", "request": ident}), ())

    def _send_pieces(self, ident: int, packed: bytes, fds: Sequence[int]) -> None:
        for start in range(0, len(packed), wire.BODY_LIMIT):
            piece = packed[start : start + wire.BODY_LIMIT]
            more = wire.MORE if start + wire.BODY_LIMIT < len(packed) else 0
            self._transport.send(wire.frame(wire.REQUEST, more, ident, piece), fds)
            fds = ()

    def _on_frame(self, data: memoryview) -> None:
        try:
            kind, stream, ident, body = wire.split(data)
            if self._greeting is not None:
                self._on_greeting(kind, body)
            elif kind == wire.RESPONSE:
                self._on_response(ident, body)
            elif kind in (wire.DATA, wire.CREDIT, wire.EXIT) and ident in self._processes:
                process = self._processes[ident]
                if kind == wire.DATA:
                    process.on_data(stream, body)
                elif kind == wire.CREDIT:
                    process.on_credit(stream, body)
                else:
                    process.on_exit(unpack_map(body))
            else:
                raise wire.WireError(f"frame of kind {kind} for {ident}")
        except wire.WireError as err:
            self.violation(str(err))

    def _on_greeting(self, kind: int, body: memoryview) -> None:
        assert self._greeting is not None
        answer = unpack_map(body) if kind == wire.HELLO else {}
        if answer.get("nonce") != self._nonce:
            # Meant for the agent before us.
            self._stale += 1
            if self._stale > _STALE_FRAMES:
                raise wire.WireError("no hello among the first frames")
            return
        if self._greeting.done():
            raise wire.WireError("a second hello")
        version, pid, greeted, processes = (
            answer.get(key) for key in ("version", "pid", "greeted", "processes")
        )
        shells = answer.get("shells")
        if version != wire.VERSION:
            self._shut(LinkClosedError(f"the guest speaks version {version!r:.20}, not {wire.VERSION}"))
            return
        if not (
            isinstance(pid, int)
            and isinstance(greeted, int)
            and isinstance(processes, int)
            and isinstance(shells, list)
            and all(shell in ("bash", "sh") for shell in shells)
        ):
            raise wire.WireError("an odd hello")
        self._greeting.set_result(
            GuestHello(
                version=wire.VERSION, pid=pid, shells=tuple(shells), greeted=greeted, processes=processes
            )
        )

    def _on_response(self, ident: int, body: memoryview) -> None:
        answer = unpack_map(body)
        future = self._requests.pop(ident, None)
        if future is None:
            if ident not in self._abandoned:
                raise wire.WireError(f"an answer to no request {ident}")
            self._abandoned.discard(ident)
        elif not future.done():
            future.set_result(answer)

    def violation(self, message: str) -> LinkViolationError:
        """Close the link because of what the guest sent; the error to raise."""
        error = LinkViolationError(f"the guest broke the protocol: {message}")
        self._shut(error)
        return error

    def _on_gone(self, reason: str) -> None:
        self._shut(LinkClosedError(reason))

    def _shut(self, error: LinkClosedError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._transport.close()
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(error)
        for future in self._requests.values():
            if not future.done():
                future.set_exception(error)
        self._requests.clear()
        for process in self._processes.values():
            process.on_closed(error)
        self.closed.set()
