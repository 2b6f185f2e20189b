"""A process of an action: what it prints, what it reads, how it ends."""

from __future__ import annotations

import fcntl
import os
from time import monotonic

from . import wire
from .loop import GONE, IN, OUT, Loop
from .pack import dumps
from .tape import Tape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from resource import struct_rusage
    from typing import Any

    from .channel import Channel

# After the leader's exit, how long its pipes may stay silent or open before the action ends
# without them: processes it left running hold them too.
DRAIN_S = 0.05
# Beyond the head, new output is sent at most this often: `yes` costs the link little.
TAIL_INTERVAL_S = 0.1
_PIPE_BYTES = 1 << 20
_buffer = memoryview(bytearray(64 << 10))


class Output:
    """One output stream: read from a pipe or terminal, kept on a tape, sent as far as credit goes."""

    def __init__(self, process: Process, number: int, fd: int, limit: int) -> None:
        self.tape = Tape(limit)
        self.fd: int | None = fd
        self.sent = 0
        self.allowed = wire.WINDOW
        self.spent = 0
        self._process = process
        self._number = number
        self._keep = True
        self._timer_set = False
        self._turn_began = 0.0
        self._turn_end = 0
        os.set_blocking(fd, False)
        process.loop.watch(fd, IN, self._ready)

    @property
    def pending(self) -> bool:
        """Something kept is not sent yet."""
        return self.tape.next_kept(self.sent) < self.tape.total

    def read_some(self) -> bool:
        """Read once; False when there is nothing now or never again."""
        if self.fd is None:
            return False
        try:
            count = os.readv(self.fd, [_buffer])
        except BlockingIOError:
            return False
        except OSError:
            # A terminal whose last process is gone answers EIO.
            count = 0
        if count == 0:
            self.close()
            return False
        if self._keep:
            self.tape.feed(_buffer[:count])
            self._offer()
        return True

    def stop_keeping(self) -> None:
        """The action is over. Go on reading, so that what it left running is not killed by SIGPIPE."""
        self._keep = False

    def forget(self) -> None:
        """Let go of what was kept."""
        self._keep = False
        self.tape = Tape(0)

    def close(self) -> None:
        """No more to read."""
        if self.fd is not None:
            self._process.loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = None
            self._process.output_ended()

    def rewind(self) -> None:
        """Go back to the first byte that is kept, for a new agent; `flush` then sends."""
        self.sent = self.spent = 0
        self.allowed = wire.WINDOW

    def allow(self, allowed: int) -> None:
        """Credit came."""
        self.allowed = max(self.allowed, allowed)
        self._offer()

    def flush(self) -> None:
        """The stream is complete: send the rest without waiting for an interval."""
        self._offer()

    def next_frame(self) -> bytes | None:
        """The channel asks for the next frame; None when there is none to send now."""
        process = self._process
        room = min(wire.DATA_LIMIT, self.allowed - self.spent)
        if process.handle is None or room <= 0:
            return None
        tape = self.tape
        if not process.concluded and self.sent >= max(tape.head_limit, self._turn_end):
            # The tail goes in turns: what there was when the turn began, then a pause.
            wait = self._turn_began + TAIL_INTERVAL_S - monotonic()
            if wait > 0:
                self._defer(wait)
                return None
            self._turn_began = monotonic()
            self._turn_end = tape.total
        start, data = tape.read(self.sent, room)
        if not data:
            process.output_sent()
            return None
        self.sent = start + len(data)
        self.spent += len(data)
        return wire.data_frame(process.handle, self._number, start, data)

    def _defer(self, wait: float) -> None:
        if not self._timer_set:
            self._timer_set = True
            self._process.loop.later(wait, self._resume)

    def _resume(self) -> None:
        self._timer_set = False
        self._offer()

    def _offer(self) -> None:
        if self._process.handle is not None and not self._timer_set:
            self._process.channel.wake(self.next_frame)

    def _ready(self, events: int) -> None:
        if not self.read_some() and self.fd is not None and events & GONE and not events & IN:
            self.close()


class Input:
    """stdin of a process: a queue of at most the window, written as the process reads."""

    def __init__(self, process: Process, fd: int, *, at_end: bytes = b"") -> None:
        self.received = 0
        # What tells the reader that this was all, where closing does not: a terminal's control-D.
        self._at_end = at_end
        self._granted = wire.WINDOW
        self._fd: int | None = fd
        self._process = process
        self._queue: list[memoryview] = []
        self._ended = False
        self.may_close = True
        os.set_blocking(fd, False)

    @property
    def open(self) -> bool:
        """More may be written."""
        return self._fd is not None and not self._ended

    def feed(self, data: bytes | memoryview) -> None:
        """Bytes from the agent."""
        self.received += len(data)
        if self._fd is None:
            # Nobody reads any more: accepted and gone, as in a broken pipe.
            self._grant()
        elif data:
            self._queue.append(memoryview(bytes(data)))
            self._write()

    def end(self) -> None:
        """stdin ends after what was fed."""
        if self._at_end and not self._ended and self._fd is not None:
            self._queue.append(memoryview(self._at_end))
        self._ended = True
        self._write()

    def let_close(self) -> None:
        """There is a reader now: an end that came before may take effect."""
        self.may_close = True
        self._write()

    def close(self) -> None:
        """Nobody reads any more."""
        if self._fd is not None:
            self._process.loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = None
        self._queue.clear()
        self._grant()

    def _grant(self) -> None:
        process = self._process
        if process.handle is not None:
            waiting = sum(len(piece) for piece in self._queue)
            allowed = self.received - waiting + wire.WINDOW
            if allowed - self._granted >= wire.WINDOW // 4:
                self._granted = allowed
                process.channel.post(wire.credit_frame(process.handle, wire.STDIN, allowed))

    def _write(self, events: int = 0) -> None:
        fd = self._fd
        if fd is None:
            return
        wrote = False
        while self._queue:
            piece = self._queue[0]
            try:
                count = os.write(fd, piece)
            except BlockingIOError:
                self._process.loop.watch(fd, OUT, self._write)
                break
            except OSError:
                self.close()
                return
            wrote = True
            if count < len(piece):
                self._queue[0] = piece[count:]
            else:
                self._queue.pop(0)
        else:
            self._process.loop.unwatch(fd)
            if self._ended and self.may_close:
                self.close()
                return
        if wrote:
            self._grant()


