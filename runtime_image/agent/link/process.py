"""A process in the sandbox, as the agent holds it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import TYPE_CHECKING, Any

from runtime_image.guest import wire

from .errors import LinkClosedError, LinkError
from .records import ProcessExit
from .tap import OutputTap

if TYPE_CHECKING:
    from .connection import Connection

# Once a stream exceeds its cap the guest sends its tail in turns; credit beyond is given slowly,
# so that a guest that does not keep to this costs the agent no more.
_SLOW_CREDIT_S = 0.02


class GuestProcess:
    """A started process. It lives on in the guest when this object or the link goes.

    Attributes:
        process_id: the caller's name for it.
        pid: in the sandbox's pid namespace.
        started_monotonic: `time.monotonic()` here at its start.
        stdout, stderr: what it printed. With a terminal all is on stdout.
        limit_bytes: how much of each is kept.
        result: of a code context, what `result_value` reads; else empty.
    """

    def __init__(self, link: Connection, process_id: str, handle: int, limit: int) -> None:
        self._link = link
        self.process_id = process_id
        self.handle = handle
        self.pid = 0
        self.started_monotonic = time.monotonic()
        self.stdout = OutputTap(limit)
        self.stderr = OutputTap(limit)
        self.result = OutputTap(limit)
        self._taps = {wire.STDOUT: self.stdout, wire.STDERR: self.stderr, wire.RESULT: self.result}
        self.limit_bytes = limit
        self._received = dict.fromkeys(self._taps, 0)
        self._allowed = dict.fromkeys(self._taps, wire.WINDOW)
        self._exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        # Nobody may ever wait for it; then its error is nobody's.
        self._exit.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._stdin_sent = 0
        self._stdin_allowed = wire.WINDOW
        self._stdin_open = False
        self._stdin_credit = asyncio.Event()
        self._stdin_lock = asyncio.Lock()

    @property
    def exited(self) -> bool:
        """It has ended and all its output is here."""
        return self._exit.done()

    async def wait(self) -> ProcessExit:
        """How it ended, after all its output has come. May be called many times.

        Raises:
            LinkClosedError: the guest is gone; how the process ended will never be known.
        """
        return await asyncio.shield(self._exit)

    async def write_stdin(self, data: bytes) -> None:
        """Feed stdin; returns when the guest has room for all of it on the way.

        What a process does not read any more is accepted and dropped, as its exit tells the story.

        Raises:
            LinkError: stdin is not open.
            LinkClosedError: the guest is gone.
        """
        async with self._stdin_lock:
            if not self._stdin_open:
                raise LinkError("stdin is not open")
            view = memoryview(data)
            while view and not self._exit.done():
                room = min(self._stdin_allowed - self._stdin_sent, wire.DATA_LIMIT)
                if room <= 0:
                    self._stdin_credit.clear()
                    await self._stdin_credit.wait()
                    self._link.check_open()
                    continue
                piece, view = view[:room], view[room:]
                frame = wire.data_frame(self.handle, wire.STDIN, self._stdin_sent, piece)
                self._stdin_sent += len(piece)
                await self._link.send(frame)

    async def close_stdin(self) -> None:
        """The process reads an end of file after what was written. Repeatable."""
        async with self._stdin_lock:
            if self._stdin_open:
                self._stdin_open = False
                await self._link.send(wire.frame(wire.END, wire.STDIN, self.handle))

    async def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size.

        Raises:
            OperationError: it has no terminal.
        """
        await self._link.request({"op": "resize", "id": self.process_id, "size": [rows, columns]})

    def result_value(self) -> tuple[str | None, Any]:
        """The last expression's value of a code context: (repr, JSON value).

        Both None when there was no value or it was None; the JSON value is None also when the value
        is not JSON. Comes from the sandbox: data, never to be evaluated.
        """
        data = self.result.snapshot().data
        if len(data) < 4 or self.result.truncated:
            return None, None
        size = int.from_bytes(data[:4], "little")
        text = data[4 : 4 + size].decode("utf-8", "replace")
        try:
            value = json.loads(data[4 + size :]) if len(data) > 4 + size else None
        except (ValueError, RecursionError):
            value = None
        return text, value

    # For the link.

    def begin(self, *, stdin_open: bool, stdin_received: int = 0) -> None:
        """stdin can be written from byte `stdin_received` on."""
        self._stdin_open = stdin_open
        self._stdin_sent = stdin_received
        self._stdin_allowed = stdin_received + wire.WINDOW

    def on_data(self, stream: int, body: memoryview) -> None:
        """A DATA frame came.

        Raises:
            WireError: it is not one that may come.
        """
        tap = self._taps.get(stream)
        size = len(body) - wire.OFFSET.size
        if tap is None or size <= 0 or self._exit.done():
            raise wire.WireError(f"data of {size} bytes for stream {stream}")
        (offset,) = wire.OFFSET.unpack_from(body)
        self._received[stream] += size
        if self._received[stream] > self._allowed[stream]:
            raise wire.WireError("data beyond its credit")
        if not tap.total_bytes <= offset < 1 << 62:
            raise wire.WireError(f"data at {offset} after {tap.total_bytes}")
        tap.feed(offset, body[wire.OFFSET.size :])
        if self._allowed[stream] - self._received[stream] < wire.WINDOW // 2:
            target = self._received[stream] + wire.WINDOW
            if self._received[stream] <= self.limit_bytes + wire.WINDOW:
                self._grant(stream, target)
            else:
                asyncio.get_running_loop().call_later(_SLOW_CREDIT_S, self._grant, stream, target)

    def _grant(self, stream: int, allowed: int) -> None:
        if allowed > self._allowed[stream]:
            self._allowed[stream] = allowed
            self._link.send_nowait(wire.credit_frame(self.handle, stream, allowed))

    def on_credit(self, stream: int, body: memoryview) -> None:
        """A CREDIT frame came.

        Raises:
            WireError: it is not one that may come.
        """
        allowed = wire.number(body)
        if stream != wire.STDIN or not self._stdin_allowed < allowed <= self._stdin_sent + wire.WINDOW:
            raise wire.WireError(f"credit of {allowed} for stream {stream}")
        self._stdin_allowed = allowed
        self._stdin_credit.set()

    def on_exit(self, body: dict[str, Any]) -> None:
        """The EXIT frame came.

        Raises:
            WireError: for the second time, or not as it should be.
        """
        if self._exit.done():
            raise wire.WireError("a second exit")
        code, number = _optional_int(body, "code"), _optional_int(body, "signal")
        if (code is None) == (number is None):
            raise wire.WireError("an exit with code and signal, or neither")
        cpu_us, rss = _optional_int(body, "cpu_us"), _optional_int(body, "max_rss_kib")
        ended = ProcessExit(
            exit_code=code,
            signal=None if number is None else _signal_name(number),
            duration_ms=(_optional_int(body, "duration_us") or 0) / 1000,
            cpu_ms=None if cpu_us is None else cpu_us / 1000,
            max_rss_mib=None if rss is None else rss / 1024,
            **{
                name: body.get(name) is True
                for name in ("shell_restarted", "shell_ended", "context_restarted", "context_ended")
            },
        )
        totals = body.get("totals")
        if not isinstance(totals, list) or len(totals) > len(self._taps):
            raise wire.WireError("an exit without totals")
        for item in totals:
            match item:
                case [int(stream), int(total)] if stream in self._taps and total < 1 << 62:
                    if total < self._taps[stream].total_bytes:
                        raise wire.WireError("a total below what came")
                    self._taps[stream].end(total)
                case _:
                    raise wire.WireError("an exit with odd totals")
        self._finish_taps()
        self._exit.set_result(ended)

    def on_closed(self, error: LinkClosedError) -> None:
        """The link is gone."""
        self._finish_taps()
        if not self._exit.done():
            self._exit.set_exception(error)

    def _finish_taps(self) -> None:
        for tap in self._taps.values():
            if not tap.ended:
                tap.end()
        self._stdin_open = False
        self._stdin_credit.set()


def _optional_int(body: dict[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise wire.WireError(f"{key} is {value!r:.40}")
    return value


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return f"RTMIN+{number - signal.SIGRTMIN}"
