"""A command's streams and this process's: piped, or as a terminal in raw mode."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.client.errors import ActionNotRunning, NotFound
from shoal.client.results import ExecResult
from shoal.client.sync_running import Running
from shoal.client.sync_session import Session
from shoal.contract.errors import ShoalError

_CHUNK = 65_536
#: What is kept of each stream while this program falls behind; the sandbox's memory holds it.
_KEPT_BYTES = 8 * 1_048_576
#: A file on stdin up to this size goes along with the request.
_INLINE_BYTES = 16 * 1_048_576
#: base64: a command that ends before its stream is opened is answered from its record, which must be exact.
_EXACT: dict[str, Any] = {"encoding": "base64", "output_limit_bytes": _KEPT_BYTES}


def _size() -> os.terminal_size:
    """The terminal's own size; COLUMNS and LINES do not follow when it changes."""
    try:
        size = os.get_terminal_size(sys.stdin.fileno())
    except OSError:
        size = os.terminal_size((0, 0))
    return size if size.lines and size.columns else os.terminal_size((80, 24))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _copy_output(running: Running, *, told: bool = True) -> ExecResult:
    from shoal.cli.execute import result_from

    sys.stdout.flush()
    sys.stderr.flush()
    for event in running.stream():
        if event.kind == "exit":
            return result_from(event.payload)
        dropped = event.payload.get("dropped_bytes")
        if dropped and told:
            note = f"shoal: {dropped} bytes of {event.kind} were not kept; let it go to a file, and `shoal cp` that\n"
            _write(sys.stderr.fileno(), note.encode())
        if event.kind in {"stdout", "stderr"}:
            target = sys.stdout if event.kind == "stdout" else sys.stderr
            _write(target.fileno(), event.data)
    return running.wait()


@contextmanager
def _killed_on_exit(running: Running) -> Iterator[None]:
    """An interrupt here ends the command there."""
    try:
        yield
    except BaseException:
        try:
            running.kill()
        except (ShoalError, OSError):
            pass  # what interrupted us matters more; the session's end ends it
        raise


def _stdin_kind() -> str:
    """`none`: a terminal, closed, or /dev/null; `file`: small enough to send at once; `stream`: the rest."""
    try:
        descriptor = sys.stdin.fileno()
        status = os.fstat(descriptor)
    except (OSError, ValueError, AttributeError):
        return "none"
    if os.isatty(descriptor) or stat.S_ISCHR(status.st_mode):
        return "none"
    return "file" if stat.S_ISREG(status.st_mode) and status.st_size <= _INLINE_BYTES else "stream"


def pipe(box: Session, command: str | list[str], options: dict[str, Any]) -> ExecResult:
    """Runs a command with this process's streams; its output appears as it comes."""
    with _started(box, command, {**options, **_EXACT}) as running:
        return _copy_output(running)


def collect(box: Session, command: str | list[str], options: dict[str, Any]) -> ExecResult:
    """Runs a command with this process's stdin; its output is in the result."""
    with _started(box, command, options) as running:
        return running.wait()


@contextmanager
def _started(box: Session, command: str | list[str], options: dict[str, Any]) -> Iterator[Running]:
    kind = _stdin_kind()
    if kind == "file":
        options = {**options, "stdin": sys.stdin.buffer.read()}
    running = box.start(command, stdin_open=kind == "stream", **options)
    with _killed_on_exit(running):
        if kind == "stream":
            # A daemon: when the command ends first, nobody waits for the rest of the input.
            threading.Thread(target=_feed, args=(running, sys.stdin.fileno()), daemon=True).start()
        yield running


def _feed(running: Running, descriptor: int) -> None:
    try:
        while data := os.read(descriptor, _CHUNK):
            running.write(data)
        running.close_stdin()
    except (ActionNotRunning, NotFound):
        pass  # it has ended, as `head` does
    except (ShoalError, OSError) as error:
        _write(sys.stderr.fileno(), f"shoal: input was cut off: {error}\n".encode())


def interact(box: Session, command: str | list[str], options: dict[str, Any]) -> ExecResult:
    """Runs a command on a terminal of its own that looks like this one."""
    env = {"TERM": os.environ.get("TERM", "xterm-256color"), **options.get("env", {})}
    size = _size()
    running = box.start(
        command,
        stdin_open=True,
        tty=(size.lines, size.columns),
        **{**options, **_EXACT, "env": env},
    )
    with _killed_on_exit(running), _Keyboard(running):
        return _copy_output(running, told=False)


class _Keyboard:
    """Sends what is typed and the terminal's size; the terminal is in raw mode meanwhile."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._descriptor = sys.stdin.fileno()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._before: Any = None
        self._before_resize: Any = None

    def __enter__(self) -> _Keyboard:
        if os.isatty(self._descriptor):
            self._before = termios.tcgetattr(self._descriptor)
            tty.setraw(self._descriptor)
            self._before_resize = signal.signal(
                signal.SIGWINCH, lambda number, frame: os.write(self._wake_write, b"r")
            )
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        os.write(self._wake_write, b"q")
        if self._before is not None:
            signal.signal(signal.SIGWINCH, self._before_resize)
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _send(self) -> None:
        try:
            watched = [self._descriptor, self._wake_read]
            while True:
                ready, _, _ = select.select(watched, [], [])
                if self._wake_read in ready:
                    orders = os.read(self._wake_read, 4096)
                    if b"q" in orders:
                        return
                    size = _size()
                    self._running.resize(size.lines, size.columns)
                if self._descriptor in ready:
                    data = os.read(self._descriptor, _CHUNK)
                    if not data:
                        self._running.close_stdin()
                        watched.remove(self._descriptor)
                        continue
                    self._running.write(data)
        except (ActionNotRunning, NotFound):
            pass  # it has ended
        except (ShoalError, OSError) as error:
            _write(sys.stderr.fileno(), f"\r\nshoal: input was cut off: {error}\r\n".encode())
