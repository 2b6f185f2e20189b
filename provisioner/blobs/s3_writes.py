"""Writes to S3: one PUT where it is small, else a multipart upload in bounded memory, committed once it is checked."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import structlog

from provisioner.blobs.port import (
    BlobCorrupt,
    BlobError,
    BlobExists,
    BlobMissing,
    BlobTooLarge,
    BlobUnavailable,
)
from provisioner.blobs.s3_calls import S3Calls, UploadGone, WriteConflict

log = structlog.get_logger("blobs.s3")

#: Bytes of a part, and of the parts after the first thousand: 10,000 parts then hold 148 GiB.
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html: 5 MiB to 5 GiB, 10,000 parts (read 2026-11).
PART_BYTES = 8 << 20
LATER_PART_BYTES = 16 << 20
SMALL_PARTS = 1000
MAX_PARTS = 10_000
#: Parts of one upload on their way at once. So much, and the part being filled, is what an upload holds in memory.
PARTS_IN_FLIGHT = 4
#: The metadata that tells a write's own object from another's, where its answer was lost.
_WRITE = "shoal-write"


class S3Writer:
    """Writes objects of one bucket.

    Args:
        settings: Further arguments of PutObject and CreateMultipartUpload for a key: encryption, lock.
        token: Makes the name of a write; no two are alike.
    """

    def __init__(
        self,
        calls: S3Calls,
        bucket: str,
        *,
        settings: Callable[[str], dict[str, Any]],
        token: Callable[[], str],
    ) -> None:
        self._calls = calls
        self._bucket = bucket
        self._settings = settings
        self._token = token

    async def write(
        self, key: str, data: bytes | AsyncIterator[bytes], sha256: str | None, *, only_new: bool
    ) -> int:
        """Store an object; gives its size.

        Raises:
            BlobCorrupt, BlobExists: Nothing was stored.
            BlobUnavailable: It is not known whether it was.
        """
        async with aclosing(_cut(data)) as parts:
            first = await anext(parts, b"")
            second = await anext(parts, None)
            if second is None:
                digest = await _sha256(first)
                _check(key, digest.hex(), sha256)
                await self._put(key, first, digest, only_new)
                return len(first)
            upload = _Upload(self._calls, self._bucket, key)
            token = self._token()
            await upload.begin({**self._settings(key), "Metadata": {_WRITE: token}})
            try:
                size, hexed = await upload.send(_chain(first, second, parts))
                _check(key, hexed, sha256)
                await self._commit(upload, key, token, only_new)
            except BaseException:
                # Also a cancelled one: its parts would be paid for until the bucket's lifecycle takes them.
                await asyncio.shield(upload.abort())
                raise
            return size

    async def _put(self, key: str, body: bytes, sha256: bytes, only_new: bool) -> None:
        token = self._token()
        arguments = {
            **self._settings(key),
            "Bucket": self._bucket,
            "Key": key,
            "ChecksumSHA256": base64.b64encode(sha256).decode(),
            "Metadata": {_WRITE: token},
        }
        if only_new:
            arguments["IfNoneMatch"] = "*"
        attempt = 0
        while True:
            try:
                await self._calls.call("put_object", **arguments, body=body)
            except BlobExists:
                # The first of two sendings may have stored it, and its answer got lost.
                if await self._written_by(key) == token:
                    return
                raise
            except WriteConflict:
                if not await self._calls.pause(attempt):
                    raise
                attempt += 1
            else:
                return

    async def _commit(self, upload: _Upload, key: str, token: str, only_new: bool) -> None:
        attempt = 0
        while True:
            try:
                await upload.complete(only_new=only_new)
                return
            except (BlobExists, UploadGone, WriteConflict) as error:
                # An answer was lost, another was first, or (409) another is under way: S3 may have dropped the upload
                # then, and asks to begin it anew, which a stream cannot. The object tells which.
                writer = await self._written_by(key)
                if writer == token:
                    return
                if only_new and writer is not None:
                    raise BlobExists(key) from error
                if not isinstance(error, WriteConflict) or not await self._calls.pause(attempt):
                    raise BlobUnavailable(f"{key}: its upload was dropped: {error}") from error
                attempt += 1

    async def _written_by(self, key: str) -> str | None:
        """The token of the write that made the object there is (empty for a foreign one); None without an object."""
        try:
            found = await self._calls.call("head_object", Bucket=self._bucket, Key=key)
        except BlobMissing:
            return None
        return str(found.get("Metadata", {}).get(_WRITE, ""))


class _Upload:
    """One multipart upload."""

    def __init__(self, calls: S3Calls, bucket: str, key: str) -> None:
        self._calls = calls
        self._where: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self._parts: dict[int, dict[str, Any]] = {}
        self._over = False

    async def begin(self, settings: dict[str, Any]) -> None:
        """Begin it.

        A beginning whose answer is lost leaves an upload without parts; the bucket's lifecycle takes it.
        """
        made = await self._calls.call(
            "create_multipart_upload", **self._where, **settings, ChecksumAlgorithm="CRC32"
        )
        self._where["UploadId"] = made["UploadId"]

    async def send(self, parts: AsyncIterator[bytes]) -> tuple[int, str]:
        """Send all parts, a few at a time; gives size and SHA-256 of the whole."""
        digest = hashlib.sha256()
        size = 0
        number = 0
        sending: set[asyncio.Task[None]] = set()
        try:
            async for part in parts:
                number += 1
                if number > MAX_PARTS:
                    raise BlobTooLarge(f"{self._where['Key']} is larger than {MAX_PARTS} parts")
                sending.add(asyncio.create_task(self._send_part(number, part)))
                size += len(part)
                await asyncio.to_thread(digest.update, part)
                if len(sending) >= PARTS_IN_FLIGHT:
                    done, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
            while sending:
                done, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        return size, digest.hexdigest()

    async def _send_part(self, number: int, part: bytes) -> None:
        crc = base64.b64encode((await asyncio.to_thread(zlib.crc32, part)).to_bytes(4, "big")).decode()
        sent = await self._calls.call(
            "upload_part", **self._where, PartNumber=number, body=part, ChecksumCRC32=crc
        )
        self._parts[number] = {"PartNumber": number, "ETag": sent["ETag"], "ChecksumCRC32": crc}

    async def complete(self, *, only_new: bool) -> None:
        """Make it an object; may be repeated."""
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if only_new else {}
        parts = [self._parts[number] for number in sorted(self._parts)]
        await self._calls.call(
            "complete_multipart_upload", **self._where, **condition, MultipartUpload={"Parts": parts}
        )
        self._over = True

    async def abort(self) -> None:
        """Drop the parts, as well as that can be done."""
        if self._over:
            return
        try:
            await self._calls.call("abort_multipart_upload", **self._where)
        except UploadGone:
            pass
        except BlobError as error:
            self._calls.counts["aborts_failed"] += 1
            log.warning("blob.abort_failed", key=self._where["Key"], reason=str(error))


async def _cut(data: bytes | AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data in parts, each full but the last; none for no bytes."""
    size = PART_BYTES
    number = 0
    held = bytearray()
    if isinstance(data, bytes):
        for start in range(0, len(data), size):
            yield data[start : start + size]
        return
    async for chunk in data:
        held += chunk
        while len(held) >= size:
            part = bytes(memoryview(held)[:size])
            del held[:size]
            yield part
            number += 1
            size = PART_BYTES if number < SMALL_PARTS else LATER_PART_BYTES
    if held:
        yield bytes(held)


async def _chain(first: bytes, second: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    yield second
    async for part in rest:
        yield part


async def _sha256(data: bytes) -> bytes:
    return (await asyncio.to_thread(hashlib.sha256, data)).digest()


def _check(key: str, found: str, promised: str | None) -> None:
    if promised is not None and found != promised:
        raise BlobCorrupt(f"{key}: the bytes hash to {found}, not {promised}")
