"""Moving whole objects by presigned URL: `file://` where store and host share a disk, HTTP elsewhere."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp

from shoal.contract.urls import Url

_CHUNK_BYTES = 1 << 20


class TransferError(Exception):
    """An object did not get across. `missing`: there is none at that URL."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class Transfer(Protocol):
    """Fetches and stores objects; raises TransferError."""

    async def get(self, url: Url, into: Path) -> int:
        """Write the object to `into` (made or replaced); gives its size."""

    async def put(self, url: Url, source: Path) -> None:
        """Store the file as the object; an object that is there already is left alone."""

    def read(self, url: Url) -> AsyncIterator[bytes]:
        """The object's bytes as they come; one that breaks off in the middle is a TransferError, not repeated."""

    async def close(self) -> None:
        """Drop the connections."""


def local_path(url: str) -> Path | None:
    """The path of a `file:` URL, None for any other."""
    parsed = urllib.parse.urlsplit(url)
    if parsed.scheme != "file":
        return None
    return Path(urllib.parse.unquote(parsed.path))


def _copy(source: Path, target: Path) -> int:
    """Copy aside, then rename, so that nobody ever sees half an object."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        shutil.copyfile(source, aside)
        size = aside.stat().st_size
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)
    return size


class _Passing(TransferError):
    """What may go better when it is tried again: the store is busy, or the connection broke."""


T = TypeVar("T")
#: Bytes of one part of a download, and parts on their way at once.
_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
#: Seconds before each repetition of a transfer.
_PAUSES_S = (0.2, 1.0, 3.0)
#: Of object stores that are busy: S3 says 503 SlowDown while it splits a part of its key space.
_BUSY = frozenset({429, 500, 502, 503, 504})


class UrlTransfer:
    """Transfers by URL; whole objects, streamed, with a deadline on silence; a busy store is asked again.

    Args:
        pause: Waits before a repetition.
    """

    def __init__(
        self, *, silence_s: float = 60.0, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=silence_s)
        self._http: aiohttp.ClientSession | None = None
        self._pause = pause

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=self._timeout)
        return self._http

    async def get(self, url: Url, into: Path) -> int:
        """Write the object to `into`; gives its size."""
        path = local_path(url.url)
        try:
            if path is not None:
                return await asyncio.to_thread(_copy, path, into)
            return await self._fetch(url, into)
        except FileNotFoundError as error:
            raise TransferError("no such object", missing=True) from error
        except OSError as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    async def put(self, url: Url, source: Path) -> None:
        """Store the file as the object."""
        if url.exists:
            return
        path = local_path(url.url)
        try:
            if path is not None:
                await asyncio.to_thread(_copy, source, path)
            else:
                await self._repeated(lambda: self._store(url, source))
        except OSError as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    async def read(self, url: Url) -> AsyncIterator[bytes]:
        """The object's bytes."""
        path = local_path(url.url)
        try:
            if path is not None:
                with await asyncio.to_thread(path.open, "rb") as file:
                    while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                        yield chunk
                return
            async with self._session().get(url.url, headers=url.headers) as response:
                _check(response.status, (200,))
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError as error:
            raise TransferError("no such object", missing=True) from error
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    async def _fetch(self, url: Url, into: Path) -> int:
        """The first part, and by what that tells, the others beside one another: one connection to an object store gets
        a fraction of what a host's network gives. A store without ranges answers the whole to the first."""
        with await asyncio.to_thread(into.open, "wb") as out:
            first = await self._repeated(lambda: self._fetch_part(url, out.fileno(), 0, None))
            if first.size_bytes > _PART_BYTES and first.is_part:
                turns = asyncio.Semaphore(_PARTS_AT_ONCE)

                async def fetch(start: int) -> None:
                    async with turns:
                        await self._repeated(lambda: self._fetch_part(url, out.fileno(), start, first.etag))

                starts = range(_PART_BYTES, first.size_bytes, _PART_BYTES)
                parts = [asyncio.create_task(fetch(start)) for start in starts]
                try:
                    await asyncio.gather(*parts)
                finally:
                    for part in parts:
                        part.cancel()
                    await asyncio.gather(*parts, return_exceptions=True)
        return first.size_bytes

    async def _fetch_part(self, url: Url, out: int, start: int, etag: str | None) -> _Part:
        """Write the part that begins at `start` where it belongs; tells what it is a part of.

        Args:
            etag: Of the object that it must be a part of; None takes any.
        """
        headers = {**url.headers, "range": f"bytes={start}-{start + _PART_BYTES - 1}"}
        if etag is not None:
            headers["if-match"] = etag
        at = start
        try:
            async with self._session().get(url.url, headers=headers) as response:
                if start == 0 and response.status == 416:  # an empty object has no first part
                    return _Part(size_bytes=0, etag=None, is_part=False)
                _check(response.status, (206,) if start else (200, 206))
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    await asyncio.to_thread(_write_at, out, chunk, at)
                    at += len(chunk)
                told = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
                if response.status == 206:
                    if told is None or (int(told[1]), int(told[2]) + 1) != (start, at):
                        raise _Passing("the object store answered another part than it was asked for")
                    return _Part(size_bytes=int(told[3]), etag=response.headers.get("etag"), is_part=True)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        return _Part(size_bytes=at, etag=None, is_part=False)

    async def _store(self, url: Url, source: Path) -> None:
        with source.open("rb") as body:
            headers = {"content-length": str(os.fstat(body.fileno()).st_size), **url.headers}
            try:
                async with self._session().put(url.url, data=body, headers=headers) as response:
                    # 412: another upload of the same object was first, and objects never change.
                    _check(response.status, (200, 201, 204, 412))
            except (TimeoutError, aiohttp.ClientError) as error:
                raise _Passing(f"{type(error).__name__}: {error}") from error

    async def _repeated(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for pause_s in _PAUSES_S:
            try:
                return await attempt()
            except _Passing:
                await self._pause(pause_s)
        return await attempt()

    async def close(self) -> None:
        """Drop the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a part told of its object."""

    size_bytes: int
    etag: str | None
    is_part: bool


def _write_at(out: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(out, view, at)
        view, at = view[written:], at + written


def _check(status: int, wanted: tuple[int, ...]) -> None:
    if status in wanted:
        return
    if status == 404:
        raise TransferError("no such object", missing=True)
    kind = _Passing if status in _BUSY else TransferError
    raise kind(f"the object store answered {status}")
