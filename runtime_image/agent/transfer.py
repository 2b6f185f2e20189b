"""Moving whole objects by presigned URL: `file://` where store and host share a disk, HTTP elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
import urllib.parse
from pathlib import Path
from typing import Protocol

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


class UrlTransfer:
    """Transfers by URL; whole objects, streamed, with a deadline on silence."""

    def __init__(self, *, silence_s: float = 60.0) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=silence_s)
        self._http: aiohttp.ClientSession | None = None

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
            async with self._session().get(url.url, headers=url.headers) as response:
                if response.status == 404:
                    raise TransferError("no such object", missing=True)
                if response.status != 200:
                    raise TransferError(f"the object store answered {response.status}")
                size = 0
                with into.open("wb") as out:
                    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                        await asyncio.to_thread(out.write, chunk)
                        size += len(chunk)
                return size
        except FileNotFoundError as error:
            raise TransferError("no such object", missing=True) from error
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    async def put(self, url: Url, source: Path) -> None:
        """Store the file as the object."""
        if url.exists:
            return
        path = local_path(url.url)
        try:
            if path is not None:
                await asyncio.to_thread(_copy, source, path)
                return
            with source.open("rb") as body:
                size = os.fstat(body.fileno()).st_size
                headers = {"content-length": str(size), **url.headers}
                async with self._session().put(url.url, data=body, headers=headers) as response:
                    # 412: another upload of the same object was first, and objects never change.
                    if response.status not in (200, 201, 204, 412):
                        raise TransferError(f"the object store answered {response.status}")
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Drop the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None
