"""Forked helpers of the guest: every file operation runs in one.

A helper can be slow, big, or stuck in a regular expression without anybody noticing: it is in the
kill group of its action, counts for the sandbox's limits, gives its memory back when it ends, and
acts as the session's user. It speaks by two pipes of the agent's, so the guest never handles what
it reads or writes.

    out   records: u8 kind, u32 size, body. ITEM: a map; BYTES: content; RESULT: a map, the last.
    in    chunks: u32 size, bytes; size 0 says that all has come. An end without it is an abort.
"""

from __future__ import annotations

import gc
import os
from errno import ECANCELED, EINVAL, EIO, EPIPE, errorcode
from struct import Struct

from .accounts import Account
from .launch import become_user, die_first, enter_group
from .pack import dumps
from .system import die_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Operation = Callable[[dict[str, Any], "Sink", "Source"], dict[str, Any]]

RECORD = Struct("<BI")
CHUNK = Struct("<I")
ITEM, BYTES, RESULT = 1, 2, 3
# Largest body of a BYTES record and of a chunk.
PIECE = 1 << 20
# Operations that leave nothing half done when they are killed. The others end by themselves, soon
# or when their pipe does, and clean up.
READING = ("read", "open", "list", "search", "stat")


class Sink:
    """Writes records to the agent's pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held: list[bytes] = []
        self._size = 0

    def item(self, value: dict[str, Any]) -> None:
        """One entry of a list; sent in batches."""
        body = dumps(value)
        self._held += (RECORD.pack(ITEM, len(body)), body)
        self._size += len(body)
        if self._size > 32 << 10:
            self.flush()

    def data(self, data: bytes | memoryview) -> None:
        """Content, in order; at most `PIECE` bytes."""
        if data:
            self._held.append(RECORD.pack(BYTES, len(data)))
            self.flush(data)

    def result(self, value: dict[str, Any]) -> None:
        """The end."""
        body = dumps(value)
        self._held += (RECORD.pack(RESULT, len(body)), body)
        self.flush()

    def flush(self, last: bytes | memoryview = b"") -> None:
        """Send what is held."""
        pieces: list[memoryview] = [memoryview(b"".join(self._held)), memoryview(last)]
        self._held.clear()
        self._size = 0
        while pieces:
            count = os.writev(self._fd, pieces)
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][count:]


class Source:
    """Reads chunks from the agent's pipe; a file object as tarfile wants one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._left = 0
        self.complete = False

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty only at the end.

        Raises:
            OSError: ECANCELED, the agent went away before it said that this was all.
        """
        if not self._begin():
            return b""
        data = self._take(min(size, self._left))
        self._left -= len(data)
        return data

    def copy_to(self, fd: int) -> None:
        """All of it, to a file, without a detour through this process.

        Raises:
            OSError: as `read`, and what writing raises.
        """
        while self._begin():
            try:
                count = os.splice(self._fd, fd, self._left)
            except OSError as err:
                if err.errno != EINVAL:
                    raise
                # A file system that cannot.
                count = len(data := self._take(min(self._left, PIECE)))
                write_all(fd, data)
            if count == 0:
                raise OSError(ECANCELED, "the writer went away")
            self._left -= count

    def _begin(self) -> bool:
        """Be inside a chunk; False when all has come."""
        if self._left == 0 and not self.complete:
            header = b""
            while len(header) < CHUNK.size:
                header += self._take(CHUNK.size - len(header))
            (self._left,) = CHUNK.unpack(header)
            self.complete = self._left == 0
        return not self.complete

    def _take(self, size: int) -> bytes:
        data = os.read(self._fd, size)
        if not data:
            raise OSError(ECANCELED, "the writer went away")
        return data


def start_worker(request: dict[str, Any], account: Account, devnull: int, fds: dict[str, int]) -> int:
    """Fork a helper for `request`, as `account`.

    Returns:
        Its pid; it ends by itself.

    Raises:
        OSError: no process could be made.
    """
    pid = os.fork()
    if pid == 0:
        _work(request, account, devnull, fds)
    return pid


def _work(request: dict[str, Any], account: Account, devnull: int, fds: dict[str, int]) -> NoReturn:
    try:
        gc.disable()
        die_with_parent()
        os.setsid()
        enter_group(fds.get("procs"))
        os.dup2(fds["out"], 1)
        os.dup2(fds.get("in", devnull), 0)
        # This process does not exec, so nothing closes by itself: not the link, not the pipes of
        # others, whose ends would never come.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                try:
                    os.close(int(name))
                except OSError:
                    pass
        die_first()
        sink = Sink(1)
        try:
            sink.result(_perform(request, account, sink))
        except OSError as err:
            if err.errno == EPIPE:
                os._exit(0)
            sink.result(error_of(err))
        except MemoryError:
            sink.result({"error": {"errno": "ENOMEM", "message": "out of memory"}})
        except Exception as err:  # noqa: BLE001 - a forked child never returns, and the agent is told
            sink.result({"error": {"errno": "EIO", "message": f"{err!r:.1000}"}})
        os._exit(0)
    finally:
        os._exit(1)


def _perform(request: dict[str, Any], account: Account, sink: Sink) -> dict[str, Any]:
    operation = _operation(request["do"])
    os.umask(0o022)
    if account.uid or account.gid:
        become_user(account)
    os.chdir(request.get("cwd") or "/")
    return operation(request, sink, Source(0))


def _operation(name: str) -> Operation:
    # Loaded here, in the helper, so that no idle guest carries it.
    if name == "edit":
        from .edit import edit

        return edit
    if name in ("list", "search"):
        from . import search

        return search.list_files if name == "list" else search.search
    if name == "extract":
        from .tar import extract

        return extract
    from . import files

    operations: dict[str, Operation] = {
        "read": files.read,
        "write": files.write,
        "open": files.open_stream,
        "stat": files.status,
        "mkdir": files.mkdir,
        "remove": files.remove,
    }
    if name not in operations:
        raise bad(f"no file operation {name!r}")
    return operations[name]


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def error_of(err: OSError) -> dict[str, Any]:
    """A file error as a result."""
    message = err.strerror or str(err)
    if err.filename is not None:
        message = f"{message}: {os.fsdecode(err.filename)}"
    return {"error": {"errno": errorcode.get(err.errno or EIO, "EIO"), "message": message[:4096]}}


def bad(message: str, number: int = EINVAL) -> OSError:
    """A file error of our own."""
    return OSError(number, message)
