"""Server-sent events of an action that runs, in the form of `shoal.contract.streams`; beside them a comment
(`: heartbeat`) every 15 s while nothing else is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.link import OutputTap
from shoal.contract.streams import chunk, exit_event, output_event
from shoal.contract.text import whole_utf8

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
        kept = tap.snapshot(self.offset, _CHUNK_BYTES)
        if not kept.data and not kept.dropped:
            return None
        data = kept.data
        end_known = last or len(data) == _CHUNK_BYTES
        whole = len(data) if last else whole_utf8(data)
        if whole == 0 and not end_known:
            return None
        if whole:
            data = data[:whole]
        start = self.offset + kept.dropped
        self.offset = start + len(data)
        return chunk(data, start, kept.dropped)


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
            while (piece := cursor.take(tap, last=False)) is not None:
                sent = True
                yield output_event(cursor.name, out.offset, err.offset, piece)
        if not sent:
            waits = [
                tap.changed(max(cursor.offset, tap.total_bytes)) for cursor, tap in _open(process, out, err)
            ]
            if not await _any(run.settled.wait(), *waits):
                yield _HEARTBEAT
    if run.process is not None:
        for cursor, tap in ((out, run.process.stdout), (err, run.process.stderr)):
            while (piece := cursor.take(tap, last=True)) is not None:
                yield output_event(cursor.name, out.offset, err.offset, piece)
    yield exit_event(out.offset, err.offset, record())


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
