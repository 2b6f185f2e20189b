"""Layers that callers push: sent straight to the blob store, and verified before an image counts on them.

A layer is one object whoever pushed it first. Its digest is 256 bits that only those who have its bytes, or were told,
can name; so it is also what entitles to use it.
"""

from __future__ import annotations

import hashlib

from provisioner.auth import Principal
from provisioner.blob_links import BlobLinks
from provisioner.blobs import names
from provisioner.blobs.port import BlobError, BlobMissing, Blobs
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.images import Layer, LayersAsked, LayerUpload, LayerUploads
from shoal.contract.transfers import MAX_TRANSFER_BYTES

#: Seconds in which the sending of a layer must begin.
_LINK_S = 3600.0


class PushedLayers:
    """What the route calls, and what registering an image does."""

    def __init__(self, blobs: Blobs, links: BlobLinks) -> None:
        self._blobs = blobs
        self._links = links

    async def ask(self, who: Principal, body: LayersAsked) -> LayerUploads:
        """Which layers are still to be sent, and where to.

        Raises:
            ShoalError: UNAVAILABLE; PAYLOAD_TOO_LARGE for a layer that one PUT cannot carry.
        """
        uploads: list[LayerUpload] = []
        for asked in body.layers:
            if asked.size_bytes > MAX_TRANSFER_BYTES:
                raise ShoalError(
                    ErrorCode.PAYLOAD_TOO_LARGE,
                    f"The layer {asked.digest} has {asked.size_bytes} bytes; split it.",
                    details={"limit_bytes": MAX_TRANSFER_BYTES},
                )
            name = names.layer(asked.digest)
            there = await self._head(name)
            exists = there is not None and there == asked.size_bytes
            put = None
            if not exists:
                put = await self._links.link(
                    "put",
                    name,
                    expires_s=_LINK_S,
                    sha256=asked.digest.removeprefix("sha256:"),
                    size_bytes=asked.size_bytes,
                )
            uploads.append(LayerUpload(digest=asked.digest, exists=exists, put=put))
        return LayerUploads(layers=uploads)

    async def verify(self, layer: Layer) -> None:
        """See that a layer is there and is what its digest says: by the sum that the store keeps, else by reading it.

        Raises:
            ShoalError: IMAGE_BUILD_FAILED, UNAVAILABLE.
        """
        name = names.layer(layer.digest)
        wanted = layer.digest.removeprefix("sha256:")
        try:
            there = await self._blobs.head(name)
            if there is None:
                raise _failed(f"The layer {layer.digest} is not in the blob store; push it first.")
            found = there.sha256 or await self._sum(name)
        except BlobMissing as error:
            raise _failed(f"The layer {layer.digest} went away.") from error
        except BlobError as error:
            raise ShoalError(ErrorCode.UNAVAILABLE, "The blob store does not answer.") from error
        if there.size_bytes != layer.size_bytes or found != wanted:
            raise _failed(f"The layer {layer.digest} in the blob store is damaged; push it again.")

    async def _sum(self, name: str) -> str:
        digest = hashlib.sha256()
        async for chunk in self._blobs.get(name):
            digest.update(chunk)
        return digest.hexdigest()

    async def _head(self, name: str) -> int | None:
        try:
            there = await self._blobs.head(name)
        except BlobError as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, "The blob store does not answer; try again.", retry_after_s=1.0
            ) from error
        return there.size_bytes if there else None


def _failed(message: str) -> ShoalError:
    return ShoalError(ErrorCode.IMAGE_BUILD_FAILED, message)
