"""Named shells: one bash (or sh) per name, whose directory, variables and functions live on.

The shell runs a loop that reads commands from descriptor 8 and reports on 9; both are closed for
the commands themselves. Each command gets streams of its own by FIFOs, opened by the loop as it
would open any redirection and unlinked as soon as they are open: what an earlier command left
running keeps the earlier ones. So output is apart, exact and complete, and no prompt is in it.
"""

from __future__ import annotations

import os
from errno import EINVAL, ENOSYS

from . import wire
from .feeder import Feeder
from .launch import DEFAULT_PATH, find_shell
from .process import Input, Process
from .residents import Resident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .init import Guest
    from .residents import Reply

# A FIFO needs an entry somewhere, no space; the first of these that takes one is used.
_DIRECTORIES = ("/dev/shm", "/tmp", "/var/tmp", "/")

# `$?` of the command before is what the next one sees; in a condition, lest `set -e` ends it all.
_RUN = """\
  { %(say)s B >&9; if __shoal_status "$__shoal_last"; then eval "$__shoal_command"; else eval "$__shoal_command"; fi 8<&- 9>&-
  } <"$__shoal_in" >"$__shoal_out" 2>"$__shoal_err"
  __shoal_last=$?
  %(say)s "E$__shoal_last" >&9
done
"""  # noqa: E501
_BASH = (
    """\
__shoal_last=0
__shoal_status() { builtin return "$1"; }
__shoal_next() { IFS= builtin read -r -d '' -u 8 "$1"; }
while __shoal_next __shoal_in && __shoal_next __shoal_out && __shoal_next __shoal_err && __shoal_next __shoal_command
do
"""
    + _RUN % {"say": "builtin printf '%s\\n'"}
)
# POSIX `read` ends at a line: the command comes line by line, up to a line that is not in it.
_SH = (
    """\
__shoal_last=0
__shoal_status() { return "$1"; }
while IFS= read -r __shoal_in <&8 && IFS= read -r __shoal_out <&8 && IFS= read -r __shoal_err <&8 &&
  IFS= read -r __shoal_end <&8
do
  __shoal_command=
  while IFS= read -r __shoal_line <&8 && [ "$__shoal_line" != "$__shoal_end" ]; do
    __shoal_command="$__shoal_command$__shoal_line
"
  done
"""
    + _RUN % {"say": "printf '%s\\n'"}
)


class Shell(Resident):
    """One named shell."""

    kind = "shell"

    def __init__(self, guest: Guest, *, restarted: bool) -> None:
        super().__init__(guest, restarted=restarted)
        self._control: Feeder | None = None
        self._bash = False
        self._directory: str | None = None
        self._names: list[str] = []
        self._heard = b""

    def launch(self, spec: dict[str, Any], procs_fd: int | None, reply: Reply) -> None:
        """Start bash, or sh where the image has none."""
        path = (spec.get("env") or {}).get("PATH", DEFAULT_PATH)
        shell = spec.get("shell_kind") or find_shell(path)
        self._bash = shell.rpartition("/")[2] == "bash"
        login = ["-l"] if spec.get("login") else []
        quiet = ["--norc", *(["--noprofile"] if not login else [])] if self._bash else []
        argv = [shell, *quiet, *login, "-c", _BASH if self._bash else _SH, shell.rpartition("/")[2]]
        commands, control = os.pipe2(os.O_CLOEXEC)
        self.report_fd, report = os.pipe2(os.O_CLOEXEC)
        try:
            self.start({**spec, "argv": argv}, {8: commands, 9: report}, procs_fd, reply)
        except OSError:
            os.close(control)
            os.close(self.report_fd)
            raise
        finally:
            os.close(commands)
            os.close(report)
        self._control = Feeder(self.guest.loop, control)

    def run(self, process: Process, spec: dict[str, Any]) -> None:
        """Make the streams and hand over the command."""
        command = spec["command"]
        raw = command if isinstance(command, bytes) else command.encode("utf-8", "surrogateescape")
        if b"\0" in raw:
            raise OSError(EINVAL, "the command has a NUL byte in it")
        if spec.get("tty"):
            raise OSError(ENOSYS, "a named shell has no terminal")
        self._directory = _make_directory()
        limit = int(spec["limit"])
        for number in (wire.STDOUT, wire.STDERR):
            process.add_output(
                number, os.open(self._fifo(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), limit
            )
        out, err = self._names
        stdin = "/dev/null"
        if spec["stdin"] != "empty":
            stdin = self._fifo()
            # Both directions, for there is no reader yet; its end must wait until there is.
            process.stdin = Input(process, os.open(stdin, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            process.stdin.may_close = False
            data = spec.get("stdin_data")
            if data is not None:
                process.stdin.feed(data)
                process.stdin.end()
        names = [os.fsencode(name) for name in (stdin, out, err)]
        assert self._control is not None
        if self._bash:
            self._control.write(b"\0".join([*names, raw, b""]))
        else:
            mark = b"__shoal_end_" + os.urandom(12).hex().encode()
            self._control.write(b"\n".join([*names, mark, raw, mark, b""]))

    def read_report(self) -> None:
        """`B`: the command begins. `E` and a number: it ended with that status."""
        data = os.read(self.report_fd, 4096)
        if not data:
            self.guest.loop.unwatch(self.report_fd)
            return
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            if line == b"B":
                self._begun()
            elif line[:1] == b"E":
                self.finish(int(line[1:]) & 255)

    def cleanup(self) -> None:
        """Take away what a shell that is gone never opened."""
        process = self.process
        if self._directory is not None and process is not None:
            for output in process.outputs.values():
                # What it may have printed before the last word was heard.
                while output.read_some():
                    pass
                output.close()
        self._remove_names()
        if self._control is not None:
            self._control.close()

    def _begun(self) -> None:
        self._remove_names()
        stdin = self.process.stdin if self.process is not None else None
        if stdin is not None:
            stdin.let_close()

    def _fifo(self) -> str:
        assert self._directory is not None
        name = f"{self._directory}/{os.urandom(8).hex()}"
        os.mkfifo(name, 0o600)
        # The shell may be another user's; who does not know the name does not find it.
        os.chmod(name, 0o666)
        self._names.append(name)
        return name

    def _remove_names(self) -> None:
        for name in self._names:
            try:
                os.unlink(name)
            except OSError:
                pass
        self._names.clear()
        if self._directory is not None:
            try:
                os.rmdir(self._directory)
            except OSError:
                pass
            self._directory = None


def _make_directory() -> str:
    failed: OSError | None = None
    for parent in _DIRECTORIES:
        directory = f"{parent.rstrip('/')}/.shell-{os.urandom(8).hex()}"
        try:
            os.mkdir(directory, 0o711)
        except OSError as err:
            failed = err
        else:
            return directory
    assert failed is not None
    raise failed
