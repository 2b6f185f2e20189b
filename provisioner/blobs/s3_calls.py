"""Calls of S3 made steady: what passes by itself is repeated within bounds and counted, what does not is typed."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from provisioner.aws.clients import AwsClients
from provisioner.blobs.port import (
    BlobCorrupt,
    BlobError,
    BlobExists,
    BlobFull,
    BlobMissing,
    BlobUnavailable,
)
from provisioner.clock import Clock

#: Seconds before each repetition, times a draw between a half and one. The SDK itself tries once (`TRIED_ONCE`).
PAUSES_S = (0.05, 0.2, 0.8, 2.0)
#: Seconds after which a call that carries no body is not repeated any more: whoever asked waits for it, at an entrance
#: that gives up after 30.
PATIENCE_S = 10.0
#: What may go wrong on the way of bytes, beside what S3 answers.
BROKEN = (HTTPClientError, aiohttp.ClientError, TimeoutError, ConnectionError)

#: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (read 2026-11)
_THROTTLED = frozenset(
    {"SlowDown", "ServiceUnavailable", "503", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
)
_PASSING = frozenset({"InternalError", "RequestTimeout", "RequestTimeTooSkewed", "OperationAborted", "500"})
_DAMAGED = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"})
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})


class BlobThrottled(BlobUnavailable):
    """S3 asks to slow down, for longer than it was waited for."""


class WriteConflict(BlobUnavailable):
    """Another conditional write of the same name was under way (409)."""


class UploadGone(BlobUnavailable):
    """The multipart upload is over: completed, by whoever, or aborted."""


class S3Calls:
    """Calls S3 for one process.

    Attributes:
        counts: Since the start, by what happened: `throttled`, `conflicts`, `repeated`, `resumed` (downloads that
            broke off and went on), `aborts_failed`.
    """

    def __init__(self, clients: AwsClients, clock: Clock, chance: random.Random) -> None:
        self._clients = clients
        self._clock = clock
        self._chance = chance
        self.counts: Counter[str] = Counter()

    async def client(self) -> Any:
        """The SDK's client."""
        return await self._clients.get("s3")

    async def pause(self, attempt: int) -> bool:
        """Wait before the repetition after the `attempt`-th failure (from 0); False when there should be none."""
        if attempt >= len(PAUSES_S):
            return False
        await self._clock.sleep(PAUSES_S[attempt] * (0.5 + self._chance.random() / 2))
        return True

    async def call(self, operation: str, *, body: bytes | None = None, **arguments: Any) -> dict[str, Any]:
        """One call, repeated while what fails passes by itself.

        Every call that the adapter makes may be repeated: an object's write is the same bytes again, and whoever must
        know whether it was a repetition looks at the object.

        Args:
            operation: The SDK's method, such as `put_object`.
            body: What is sent; each time from its start.

        Raises:
            BlobError: By what S3 answered.
        """
        client = await self.client()
        began = self._clock.monotonic()
        attempt = 0
        while True:
            if body is not None:
                # A stream, since aiohttp warns of large plain bytes.
                arguments["Body"] = io.BytesIO(body)
            try:
                answer: dict[str, Any] = await getattr(client, operation)(**arguments)
            except (ClientError, BotoCoreError, *BROKEN) as error:
                told = told_by(error)
                self._count(told)
                late = body is None and self._clock.monotonic() - began > PATIENCE_S
                if late or not _passes(told) or not await self.pause(attempt):
                    raise told from error
                attempt += 1
                self.counts["repeated"] += 1
            else:
                return answer

    def _count(self, told: BlobError) -> None:
        if isinstance(told, BlobThrottled):
            self.counts["throttled"] += 1
        elif isinstance(told, WriteConflict):
            self.counts["conflicts"] += 1


def _passes(told: BlobError) -> bool:
    """Whether the same call may succeed later: not where the caller has to look first, nor where S3 said no."""
    if isinstance(told, WriteConflict | UploadGone):
        return False
    # Damaged on the way: the bytes are sent again. S3 stored nothing.
    return isinstance(told, BlobUnavailable | BlobCorrupt)


def told_by(error: Exception) -> BlobError:
    """What the SDK raised, as the port says it."""
    if not isinstance(error, ClientError):
        if isinstance(error, (HTTPClientError, aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)):
            return BlobUnavailable(f"S3 does not answer: {type(error).__name__}: {error}")
        # No credentials, no Region, an argument that the SDK refuses: nothing that passes.
        return BlobError(f"{type(error).__name__}: {error}")
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    message = f"S3 answered {status} {code} to {error.operation_name}"
    if code == "NoSuchUpload":
        return UploadGone(message)
    if code in _MISSING:
        return BlobMissing(message)
    if code in ("PreconditionFailed", "412"):
        return BlobExists(message)
    if code in ("ConditionalRequestConflict", "409"):
        return WriteConflict(message)
    if code in _THROTTLED or status in (429, 503):
        return BlobThrottled(message)
    if code in _DAMAGED:
        return BlobCorrupt(message)
    if status == 507:  # AWS has no end of space; stores that speak its language do.
        return BlobFull(message)
    if code in _PASSING or status >= 500:
        return BlobUnavailable(message)
    return BlobError(message)
