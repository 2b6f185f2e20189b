"""What callers are told when the blob store refuses or does not answer."""

from __future__ import annotations

from provisioner.blobs.port import BlobError, BlobTooLarge
from shoal.contract.errors import ErrorCode, ShoalError


def told(error: BlobError) -> ShoalError:
    """PAYLOAD_TOO_LARGE for more than it takes in one PUT, else UNAVAILABLE."""
    if isinstance(error, BlobTooLarge):
        return ShoalError(ErrorCode.PAYLOAD_TOO_LARGE, f"The blob store does not take it: {error}.")
    return ShoalError(ErrorCode.UNAVAILABLE, "The blob store does not answer; try again.", retry_after_s=1.0)
