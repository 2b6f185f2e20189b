"""Code contexts: one of the image's own `python3` per name, whose state lives on.

The interpreter runs `driver.py` on a socket as descriptor 3. Each command is a message with five
descriptors: stdin, stdout, stderr, where the result goes, and the code.
"""

from __future__ import annotations

import _socket
import os
from errno import EPIPE
from struct import Struct

from . import wire
from .process import Input, Process
from .residents import Resident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .residents import Reply

_STATUS = Struct("<i")


class Context(Resident):
    """One Python context."""

    kind = "context"
    _sock: _socket.socket | None = None

    def launch(self, spec: dict[str, Any], procs_fd: int | None, reply: Reply) -> None:
        """Start the image's python3."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._sock = ours
        self.report_fd = os.dup(ours.fileno())
        driver = os.path.join(os.path.dirname(__file__), "driver.py")
        argv = [spec.get("python") or "python3", driver]
        try:
            self.start({**spec, "argv": argv}, {3: theirs.fileno()}, procs_fd, reply)
        except OSError:
            os.close(self.report_fd)
            ours.close()
            raise
        finally:
            theirs.close()

    def run(self, process: Process, spec: dict[str, Any]) -> None:
        """Make the streams and hand over the code."""
        assert self._sock is not None
        code = spec["code"]
        raw = code if isinstance(code, bytes) else code.encode("utf-8", "surrogateescape")
        limit = int(spec["limit"])
        theirs: list[int] = []
        try:
            if spec["stdin"] == "empty":
                theirs.append(os.dup(self.guest.devnull))
            else:
                reading, writing = os.pipe2(os.O_CLOEXEC)
                theirs.append(reading)
                process.stdin = Input(process, writing)
                data = spec.get("stdin_data")
                if data is not None:
                    process.stdin.feed(data)
                    process.stdin.end()
            for number in (wire.STDOUT, wire.STDERR, wire.RESULT):
                reading, writing = os.pipe2(os.O_CLOEXEC)
                theirs.append(writing)
                process.add_output(number, reading, limit)
            memory = os.memfd_create("code", os.MFD_CLOEXEC)
            theirs.append(memory)
            while raw:
                raw = raw[os.write(memory, raw) :]
            os.lseek(memory, 0, os.SEEK_SET)
            rights = b"".join(fd.to_bytes(4, "little") for fd in theirs)
            try:
                self._sock.sendmsg([b"C"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
            except OSError as err:
                # Its exit is on the way and will say so; before that nothing is known.
                if err.errno != EPIPE:
                    raise
        finally:
            for fd in theirs:
                os.close(fd)

    def read_report(self) -> None:
        """The status of the code, four bytes."""
        data = os.read(self.report_fd, _STATUS.size)
        if len(data) == _STATUS.size:
            self.finish(_STATUS.unpack(data)[0] & 255)
        elif not data:
            self.guest.loop.unwatch(self.report_fd)

    def cleanup(self) -> None:
        """Let go of the socket."""
        if self._sock is not None:
            self._sock.close()
