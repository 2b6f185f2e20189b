"""Server-sent events of one step.

    event: stdout | stderr          data: {"data", "encoding": "utf-8" | "base64", "offset", "dropped_bytes"}
    event: exit                     data: the step's ActionRecord
    : heartbeat                     every 15 s while nothing else is sent

`id` is `<stdout offset>-<stderr offset>` after the event: sent back as Last-Event-ID it resumes there. `offset` is
where the data begins in its stream, `dropped_bytes` how many bytes before it are not kept (the output's cap). A chunk
is text where it is whole UTF-8, base64 otherwise; a character is never split between two chunks. JSON keeps every line
break inside its string, so that no blank line is lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.actions.text import to_bytes, to_text, whole_utf8
from runtime_image.agent.link import OutputTap
from shoal.contract.actions import ActionRecord, ExecObservation

HEARTBEAT_S = 15.0
_CHUNK_BYTES = 65_536
_HEARTBEAT = b": heartbeat\n\n"


class _Cursor:
    """Where a reader is in one stream of a process."""

    def __init__(self, name: str, offset: int) -> None:
        self.name = name
        self.offset = offset

    def take(self, tap: OutputTap, *, last: bool) -> dict[str, object] | None:
        """The next chunk, None when there is none yet. `last`: nothing follows, so half a character is told too."""
        piece = tap.snapshot(self.offset, _CHUNK_BYTES)
        if not piece.data and not piece.dropped:
            return None
        data = piece.data
        end_known = last or len(data) == _CHUNK_BYTES
        whole = len(data) if last else whole_utf8(data)
        if whole == 0 and not end_known:
            return None
        if whole:
            data = data[:whole]
        start = self.offset + piece.dropped
        self.offset = start + len(data)
        return _chunk(data, start, piece.dropped)


def _chunk(data: bytes, offset: int, dropped: int) -> dict[str, object]:
    text, lossy = to_text(data, "utf-8")
    encoding = "utf-8"
    if lossy:
        text, encoding = to_text(data, "base64")[0], "base64"
    return {"data": text, "encoding": encoding, "offset": offset, "dropped_bytes": dropped}


def _event(kind: str, id: str, data: str) -> bytes:
    return f"event: {kind}\nid: {id}\ndata: {data}\n\n".encode()


async def run_events(
    run: ActionRun, record: Callable[[], bytes], stdout: int, stderr: int
) -> AsyncIterator[bytes]:
    """The events of a step that is queued or runs, from those offsets to its end."""
    out, err = _Cursor("stdout", stdout), _Cursor("stderr", stderr)
    yield b": stream\n\n"
    while not run.settled.is_set():
        process = run.process
        if process is None:
            if not await _any(run.process_changed.wait(), run.settled.wait()):
                yield _HEARTBEAT
            continue
        sent = False
        for cursor, tap in ((out, process.stdout), (err, process.stderr)):
            while (chunk := cursor.take(tap, last=False)) is not None:
                sent = True
                yield _event(cursor.name, f"{out.offset}-{err.offset}", json.dumps(chunk, ensure_ascii=False))
        if not sent:
            waits = [
                tap.changed(max(cursor.offset, tap.total_bytes)) for cursor, tap in _open(process, out, err)
            ]
            if not await _any(run.settled.wait(), *waits):
                yield _HEARTBEAT
    if run.process is not None:
        for cursor, tap in ((out, run.process.stdout), (err, run.process.stderr)):
            while (chunk := cursor.take(tap, last=True)) is not None:
                yield _event(cursor.name, f"{out.offset}-{err.offset}", json.dumps(chunk, ensure_ascii=False))
    yield _event("exit", f"{out.offset}-{err.offset}", record().decode())


def _open(process, out: _Cursor, err: _Cursor):  # type: ignore[no-untyped-def]
    """The streams that may still grow."""
    return [(c, t) for c, t in ((out, process.stdout), (err, process.stderr)) if not t.ended]


async def _any(*waits) -> bool:  # type: ignore[no-untyped-def]
    """Wait for the first; False when a heartbeat is due before."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for task in tasks:
            task.cancel()


async def replayed_events(record: bytes, stdout: int, stderr: int) -> AsyncIterator[bytes]:
    """The events of a step that has ended, from its record: what was kept of each stream, and its end."""
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
            for chunk in _kept(to_bytes(text, seen.encoding), limit - limit // 2, dropped, total, ends[n]):
                ends[n] = int(str(chunk["offset"])) + len(_bytes_of(chunk))
                yield _event(name, f"{ends[0]}-{ends[1]}", json.dumps(chunk, ensure_ascii=False))
    yield _event("exit", f"{ends[0]}-{ends[1]}", record.decode())


def _bytes_of(chunk: dict[str, object]) -> bytes:
    return to_bytes(str(chunk["data"]), "base64" if chunk["encoding"] == "base64" else "utf-8")


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
        chunks.append(_chunk(piece[skip:], start + skip, max(0, start - at)))
        at = start + len(piece)
    return chunks
