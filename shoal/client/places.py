"""Places that the service told, where bytes are put or read: below its own root, or of its blob store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shoal.client.effects import Send
from shoal.contract.transfers import UploadUrl

CHUNK_BYTES = 1_048_576


def put_at(place: UploadUrl, chunks: Callable[[], Iterator[bytes]], size_bytes: int) -> Send:
    """A PUT of bytes where the service says."""
    return replace(
        at(place.url, ""),
        method="PUT",
        headers={"content-length": str(size_bytes), **place.headers},
        source=chunks,
        wait_s=60.0,
    )


def at(url: str, came_from: str) -> Send:
    """A GET of a URL that the service told: its own (below its root, or beside where it was told), or a foreign one."""
    if "://" in url:
        return Send(method="GET", path=url, foreign=True)
    return Send(method="GET", path=url if url.startswith("/") else f"{came_from.rpartition('/')[0]}/{url}")
