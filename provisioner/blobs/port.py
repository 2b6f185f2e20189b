"""The blob port: immutable objects by name. `tests/contract/test_blobs.py` is this page as tests.

BlobError
├── BlobMissing       there is no object of that name
├── BlobExists        a conditional put found one
├── BlobCorrupt       the bytes do not match the checksum that was promised
├── BlobFull          there is no space left
├── BlobTooLarge      one put, or one URL, does not take so much
└── BlobUnavailable   no answer: for a write it is not known whether it happened
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

#: Bytes per chunk of the streams.
CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*(/[A-Za-z0-9][A-Za-z0-9._=-]*)*")
MAX_NAME = 512


class BlobError(Exception):
    """Anything the blob store refuses or fails with."""


class BlobMissing(BlobError):
    """There is no object of that name."""


class BlobExists(BlobError):
    """There is an object of that name already."""


class BlobCorrupt(BlobError):
    """The bytes do not match their checksum; nothing was stored."""


class BlobFull(BlobError):
    """There is no space left; nothing was stored."""


class BlobTooLarge(BlobError):
    """The store does not take so much, in one put or by one URL; nothing was stored."""


class BlobUnavailable(BlobError):
    """No answer."""


@dataclass(frozen=True, kw_only=True)
class BlobInfo:
    """What is known of an object without reading it. `sha256` (hex) where the store keeps it; None says nothing."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Presigned:
    """A URL for one object and one method, and the headers to send with it."""

    url: str
    headers: dict[str, str]


class Blobs(Protocol):
    """Where bytes live. A reader sees an object whole or not at all; a name is written once, or with the same bytes.

    Names are relative paths of letters, digits and `._=-`, no part beginning with a dot; others are a ValueError.
    """

    async def put(
        self, name: str, data: bytes | AsyncIterator[bytes], *, sha256: str | None = None
    ) -> BlobInfo:
        """Store an object, replacing one that is there.

        Args:
            sha256: What the bytes must hash to, in hex; None is not checked.

        Raises:
            BlobCorrupt, BlobFull: Nothing was stored.
        """

    async def put_if_absent(
        self, name: str, data: bytes | AsyncIterator[bytes], *, sha256: str | None = None
    ) -> BlobInfo:
        """As `put`, but exactly one of many concurrent callers succeeds.

        Raises:
            BlobExists: There is one; it is untouched.
        """

    def get(self, name: str) -> AsyncIterator[bytes]:
        """The object's bytes in chunks; raises BlobMissing at the first."""

    async def read(self, name: str, *, limit: int = 64 << 20) -> bytes:
        """A small object whole.

        Raises:
            BlobMissing: There is none.
            ValueError: It is larger than `limit` bytes.
        """

    async def head(self, name: str) -> BlobInfo | None:
        """What there is of that name, or None."""

    async def delete(self, name: str) -> None:
        """Take it away; a missing one is no failure."""

    def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """Objects whose name starts with `prefix`, in order of name."""

    async def presign(
        self,
        method: Literal["get", "put"],
        name: str,
        *,
        expires_s: float = 900.0,
        sha256: str | None = None,
        size_bytes: int | None = None,
    ) -> Presigned:
        """A URL with which a host reads or writes that object for `expires_s` seconds, without a key of its own.

        Args:
            sha256, size_bytes: What is put must be of this sum (hex) and size, where the store can hold it to that;
                None leaves it open. The headers answered belong to the request.

        Raises:
            BlobTooLarge: No one PUT takes `size_bytes`.
        """

    async def close(self) -> None:
        """Release everything; repeatable."""


@runtime_checkable
class Counted(Protocol):
    """A store that counts what its calls ran into since the start of the process, by kind."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What happened how often."""


def check_name(name: str) -> str:
    """The name, if it is one.

    Raises:
        ValueError: It is not; it may be trying to leave its place.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"not a blob's name: {name[:100]!r}")
    return name
