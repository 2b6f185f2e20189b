"""Moving whole objects by presigned URL: `file://` where store and host share a disk, HTTP elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp

from shoal.contract.host import Url

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
            return await self._repeated(lambda: self._fetch(url, into))
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
        size = 0
        try:
            async with self._session().get(url.url, headers=url.headers) as response:
                _check(response.status, (200,))
                with into.open("wb") as out:
                    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                        await asyncio.to_thread(out.write, chunk)
                        size += len(chunk)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        return size

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


def _check(status: int, wanted: tuple[int, ...]) -> None:
    if status in wanted:
        return
    if status == 404:
        raise TransferError("no such object", missing=True)
    kind = _Passing if status in _BUSY else TransferError
    raise kind(f"the object store answered {status}")
