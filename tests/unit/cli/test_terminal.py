"""Commands' streams through the real program: its own process, a real socket, a real terminal."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.fake_service import FakeService

ROOT = Path(__file__).parents[3]
RECORD = {"id": "x", "epoch": 1, "status": "running", "action": {"type": "exec", "command": "x"}}


class Echo:
    """A command that prints what it is sent, and ends with 9 at a `q` or when its input is closed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.printed = b"ready "
        self.ended = False
        self.killed = False
        self.sizes: list[tuple[int, int]] = []
        self.action: dict[str, Any] = {}

    def take(self, body: dict[str, Any]) -> None:
        data = body.get("data", "")
        raw = base64.b64decode(data) if body.get("encoding") == "base64" else data.encode()
        with self.changed:
            self.printed += b"[" + raw.hex().encode() + b"]" if raw else b""
            self.ended = self.ended or body.get("close", False) or b"q" in raw
            self.changed.notify_all()

    def after(self, sent: int) -> tuple[bytes, bool]:
        with self.changed:
            self.changed.wait_for(lambda: len(self.printed) > sent or self.ended, 30)
            return self.printed[sent:], self.ended

    def kill(self) -> None:
        with self.changed:
            self.ended = self.killed = True
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: FakeService
    echo: Echo

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def answer(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def body(self) -> dict[str, Any]:
        raw = self.rfile.read(int(self.headers.get("content-length", "0")))
        return dict(json.loads(raw)) if raw else {}

    def do_POST(self) -> None:
        body = self.body()
        if self.path.endswith("/stdin"):
            self.echo.take(body)
        elif self.path.endswith("/resize"):
            with self.echo.changed:
                self.echo.sizes.append((body["rows"], body["cols"]))
                self.echo.changed.notify_all()
        else:
            self.echo.action = body["action"]
            return self.answer(202, {**RECORD, "id": body["id"]})
        return self.answer(200, {})

    def do_DELETE(self) -> None:
        self.echo.kill()
        self.answer(200, {})

    def do_GET(self) -> None:
        if not self.path.endswith("/stream"):
            return self.answer(200, self.service.sessions["ses_1"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = 0
        while True:
            fresh, ended = self.echo.after(sent)
            sent += len(fresh)
            if fresh:
                data = {"data": base64.b64encode(fresh).decode(), "encoding": "base64"}
                self.event("stdout", sent, data)
            if ended:
                seen = (
                    {"type": "exec", "signal": "KILL"}
                    if self.echo.killed
                    else {"type": "exec", "exit_code": 9}
                )
                self.event("exit", sent, {**RECORD, "status": "done", "observation": seen})
                return None

    def event(self, kind: str, at: int, data: dict[str, Any]) -> None:
        self.wfile.write(f"event: {kind}\nid: {at}-0\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    service, echo = FakeService(), Echo()
    service.session()
    handler = type("Bound", (Handler,), {"service": service, "echo": echo})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("SHOAL_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("SHOAL_API_KEY", "key")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield echo
    echo.kill()
    server.shutdown()
    thread.join()
    server.server_close()


class Terminal:
    """The program on a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.program = subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments], stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.seen = b""

    def read_until(self, pattern: bytes) -> None:
        deadline = time.monotonic() + 30
        while not re.search(pattern, self.seen):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.master], [], [], left)[0]:
                raise AssertionError(f"{pattern!r} did not come: {self.seen!r}")
            try:
                self.seen += os.read(self.master, 65_536)
            except OSError:
                raise AssertionError(f"ended without {pattern!r}: {self.seen!r}") from None

    def end(self) -> int:
        """Waits for it; its exit code. The terminal is left open."""
        return self.program.wait(30)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.program.kill()
        terminal.program.wait()
        os.close(terminal.master)


def test_a_terminal_is_raw_and_passes_everything_on(served: Echo, terminals: list[Terminal]) -> None:
    """Ctrl-C, Ctrl-D and escape sequences are the command's; its size follows; its exit code comes out."""
    terminal = Terminal("exec", "-t", "ses_1", "top")
    terminals.append(terminal)
    terminal.read_until(rb"ready")
    assert served.action["tty"] == {"rows": 24, "cols": 80}
    assert "TERM" in served.action["env"]
    for keys in (b"\x03", b"\x04", b"\x1b[A", "é".encode()):
        os.write(terminal.master, keys)
        terminal.read_until(rb"\[" + keys.hex().encode() + rb"\]")
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    terminal.program.send_signal(signal.SIGWINCH)
    with served.changed:
        assert served.changed.wait_for(lambda: (40, 120) in served.sizes, 30)
    os.write(terminal.master, b"q")
    assert terminal.end() == 9


def test_a_hang_up_kills_the_command_and_mends_the_terminal(served: Echo, terminals: list[Terminal]) -> None:
    """SIGTERM unwinds: the command is killed, the terminal is as it was."""
    terminal = Terminal("exec", "-t", "ses_1", "top")
    terminals.append(terminal)
    terminal.read_until(rb"ready")
    assert not termios.tcgetattr(terminal.master)[3] & termios.ICANON
    terminal.program.send_signal(signal.SIGTERM)
    with served.changed:
        assert served.changed.wait_for(lambda: served.killed, 30)
    assert terminal.end() == 128 + signal.SIGTERM
    assert termios.tcgetattr(terminal.master)[3] & termios.ICANON


def test_piped_input_reaches_the_command_as_it_comes(served: Echo) -> None:
    """Bytes are exact, and the end of the input closes its stdin."""
    command = [sys.executable, "-m", "shoal", "exec", "ses_1", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(b"\x00\xff")
        program.stdin.flush()
        with served.changed:
            assert served.changed.wait_for(lambda: b"[00ff]" in served.printed, 30)
        program.stdin.close()
        assert program.stdout.read() == b"ready [00ff]"
        assert program.wait() == 9
    assert served.action["stdin_open"] is True


def test_a_command_that_ends_does_not_wait_for_its_input(served: Echo) -> None:
    """A pipe that nobody closes holds nothing up."""
    command = [sys.executable, "-m", "shoal", "exec", "ses_1", "true"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.read(6) == b"ready "
        served.take({"data": "q"})
        assert program.wait(30) == 9


def test_ctrl_c_kills_the_command(served: Echo) -> None:
    """The program ends with 130; the command's process tree is killed."""
    command = [sys.executable, "-m", "shoal", "exec", "ses_1", "sleep 100"]
    # Ctrl-C is ignored in what a shell runs in the background, these tests perhaps: not by who sits at a terminal.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as program:
        assert program.stdout is not None
        assert program.stdout.read(6) == b"ready "
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 130
    assert served.killed
    assert "stdin" not in served.action
