"""Blobs in memory, scriptable: fail the n-th call, or lose its answer after it took effect."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Literal

from provisioner.blobs.port import (
    CHUNK_BYTES,
    BlobCorrupt,
    BlobError,
    BlobExists,
    BlobInfo,
    BlobMissing,
    BlobUnavailable,
    Presigned,
    check_name,
)
from provisioner.scripted import Scripted


class FakeBlobs(Scripted[BlobError]):
    """The `Blobs` port in memory. `objects` is what there is; `calls` what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}

    def _usual_error(self, *, after: bool) -> BlobError:
        return BlobUnavailable("scripted")

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

    async def get(self, name: str) -> AsyncIterator[bytes]:
        """As the port says."""
        data = await self.read(name, limit=1 << 62)
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

    async def read(self, name: str, *, limit: int = 64 << 20) -> bytes:
        """As the port says."""
        lost = await self._begin(f"get {check_name(name)}")
        data = self.objects.get(name)
        self._end(lost)
        if data is None:
            raise BlobMissing(name)
        if len(data) > limit:
            raise ValueError(f"{name} is larger than {limit} bytes")
        return data

    async def head(self, name: str) -> BlobInfo | None:
        """As the port says."""
        lost = await self._begin(f"head {check_name(name)}")
        data = self.objects.get(name)
        self._end(lost)
        return None if data is None else BlobInfo(name=name, size_bytes=len(data))

    async def delete(self, name: str) -> None:
        """As the port says."""
        lost = await self._begin(f"delete {check_name(name)}")
        self.objects.pop(name, None)
        self._end(lost)

    async def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """As the port says."""
        lost = await self._begin(f"list {prefix}")
        self._end(lost)
        for name in sorted(self.objects):
            if name.startswith(prefix):
                yield BlobInfo(name=name, size_bytes=len(self.objects[name]))

    async def presign(
        self,
        method: Literal["get", "put"],
        name: str,
        *,
        expires_s: float = 900.0,
        sha256: str | None = None,
        size_bytes: int | None = None,
    ) -> Presigned:
        """As the port says; nothing listens at the URL."""
        lost = await self._begin(f"presign {method} {check_name(name)}")
        self._end(lost)
        return Presigned(url=f"https://blobs.example.org/{name}?method={method}", headers={})

    async def close(self) -> None:
        """As the port says."""

    async def _write(
        self, name: str, data: bytes | AsyncIterator[bytes], sha256: str | None, *, replace: bool
    ) -> BlobInfo:
        lost = await self._begin(f"put {check_name(name)}")
        whole = data if isinstance(data, bytes) else b"".join([chunk async for chunk in data])
        if sha256 is not None and hashlib.sha256(whole).hexdigest() != sha256:
            raise BlobCorrupt(name)
        if not replace and name in self.objects:
            raise BlobExists(name)
        self.objects[name] = whole
        self._end(lost)
        return BlobInfo(name=name, size_bytes=len(whole))
