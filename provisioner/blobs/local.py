"""Blobs on one machine: a directory (mode 0700) of files, each made aside and renamed into its place."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from provisioner.blobs.port import (
    CHUNK_BYTES,
    BlobCorrupt,
    BlobExists,
    BlobFull,
    BlobInfo,
    BlobMissing,
    BlobUnavailable,
    Presigned,
    check_name,
)


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BlobMissing(str(error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise BlobFull(str(error)) from error
        raise BlobUnavailable(str(error)) from error


class LocalBlobs:
    """The `Blobs` port over a directory. A presigned URL is the file's own `file://` path, below the directory."""

    def __init__(self, root: Path) -> None:
        """Open or make the directory.

        Raises:
            BlobUnavailable: It cannot be made, or others may enter it and that cannot be changed.
        """
        with _typed():
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            root.chmod(0o700)
            self._root = root.resolve()

    async def put(
        self, name: str, data: bytes | AsyncIterator[bytes], *, sha256: str | None = None
    ) -> BlobInfo:
        """As the port says."""
        return await self._write(name, data, sha256, replace=True)

    async def put_if_absent(
        self, name: str, data: bytes | AsyncIterator[bytes], *, sha256: str | None = None
    ) -> BlobInfo:
        """As the port says."""
        return await self._write(name, data, sha256, replace=False)

    async def put_file(self, name: str, path: Path, *, sha256: str | None = None) -> BlobInfo:
        """As `put`, from a file."""

        async def chunks() -> AsyncIterator[bytes]:
            with path.open("rb") as source:
                while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
                    yield chunk

        return await self._write(name, chunks(), sha256, replace=True)

    async def get(self, name: str) -> AsyncIterator[bytes]:
        """As the port says."""
        path = self._path(name)
        with _typed():
            source: BinaryIO = await asyncio.to_thread(path.open, "rb")
        try:
            while True:
                with _typed():
                    chunk = await asyncio.to_thread(source.read, CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk
        finally:
            source.close()

    async def read(self, name: str, *, limit: int = 64 << 20) -> bytes:
        """As the port says."""
        path = self._path(name)

        def job() -> bytes:
            with path.open("rb") as source:
                return source.read(limit + 1)

        with _typed():
            data = await asyncio.to_thread(job)
        if len(data) > limit:
            raise ValueError(f"{name} is larger than {limit} bytes")
        return data

    async def head(self, name: str) -> BlobInfo | None:
        """As the port says."""
        path = self._path(name)
        try:
            with _typed():
                status = await asyncio.to_thread(path.stat)
        except BlobMissing:
            return None
        return BlobInfo(name=name, size_bytes=status.st_size)

    async def delete(self, name: str) -> None:
        """As the port says."""
        path = self._path(name)
        with _typed():
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def presign(
        self,
        method: Literal["get", "put"],
        name: str,
        *,
        expires_s: float = 900.0,
        sha256: str | None = None,
        size_bytes: int | None = None,
    ) -> Presigned:
        """As the port says; the URL does not expire, since whoever can read it can read the directory."""
        path = self._path(name)
        if method == "put":
            with _typed():
                await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        return Presigned(url="file://" + urllib.parse.quote(str(path)), headers={})

    async def close(self) -> None:
        """As the port says."""

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _walk(self, prefix: str) -> list[BlobInfo]:
        start = self._root / prefix.rpartition("/")[0]
        found: list[BlobInfo] = []
        for directory, _, files in os.walk(start):
            for file in files:
                path = Path(directory, file)
                name = path.relative_to(self._root).as_posix()
                if name.startswith(prefix) and not file.startswith("."):
                    try:
                        found.append(BlobInfo(name=name, size_bytes=path.stat().st_size))
                    except FileNotFoundError:
                        continue
        return sorted(found, key=lambda info: info.name)

    async def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """As the port says."""
        with _typed():
            found = await asyncio.to_thread(self._walk, prefix)
        for info in found:
            yield info

    async def _write(
        self, name: str, data: bytes | AsyncIterator[bytes], sha256: str | None, *, replace: bool
    ) -> BlobInfo:
        path = self._path(name)
        if not replace and await self.head(name) is not None:
            raise BlobExists(name)
        aside = path.with_name(f".{secrets.token_hex(8)}.part")
        digest = hashlib.sha256()
        size = 0

        def begin() -> BinaryIO:
            path.parent.mkdir(parents=True, exist_ok=True)
            return aside.open("wb")

        def write(chunk: bytes) -> None:
            out.write(chunk)
            digest.update(chunk)

        def finish() -> None:
            out.flush()
            os.fsync(out.fileno())
            out.close()
            if sha256 is not None and digest.hexdigest() != sha256:
                raise BlobCorrupt(f"{name}: the bytes hash to {digest.hexdigest()}, not {sha256}")
            if replace:
                aside.rename(path)
            else:
                # A link fails where a rename would replace: that is what makes it one of many.
                os.link(aside, path)

        with _typed():
            out = await asyncio.to_thread(begin)
        try:
            with _typed():
                if isinstance(data, bytes):
                    size = len(data)
                    await asyncio.to_thread(write, data)
                else:
                    async for chunk in data:
                        size += len(chunk)
                        await asyncio.to_thread(write, chunk)
                try:
                    await asyncio.to_thread(finish)
                except FileExistsError as error:
                    raise BlobExists(name) from error
        finally:
            out.close()
            aside.unlink(missing_ok=True)
        return BlobInfo(name=name, size_bytes=size)
