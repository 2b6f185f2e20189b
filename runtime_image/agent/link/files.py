"""File operations: the agent's end of a helper that the guest forks for each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from runtime_image.guest.wire import WireError
from runtime_image.guest.workers import BYTES, ITEM, READING, RESULT

from .errors import FileError, OperationError, WorkerKilledError
from .pipes import ChunkWriter, RecordReader, make_pipe

if TYPE_CHECKING:
    from .connection import Connection

# What one `file_op` may bring back: READ_LIMIT of the guest and some more for long lists.
RESULT_LIMIT_BYTES = 20 << 20
# Content that rides on the request itself.
_INLINE_CONTENT = 32 << 10
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "kind": str, "size_bytes": int, "mode": int, "mtime_ns": int, "uid": int, "gid": int,
    "link_target": bytes, "eof": bool, "truncated": bool, "created": bool, "removed": bool,
    "replacements": int, "matches": int, "near": list, "diff": bytes, "diff_truncated": bool,
    "skipped": int, "files": int, "members": int, "path": bytes, "line": int, "text": bytes, "cut": bool,
    "error": dict, "errno": str, "message": str,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What a stream is of."""

    kind: str
    """"file", or "directory": the stream is a tar."""
    size_bytes: int
    """Of the file when it was opened; 0 for what has no size of its own (/proc), and for a directory
    that of its entry. The stream's end tells the truth."""
    mode: int
    mtime_ns: int
    uid: int
    gid: int


class WorkerCall:
    """One helper: its pipes, and its end. Used once; `close` is always called."""

    def __init__(
        self, link: Connection, body: Mapping[str, Any], procs_fd: int | None, *, takes_input: bool
    ) -> None:
        opened: list[int] = []
        try:
            out, their_out = make_pipe()
            opened += (out, their_out)
            fds = {"out": their_out}
            if takes_input:
                their_in, inlet = make_pipe()
                opened += (their_in, inlet)
                fds["in"] = their_in
            if procs_fd is not None:
                fds["procs"] = procs_fd
            self.link = link
            self._ident, self._ended = link.begin_request({"op": "file", **body}, fds)
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        os.close(their_out)
        self.reader = RecordReader(out)
        self.writer: ChunkWriter | None = None
        if takes_input:
            os.close(their_in)
            self.writer = ChunkWriter(inlet)
        # One that writes ends by itself when its pipe does, and removes what it had begun.
        self._may_kill = body["do"] in READING

    async def next(self) -> tuple[int, Any]:
        """The next record; the one after the last is (0, None).

        Raises:
            LinkViolationError: it is not one a helper sends.
        """
        try:
            kind, value = await self.reader.next()
            if kind in (ITEM, RESULT):
                _check(value)
        except WireError as err:
            raise self.link.violation(str(err)) from None
        return kind, value

    async def end(self) -> None:
        """Wait until the helper is gone.

        Raises:
            OperationError: it was never there: no process could be made.
            WorkerKilledError: it was killed.
            LinkClosedError: the guest is gone.
        """
        answer = await self.link.finish_request(self._ident, self._ended)
        signal = answer.get("signal")
        if signal is not None:
            raise WorkerKilledError(signal if isinstance(signal, int) else 0)

    def close(self) -> None:
        """Close the pipes; a helper that only reads is killed if it is still at work. Repeatable."""
        self.reader.close()
        if self.writer is not None:
            self.writer.close()
        self.link.abandon_request(self._ident, cancel=self._may_kill)


async def file_op(
    link: Connection, op: Mapping[str, Any], *, procs_fd: int | None, limit_bytes: int
) -> dict[str, Any]:
    """See `GuestLink.file_op`."""
    body = {key: value for key, value in op.items() if key != "op"}
    body["do"] = op["op"]
    content = memoryview(body.get("content") or b"")
    streamed = len(content) > _INLINE_CONTENT
    if streamed:
        del body["content"]
    call = WorkerCall(link, body, procs_fd, takes_input=streamed)
    try:
        pieces: list[bytes] = []
        items: list[dict[str, Any]] = []
        seen = 0
        result: dict[str, Any] | None = None
        while result is None:
            kind, value = await call.next()
            if kind == BYTES:
                pieces.append(value)
                seen += len(value)
            elif kind == ITEM and streamed and call.writer is not None:
                await _send_all(call.writer, content)
            elif kind == ITEM:
                items.append(value)
                seen += 128 + sum(len(field) for field in value.values() if isinstance(field, (bytes, str)))
            elif kind == RESULT:
                result = value
            else:
                break
            if seen > limit_bytes:
                return _assemble(op["op"], {"truncated": True}, items, pieces)
        try:
            await call.end()
        except WorkerKilledError:
            if result is None:
                raise
        except OperationError as err:
            return {"error": {"errno": err.errno_name or "EIO", "message": err.message}}
        if result is None:
            raise link.violation("a helper without result")
        return _assemble(op["op"], result, items, pieces)
    finally:
        call.close()


async def _send_all(writer: ChunkWriter, content: memoryview) -> None:
    try:
        await writer.write(content)
        await writer.finish()
    except BrokenPipeError:
        # The helper gave up; its result says why.
        pass


