"""Links to single objects for callers: the blob store's own signed URLs, or, where it has none that a caller elsewhere
could use (a directory), links to this service (`/v1/blobs/{token}`), signed like route tokens and as short-lived."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from provisioner.blob_errors import told
from provisioner.blobs.port import BlobError, Blobs
from provisioner.clock import Clock
from provisioner.route_tokens import RouteSigner
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.transfers import UploadUrl

Method = Literal["get", "put"]
_AUDIENCE = "blobs"


class BlobClaims(BaseModel):
    """What a link allows: one method on one object; of a put, only these bytes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    aud: str
    method: Method
    name: str
    exp: int
    sha256: str | None = None
    size_bytes: int | None = None
    media_type: str | None = None


class BlobLinks:
    """Makes links and checks those that come back."""

    def __init__(self, blobs: Blobs, signer: RouteSigner, clock: Clock) -> None:
        self._blobs = blobs
        self._signer = signer
        self._clock = clock

    async def link(
        self,
        method: Method,
        name: str,
        *,
        expires_s: float,
        sha256: str | None = None,
        size_bytes: int | None = None,
        media_type: str | None = None,
    ) -> UploadUrl:
        """A link to one object.

        Args:
            media_type: What a get through this service is answered as; the blob store answers what was put.

        Raises:
            ShoalError: UNAVAILABLE; PAYLOAD_TOO_LARGE for more than one PUT takes.
        """
        try:
            presigned = await self._blobs.presign(
                method, name, expires_s=expires_s, sha256=sha256, size_bytes=size_bytes
            )
        except BlobError as error:
            raise told(error) from error
        expires_at = self._clock.now() + timedelta(seconds=expires_s)
        if not presigned.url.startswith("file:"):
            return UploadUrl(url=presigned.url, headers=presigned.headers, expires_at=expires_at)
        claims = BlobClaims(
            aud=_AUDIENCE,
            method=method,
            name=name,
            exp=math.ceil(expires_at.timestamp()),
            sha256=sha256,
            size_bytes=size_bytes,
            media_type=media_type,
        )
        token = self._signer.sign(claims.model_dump(exclude_none=True))
        return UploadUrl(url=f"/v1/blobs/{token}", expires_at=expires_at)

    def check(self, token: str, method: Method) -> BlobClaims:
        """What a link allows.

        Raises:
            ShoalError: NOT_FOUND for one that is not ours, is over, or is for another method.
        """
        said = self._signer.verify(token, _AUDIENCE)
        try:
            claims = BlobClaims.model_validate(said)
        except ValidationError:
            claims = None
        if claims is None or claims.method != method or claims.exp <= self._clock.now().timestamp():
            raise ShoalError(ErrorCode.NOT_FOUND, "This link is over, or is none; ask for another.")
        return claims