class Process:
    """One process of an action, from its start until the agent forgets it.

    It ends with its leader: `conclude` is called when the leader is gone and its pipes are empty or
    have been given `DRAIN_S`.
    """

    def __init__(self, loop: Loop, channel: Channel, process_id: str, handle: int) -> None:
        self.loop = loop
        self.channel = channel
        self.process_id = process_id
        self.handle: int | None = handle
        self.pid = 0
        self.tty_fd: int | None = None
        self.outputs: dict[int, Output] = {}
        self.stdin: Input | None = None
        self.started = monotonic()
        self.ended: float | None = None
        self.concluded = False
        self.exit: dict[str, Any] = {}
        self._reported = False
        self.on_concluded: Callable[[], None] | None = None

    def add_output(self, number: int, fd: int, limit: int) -> None:
        """Read `fd` as output stream `number`."""
        self.outputs[number] = Output(self, number, fd, limit)

    def leader_exited(self, status: int, usage: struct_rusage | None) -> None:
        """The reaper's call."""
        cpu_us, max_rss_kib = None, None
        if usage is not None:
            cpu_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
            max_rss_kib = usage.ru_maxrss
        code = os.waitstatus_to_exitcode(status)
        self.finish(
            {
                "code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "cpu_us": cpu_us,
                "max_rss_kib": max_rss_kib,
            }
        )

    def finish(self, exit_info: dict[str, Any]) -> None:
        """The leader is done: take what its pipes hold, then conclude."""
        if self.ended is not None:
            return
        self.ended = monotonic()
        self.exit = {**exit_info, "duration_us": int((self.ended - self.started) * 1e6)}
        if self.stdin is not None:
            self.stdin.may_close = True
        for output in list(self.outputs.values()):
            # At most what a pipe can hold: what it left running may be writing without end.
            for _ in range(_PIPE_BYTES // len(_buffer)):
                if not output.read_some():
                    break
        if not self.concluded:
            self.output_ended()
        if not self.concluded:
            self.loop.later(DRAIN_S, self.conclude)

    def output_ended(self) -> None:
        """An output stream came to its end."""
        if self.ended is not None and all(output.fd is None for output in self.outputs.values()):
            self.conclude()

    def conclude(self) -> None:
        """Nothing more is taken from the process."""
        if self.concluded:
            return
        self.concluded = True
        if self.stdin is not None:
            self.stdin.close()
        for output in self.outputs.values():
            output.stop_keeping()
        if self.on_concluded is not None:
            self.on_concluded()
        for output in self.outputs.values():
            output.flush()
        self.output_sent()

    def output_sent(self) -> None:
        """Report the exit once all kept output is on its way."""
        if not self.concluded or self._reported or self.handle is None:
            return
        if any(output.pending for output in self.outputs.values()):
            return
        self._reported = True
        body = {**self.exit, "totals": [[n, out.tape.total] for n, out in self.outputs.items()]}
        self.channel.post(wire.frame(wire.EXIT, 0, self.handle, dumps(body)))

    def detach(self) -> None:
        """The agent is gone; another may attach."""
        self.handle = None

    def forget(self) -> None:
        """The agent needs nothing of this any more. What still runs goes on, unheard."""
        self.handle = None
        if self.stdin is not None:
            self.stdin.close()
        for output in self.outputs.values():
            output.forget()
        if self.tty_fd is not None and self.concluded:
            os.close(self.tty_fd)
            self.tty_fd = None

    def attach(self, handle: int) -> None:
        """Send all that is kept, then the exit if there was one, under a new handle."""
        # All of them before any is sent: an empty stream would report the exit ahead of the others' bytes.
        for output in self.outputs.values():
            output.rewind()
        self.handle = handle
        self._reported = False
        for output in self.outputs.values():
            output.flush()
        self.output_sent()

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size.

        Raises:
            OSError: the process has no terminal (any more).
        """
        if self.tty_fd is None:
            raise OSError(25, "not a terminal")
        set_size(self.tty_fd, rows, columns)

    def describe(self) -> dict[str, Any]:
        """For an agent that comes back."""
        return {
            "process_id": self.process_id,
            "pid": self.pid,
            "running": not self.concluded,
            "age_us": int((monotonic() - self.started) * 1e6),
            "stdin_open": self.stdin is not None and self.stdin.open,
            "stdin_received": self.stdin.received if self.stdin is not None else 0,
            "limit": max((output.tape.limit for output in self.outputs.values()), default=0),
            "streams": list(self.outputs),
        }


def set_size(fd: int, rows: int, columns: int) -> None:
    """TIOCSWINSZ."""
    size = rows.to_bytes(2, "little") + columns.to_bytes(2, "little") + bytes(4)
    fcntl.ioctl(fd, 0x5414, size)
