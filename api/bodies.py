"""Bodies of relayed requests: small ones are held, so that they can be sent again; large ones flow through once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message, Receive, Scope

from shoal.contract.base import MAX_WAIT_S
from shoal.contract.errors import ErrorCode, ShoalError


class ClientGone(Exception):
    """The caller hung up while its body was read."""


class Body:
    """A request's body on its way through.

    Attributes:
        held: The whole body; None for one that is streamed.
        length: What the caller says its length is; None when it does not.
        gone: Whether the caller hung up in the middle.
        refusal: Why the rest of it was not taken; None while nothing speaks against it.
    """

    def __init__(
        self, *, held: bytes | None, first: Message | None, receive: Receive, length: int | None
    ) -> None:
        self.held = held
        self.length = length
        self.gone = False
        self.refusal: ShoalError | None = None
        self._first = first
        self._receive = receive
        self._begun = False

    @property
    def can_be_sent_again(self) -> bool:
        """Whether `data` may be asked for once more."""
        return self.held is not None or not self._begun

    def data(self) -> bytes | AsyncIterator[bytes]:
        """What the client library sends."""
        return self.held if self.held is not None else self._chunks()

    async def whole(self) -> bytes | None:
        """All of it in memory; None when it was streamed to somebody already.

        Raises:
            ShoalError: PAYLOAD_TOO_LARGE.
            ClientGone: The caller hung up.
        """
        if self.held is None and not self._begun:
            self.held = b"".join([chunk async for chunk in self._chunks()])
        return self.held

    async def _chunks(self) -> AsyncIterator[bytes]:
        self._begun = True
        message = self._first
        self._first = None
        while message is not None:
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            if chunk:
                yield chunk
            try:
                message = await self._receive() if message.get("more_body") else None
            except ShoalError as error:
                self.refusal = error
                raise

    def field(self, name: str) -> Any:
        """A top-level field of a held JSON body; None when there is none. Only off the hot path: it parses."""
        if self.held is None:
            return None
        try:
            value = json.loads(self.held)
        except (ValueError, RecursionError):
            return None
        return value.get(name) if isinstance(value, dict) else None

    def wait_s(self) -> float:
        """The `wait_s` that the body asks for; the longest there is where it asks for none."""
        asked = self.field("wait_s")
        # Compared before it is converted: an integer of JSON may be larger than any float, and NaN is no wait at all.
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked < MAX_WAIT_S:
            return MAX_WAIT_S
        return max(float(asked), 0.0) if asked > 0 else 0.0


async def receive_body(scope: Scope, receive: Receive, *, hold_bytes: int, limit_bytes: int | None) -> Body:
    """Begin to read a request's body.

    Args:
        hold_bytes: Bodies up to this size are read whole.
        limit_bytes: Bodies over this are refused; None refuses none.

    Raises:
        ShoalError: PAYLOAD_TOO_LARGE.
        ClientGone: The caller hung up.
    """
    length = content_length(scope)
    if limit_bytes is not None and length is not None and length > limit_bytes:
        raise too_large(limit_bytes)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    if not message.get("more_body"):
        return Body(held=message.get("body", b""), first=None, receive=receive, length=length)
    if length is None or length > hold_bytes:
        limited = receive if limit_bytes is None else _limited(receive, message, limit_bytes)
        return Body(held=None, first=message, receive=limited, length=length)
    parts = [message.get("body", b"")]
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
    return Body(held=b"".join(parts), first=None, receive=receive, length=length)


def _limited(receive: Receive, first: Message, limit_bytes: int) -> Receive:
    """`receive`, refusing what goes over the limit: a body without a length may be of any size."""
    seen = len(first.get("body", b""))

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit_bytes:
            raise too_large(limit_bytes)
        return message

    return counted


def content_length(scope: Scope) -> int | None:
    """The request's Content-Length; None where there is none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def too_large(limit_bytes: int) -> ShoalError:
    """The refusal of a body over the limit."""
    return ShoalError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"the body is over {limit_bytes} bytes; send large content by PUT .../files or POST .../stdin, and a file "
        "that is too large for that by POST /v1/transfers",
        details={"limit_bytes": limit_bytes, "direction": "request", "transfer": "/v1/transfers"},
    )
