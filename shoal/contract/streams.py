"""The form of an action's server-sent events, and those of an action that has ended.

    event: stdout | stderr          data: {"data", "encoding": "utf-8" | "base64", "offset", "dropped_bytes"}
    event: exit                     data: the action's ActionRecord

`id` is `<stdout offset>-<stderr offset>` after the event: sent back as Last-Event-ID it resumes there. `offset` is
where the data begins in its stream, `dropped_bytes` how many bytes before it are not kept (the output's cap). A chunk
is text where it is whole UTF-8, base64 otherwise; a character is never split between two chunks. JSON keeps every line
break inside its string, so that no blank line is lost.

Whoever has only the record, be it the host or the archive, tells the same events of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from shoal.contract.actions import ActionRecord, ExecObservation
from shoal.contract.base import whole_number
from shoal.contract.errors import invalid
from shoal.contract.text import to_bytes, to_text


def resume_offsets(header: str | None, query: str | None) -> tuple[int, int]:
    """Where a reader goes on, in stdout and in stderr: after the id that it had last, the header's before the query's;
    at the beginning without one.

    Raises:
        ShoalError: INVALID_REQUEST for an id that no stream gave.
    """
    path = "header.last-event-id" if header else "query.last_event_id"
    out, _, err = (header or query or "0-0").partition("-")
    stdout, stderr = whole_number(out), whole_number(err)
    if stdout is None or stderr is None:
        raise invalid(path, "is not an id of this stream")
    return stdout, stderr


def chunk(data: bytes, offset: int, dropped: int) -> dict[str, object]:
    """The data of an event of output."""
    text, lossy = to_text(data, "utf-8")
    encoding = "utf-8"
    if lossy:
        text, encoding = to_text(data, "base64")[0], "base64"
    return {"data": text, "encoding": encoding, "offset": offset, "dropped_bytes": dropped}


def output_event(kind: str, stdout: int, stderr: int, data: dict[str, object]) -> bytes:
    """An event of output; the offsets are those after it."""
    return _event(kind, stdout, stderr, json.dumps(data, ensure_ascii=False))


def exit_event(stdout: int, stderr: int, record: bytes) -> bytes:
    """The last event: the record as JSON."""
    return _event("exit", stdout, stderr, record.decode())


def _event(kind: str, stdout: int, stderr: int, data: str) -> bytes:
    return f"event: {kind}\nid: {stdout}-{stderr}\ndata: {data}\n\n".encode()


def replayed_events(record: bytes, stdout: int, stderr: int) -> Iterator[bytes]:
    """The events of an action that has ended, from its record as JSON: what was kept of each stream from those offsets
    on, and its end."""
    parsed = ActionRecord.model_validate_json(record)
    ends = [stdout, stderr]
    if isinstance(parsed.observation, ExecObservation):
        seen = parsed.observation
        limit = getattr(parsed.action, "output_limit_bytes", 0)
        for n, (name, text, dropped, total) in enumerate(
            (
                ("stdout", seen.stdout, seen.stdout_dropped_bytes, seen.stdout_bytes),
                ("stderr", seen.stderr, seen.stderr_dropped_bytes, seen.stderr_bytes),
            )
        ):
            for piece in _kept(to_bytes(text, seen.encoding), limit - limit // 2, dropped, total, ends[n]):
                ends[n] = int(str(piece["offset"])) + len(_bytes_of(piece))
                yield output_event(name, ends[0], ends[1], piece)
    yield exit_event(ends[0], ends[1], record)


def _bytes_of(piece: dict[str, object]) -> bytes:
    return to_bytes(str(piece["data"]), "base64" if piece["encoding"] == "base64" else "utf-8")


def _kept(data: bytes, head: int, dropped: int, total: int, offset: int) -> list[dict[str, object]]:
    """Chunks of what is kept, from `offset` of the stream on: a head, then, where the middle was dropped, a tail."""
    if not dropped or total <= len(data):
        pieces = [(0, data)]
    else:
        pieces = [(0, data[:head]), (total - (len(data) - head), data[head:])]
    chunks: list[dict[str, object]] = []
    at = offset
    for start, piece in pieces:
        if start + len(piece) <= at:
            continue
        skip = max(0, at - start)
        chunks.append(chunk(piece[skip:], start + skip, max(0, start - at)))
        at = start + len(piece)
    return chunks
