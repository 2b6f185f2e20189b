"""Blobs in S3, or in what speaks its language. docs/s3.md says how a bucket has to be set up.

A blob's key is its name behind the bucket's prefix, nothing more. S3 takes 3,500 writes and 5,500 reads a second *per
partition* of the key space and splits partitions by itself where keys differ; `names` puts two hex digits of a hash
right behind each family (`layers/ab/...`, `journals/7f/...`), so a family can spread over 256 partitions, while lists
keep the order of names and lifecycle rules can tell families apart. Until S3 has split, it answers SlowDown: that is
waited out, within bounds, and counted.
"""

from __future__ import annotations

import base64
import math
import random
import secrets
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any, Literal

from botocore.exceptions import BotoCoreError

from provisioner.aws.clients import AwsClients
from provisioner.blobs.port import (
    CHUNK_BYTES,
    BlobError,
    BlobExists,
    BlobInfo,
    BlobMissing,
    BlobTooLarge,
    BlobUnavailable,
    Presigned,
    check_name,
)
from provisioner.blobs.s3_calls import BROKEN, S3Calls
from provisioner.blobs.s3_writes import S3Writer
from provisioner.clock import Clock, SystemClock

#: SigV4 URLs are good for a week at the most; those signed by a role end with its credentials, if that is sooner.
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html (read 2026-11)
MAX_URL_S = 7 * 24 * 3600
#: One PUT, and so one presigned URL, takes objects up to this size.
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/upload-objects.html (read 2026-11)
MAX_PUT_BYTES = 5 << 30


