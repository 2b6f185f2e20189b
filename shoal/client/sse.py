"""The stream of a running action: server-sent events, parsed from bytes without I/O."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.client import building
from shoal.client.effects import Send
from shoal.client.session_core import SessionCore


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEvent:
    """One event of an action's stream.

    Attributes:
        kind: `stdout`, `stderr`, or `exit` (the last one).
        data: Bytes of output; for `exit`, empty.
        id: Where to go on after this event (`Last-Event-ID`).
        payload: The event's JSON.
    """

    kind: str
    data: bytes
    id: str | None
    payload: dict[str, object]


class EventParser:
    """Splits a byte stream into server-sent events (WHATWG HTML, 9.2), however it is cut into chunks."""

    def __init__(self) -> None:
        self._rest = b""
        self._kind = ""
        self._data: list[bytes] = []
        self.last_id: str | None = None

    def feed(self, chunk: bytes) -> Iterator[StreamEvent]:
        """The events that are complete with this chunk."""
        self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        for raw in lines:
            line = raw[:-1] if raw.endswith(b"\r") else raw
            if not line:
                yield from self._complete()
                continue
            if line.startswith(b":"):
                continue  # a comment: the heartbeat
            name, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            if name == b"event":
                self._kind = value.decode("utf-8", "replace")
            elif name == b"data":
                self._data.append(value)
            elif name == b"id" and b"\0" not in value:
                self.last_id = value.decode("utf-8", "replace")

    def _complete(self) -> Iterator[StreamEvent]:
        kind, data = self._kind or "message", b"\n".join(self._data)
        had_data = bool(self._data)
        self._kind, self._data = "", []
        if not had_data:
            return
        try:
            payload = json.loads(data)
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            payload = {"data": data.decode("utf-8", "replace")}
        yield StreamEvent(kind=kind, data=_output(payload), id=self.last_id, payload=payload)


def _output(payload: dict[str, object]) -> bytes:
    text = payload.get("data")
    if not isinstance(text, str):
        return b""
    if payload.get("encoding") == "base64":
        return base64.b64decode(text)
    return text.encode("utf-8", "surrogatepass")


def stream_request(core: SessionCore, action_id: str, last_id: str | None) -> Send:
    """The request that (re)opens an action's stream after the last event that was seen."""
    headers = {"accept": "text/event-stream"}
    if last_id is not None:
        headers["last-event-id"] = last_id
    path = f"{core.path}/actions/{building.quoted(action_id)}/stream"
    # Heartbeats come every 15 s: silence for longer than wait and margin is a dead connection.
    return Send(method="GET", path=path, headers=headers, wait_s=25.0)