def _assemble(
    op: str, result: dict[str, Any], items: list[dict[str, Any]], pieces: list[bytes]
) -> dict[str, Any]:
    if "error" in result:
        return result
    if op == "read":
        result["content"] = b"".join(pieces)
    elif op == "list":
        result["entries"] = items
    elif op == "search":
        result["matches"] = items
    return result


class FileReader:
    """A file's content, or a directory's tar, as it comes. Async iterable; an async context manager.

    Attributes:
        info: what was opened.
    """

    def __init__(self, call: WorkerCall, info: FileInfo) -> None:
        self._call = call
        self.info = info
        self._done = False

    @classmethod
    async def open(cls, link: Connection, body: Mapping[str, Any], procs_fd: int | None) -> FileReader:
        """See `GuestLink.open_read`."""
        call = WorkerCall(link, {**body, "do": "open"}, procs_fd, takes_input=False)
        try:
            first = await _first(link, call)
            info = FileInfo(**{name: _need(link, first, name) for name in FileInfo.__dataclass_fields__})
        except BaseException:
            call.close()
            raise
        return cls(call, info)

    async def read(self) -> bytes:
        """The next piece, at most 1 MiB; empty once, at the end, when all has come.

        Raises:
            FileError: reading failed in between.
            WorkerKilledError: the operation was killed; what came is not all.
            LinkClosedError: the guest is gone.
        """
        if self._done:
            return b""
        kind, value = await self._call.next()
        if kind == BYTES and value:
            return bytes(value)
        await self._call.end()
        if kind != RESULT:
            raise self._call.link.violation("a stream that breaks off")
        _raise_error(value)
        self._done = True
        return b""

    async def __aiter__(self) -> Any:
        while data := await self.read():
            yield data

    async def aclose(self) -> None:
        """Stop. Repeatable."""
        self._call.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class FileWriter:
    """A file, or a tree from a tar, being written. Leaving the context without `commit` aborts.

    Until `commit` nothing is to be seen of a file; if the agent dies before, nothing ever is. Of a
    tar, what was unpacked stays.
    """

    def __init__(self, call: WorkerCall) -> None:
        self._call = call
        self._failed = False

    @classmethod
    async def open(cls, link: Connection, body: Mapping[str, Any], procs_fd: int | None) -> FileWriter:
        """See `GuestLink.open_write`."""
        call = WorkerCall(link, body, procs_fd, takes_input=True)
        try:
            await _first(link, call)
        except BaseException:
            call.close()
            raise
        return cls(call)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; waits while the sandbox is slower. Failures of the disk show at `commit`."""
        assert self._call.writer is not None
        if not self._failed:
            try:
                await self._call.writer.write(data)
            except BrokenPipeError:
                self._failed = True

    async def commit(self) -> dict[str, Any]:
        """Put the file in its place.

        Returns:
            kind, size_bytes, mode, mtime_ns, uid, gid, and `created`; of a tar `members`.

        Raises:
            FileError: it could not be written (ENOSPC, ...); the old one is still there.
            WorkerKilledError, LinkClosedError: as for `FileReader.read`; whether it is in place
                is then unknown.
        """
        assert self._call.writer is not None
        try:
            await self._call.writer.finish()
        except BrokenPipeError:
            pass
        kind, value = await self._call.next()
        await self._call.end()
        if kind != RESULT:
            raise self._call.link.violation("a write without result")
        _raise_error(value)
        return dict(value)

    async def abort(self) -> None:
        """Forget it. Repeatable, also after `commit`."""
        self._call.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.abort()


async def _first(link: Connection, call: WorkerCall) -> dict[str, Any]:
    kind, value = await call.next()
    if kind == ITEM:
        return dict(value)
    try:
        await call.end()
    except WorkerKilledError:
        raise
    except OperationError as err:
        raise FileError(err.errno_name or "EIO", err.message) from None
    if kind != RESULT:
        raise link.violation("a stream without its first record")
    _raise_error(value)
    raise link.violation("a stream that ends before it begins")


def _raise_error(value: dict[str, Any]) -> None:
    error = value.get("error")
    if error is not None:
        raise FileError(str(error.get("errno", "EIO")), str(error.get("message", "")))


def _need(link: Connection, value: dict[str, Any], name: str) -> Any:
    if value.get(name) is None:
        raise link.violation(f"a file without {name}")
    return value[name]


def _check(value: dict[str, Any]) -> None:
    for key, item in value.items():
        if not _fits(item, _FIELDS.get(key)):
            raise WireError(f"field {key:.40} is {item!r:.40}")
        if key == "error":
            _check(item)
            if not {"errno", "message"} <= item.keys():
                raise WireError("an error without its reason")
        if key == "near":
            if len(item) > 16 or not all(isinstance(line, dict) for line in item):
                raise WireError("odd near lines")
            for line in item:
                _check(line)


def _fits(item: Any, kind: type | tuple[type, ...] | None) -> bool:
    return kind is not None and (item is None or isinstance(item, kind))