class S3Blobs:
    """The `Blobs` port over a bucket.

    Args:
        clients: Whose `s3` client is used; the caller closes them.
        prefix: Before every name; empty, or ending in `/`.
        kms_key_id: Encrypts new objects with this key (with a bucket key, to spare calls of KMS); None leaves it to
            the bucket's default. Reading needs `kms:Decrypt`, also by presigned URL.
        audit_retention: Objects below `audit/` cannot be deleted or replaced for so long (Object Lock, governance
            mode); the bucket must have been made with Object Lock. None sets no lock. Nothing else is ever locked: a
            snapshot that cannot be deleted is paid for until the lock ends, whatever its owner wants.
        clock, chance: For pauses between repetitions, and when a lock ends.
    """

    def __init__(
        self,
        clients: AwsClients,
        bucket: str,
        *,
        prefix: str = "",
        kms_key_id: str | None = None,
        audit_retention: timedelta | None = None,
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._kms_key_id = kms_key_id
        self._audit_retention = audit_retention
        self._clock = clock or SystemClock()
        self._calls = S3Calls(clients, self._clock, chance or random.Random())
        self._writer = S3Writer(
            self._calls, bucket, settings=self._settings, token=lambda: secrets.token_hex(8)
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """What happened since the start, as `S3Calls.counts` says; what did not is 0 or not named."""
        return self._calls.counts

    async def put(
        self, name: str, data: bytes | AsyncIterator[bytes], *, sha256: str | None = None
    ) -> BlobInfo:
        """As the port says."""
        size = await self._writer.write(self._key(name), data, sha256, only_new=False)
        return BlobInfo(name=name, size_bytes=size)

    async def put_if_absent(
        self, name: str, data: bytes | AsyncIterator[bytes], *, sha256: str | None = None
    ) -> BlobInfo:
        """As the port says. Of a stream of more than one part S3 may drop the upload when another writer is at work:
        BlobUnavailable then, and the caller has the bytes to send anew."""
        size = await self._writer.write(self._key(name), data, sha256, only_new=True)
        return BlobInfo(name=name, size_bytes=size)

    async def get(self, name: str) -> AsyncIterator[bytes]:
        """As the port says. A body that breaks off is gone on with from where it was, of the same object."""
        async for chunk in self._stream(name, None):
            yield chunk

    async def read(self, name: str, *, limit: int = 64 << 20) -> bytes:
        """As the port says."""
        return b"".join([chunk async for chunk in self._stream(name, limit)])

    async def head(self, name: str) -> BlobInfo | None:
        """As the port says. S3 answers 403 instead of 404 to whoever lacks `s3:ListBucket`: that is a BlobError."""
        try:
            found = await self._calls.call(
                "head_object", Bucket=self._bucket, Key=self._key(name), ChecksumMode="ENABLED"
            )
        except BlobMissing:
            return None
        # Of a multipart upload it would be a checksum of checksums: those have CRCs here, and no SHA-256.
        checksum = found.get("ChecksumSHA256")
        return BlobInfo(
            name=name,
            size_bytes=found["ContentLength"],
            sha256=base64.b64decode(checksum).hex() if checksum else None,
        )

    async def delete(self, name: str) -> None:
        """As the port says."""
        await self._calls.call("delete_object", Bucket=self._bucket, Key=self._key(name))

    async def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """As the port says: general purpose buckets list in order of their keys' bytes, and all that was written."""
        asked: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = await self._calls.call("list_objects_v2", **asked)
            for found in page.get("Contents", ()):
                name = found["Key"].removeprefix(self._prefix)
                yield BlobInfo(name=name, size_bytes=found["Size"])
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    async def presign(
        self,
        method: Literal["get", "put"],
        name: str,
        *,
        expires_s: float = 900.0,
        sha256: str | None = None,
        size_bytes: int | None = None,
    ) -> Presigned:
        """As the port says; no call is made. S3 itself checks size and SHA-256 of what is put."""
        arguments: dict[str, Any] = {"Bucket": self._bucket, "Key": self._key(name)}
        headers: dict[str, str] = {}
        if method == "put":
            if size_bytes is not None and size_bytes > MAX_PUT_BYTES:
                raise BlobTooLarge(f"{name}: one PUT takes {MAX_PUT_BYTES} bytes, not {size_bytes}")
            arguments |= self._encryption()
            if self._kms_key_id is not None:
                headers = {
                    "x-amz-server-side-encryption": "aws:kms",
                    "x-amz-server-side-encryption-aws-kms-key-id": self._kms_key_id,
                    "x-amz-server-side-encryption-bucket-key-enabled": "true",
                }
            if size_bytes is not None:
                arguments["ContentLength"] = size_bytes
                headers["content-length"] = str(size_bytes)
            if sha256 is not None:
                checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
                arguments["ChecksumSHA256"] = checksum
                headers["x-amz-checksum-sha256"] = checksum
        client = await self._calls.client()
        try:
            url = await client.generate_presigned_url(
                f"{method}_object", Params=arguments, ExpiresIn=min(max(1, math.ceil(expires_s)), MAX_URL_S)
            )
        except BotoCoreError as error:
            raise BlobError(f"cannot sign a URL: {type(error).__name__}: {error}") from error
        return Presigned(url=url, headers=headers)

    async def close(self) -> None:
        """As the port says; the clients are their owner's to close."""

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _encryption(self) -> dict[str, Any]:
        if self._kms_key_id is None:
            return {}
        return {
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": self._kms_key_id,
            "BucketKeyEnabled": True,
        }

    def _settings(self, key: str) -> dict[str, Any]:
        settings = self._encryption()
        if self._audit_retention is not None and key.startswith(f"{self._prefix}audit/"):
            until = self._clock.now() + self._audit_retention
            settings |= {"ObjectLockMode": "GOVERNANCE", "ObjectLockRetainUntilDate": until}
        return settings

    async def _stream(self, name: str, limit: int | None) -> AsyncIterator[bytes]:
        """The object's bytes, from where they broke off when they do.

        Raises:
            ValueError: There are more than `limit`.
        """
        asked: dict[str, Any] = {"Bucket": self._bucket, "Key": self._key(name)}
        offset = 0
        failures = 0
        while True:
            try:
                found = await self._calls.call("get_object", **asked)
            except BlobExists as error:
                raise BlobUnavailable(f"{name} was replaced while it was read") from error
            size = offset + int(found["ContentLength"])
            body = found["Body"]
            async with body:
                if limit is not None and size > limit:
                    raise ValueError(f"{name} is larger than {limit} bytes")
                try:
                    while chunk := await body.read(CHUNK_BYTES):
                        yield chunk
                        offset += len(chunk)
                        failures = 0
                    if offset == size:
                        return
                    broke: Exception | None = None
                except (BotoCoreError, *BROKEN) as error:
                    broke = error
            if offset == size:
                return
            if not await self._calls.pause(failures):
                raise BlobUnavailable(f"{name} broke off at {offset} of {size} bytes") from broke
            failures += 1
            self._calls.counts["resumed"] += 1
            asked |= {"Range": f"bytes={offset}-", "IfMatch": found["ETag"]}
