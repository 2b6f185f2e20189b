"""Pipes between agent and a helper of the guest, without blocking and in constant memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgpack  # type: ignore[import-untyped]

from runtime_image.guest.wire import WireError
from runtime_image.guest.workers import BYTES, CHUNK, ITEM, PIECE, RECORD, RESULT

from .errors import LinkError

# What one read or write moves; the default of 64 KiB costs a switch to the helper every time.
_PIPE_BYTES = 1 << 20
_MAP_BYTES = 64 << 10


def make_pipe() -> tuple[int, int]:
    """(read end, write end), both closed on exec, as large as the system allows."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        # Over the user's allowance; it works at its default size.
        pass
    return ends


class _Pipe:
    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._closed = False
        self._waiting: tuple[asyncio.Future[None], Callable[[int], Any]] | None = None

    def close(self) -> None:
        """Close our end. Repeatable; who waits for it meets a LinkError."""
        if self._closed:
            return
        self._closed = True
        if self._waiting is not None:
            ready, remove = self._waiting
            remove(self._fd)
            if not ready.done():
                ready.set_exception(LinkError("the stream was closed"))
        os.close(self._fd)

    async def _wait(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        if self._closed:
            raise LinkError("the stream was closed")
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(self._fd, wake)
        self._waiting = (ready, remove)
        try:
            await ready
        finally:
            self._waiting = None
            if not self._closed:
                remove(self._fd)


class RecordReader(_Pipe):
    """Reads the records of a helper, checked.

    Raises (from `next`):
        WireError: not a record, or larger than its kind may be.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._buffer = bytearray()
        self._at = 0
        self._left = 0

    async def next(self, *, size: int = PIECE) -> tuple[int, Any]:
        """The next record: (ITEM, map), (RESULT, map), (BYTES, at most `size` bytes); (0, None) at the end.

        Content of one BYTES record may come in several pieces.
        """
        if self._left:
            return BYTES, await self._content(size)
        if not await self._have(RECORD.size):
            return 0, None
        kind, length = RECORD.unpack_from(self._buffer, self._at)
        self._at += RECORD.size
        if kind == BYTES and 0 < length <= PIECE:
            self._left = length
            return BYTES, await self._content(size)
        if kind not in (ITEM, RESULT) or length > _MAP_BYTES:
            raise WireError(f"record of kind {kind}, {length} bytes")
        if not await self._have(length):
            return 0, None
        body = memoryview(self._buffer)[self._at : self._at + length]
        try:
            value = unpack_map(body)
        finally:
            body.release()
        self._at += length
        return kind, value

    async def _content(self, size: int) -> bytes:
        if self._at == len(self._buffer) and not await self._have(1):
            self._left = 0
            return b""
        end = min(len(self._buffer), self._at + min(self._left, size))
        data = bytes(memoryview(self._buffer)[self._at : end])
        self._at = end
        self._left -= len(data)
        return data

    async def _have(self, size: int) -> bool:
        while len(self._buffer) - self._at < size:
            if self._at:
                del self._buffer[: self._at]
                self._at = 0
            if self._closed:
                raise LinkError("the stream was closed")
            try:
                data = os.read(self._fd, PIECE)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await self._wait(loop.add_reader, loop.remove_reader)
                continue
            if not data:
                return False
            self._buffer += data
        return True


class ChunkWriter(_Pipe):
    """Writes chunks to a helper."""

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """One chunk for each `PIECE`, waiting while the pipe is full.

        Raises:
            BrokenPipeError: the helper is gone.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            await self._write([memoryview(CHUNK.pack(len(piece))), piece])

    async def finish(self) -> None:
        """Say that this was all.

        Raises:
            BrokenPipeError: the helper is gone.
        """
        await self._write([memoryview(CHUNK.pack(0))])

    async def _write(self, pieces: list[memoryview]) -> None:
        while pieces:
            if self._closed:
                raise LinkError("the stream was closed")
            try:
                count = os.writev(self._fd, pieces)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await self._wait(loop.add_writer, loop.remove_writer)
                continue
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][count:]


def pack_map(value: Mapping[str, Any]) -> bytes:
    """What the guest reads as a map; its own packer, in Python, is for where there is no other."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogateescape")
    return packed


def unpack_map(body: memoryview) -> dict[str, Any]:
    """A map from the guest: string keys, bounded by the bytes it came in.

    Raises:
        WireError: anything else.
    """
    try:
        value = msgpack.unpackb(body, raw=False, strict_map_key=True, unicode_errors="replace", max_ext_len=0)
    except Exception as err:  # noqa: BLE001 - the library's errors have no common base; all mean the same
        raise WireError(f"not a packed map: {err!r:.80}") from None
    if not isinstance(value, dict):
        raise WireError("not a map")
    return value
