"""Large bytes beside the entrance: a way to put them straight into the blob store.

An entrance that buffers (Lambda, an HTTP API) carries a few megabytes in either direction. What is larger goes in two
steps. In: `POST /v1/transfers`, a PUT of the bytes to the URL it answers, then `PUT .../files?path=&transfer=` with no
body. Out: `GET .../files?path=` answers 303 to where the bytes are, or to itself while they are on their way to there.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.contract.base import Answer, Time, Wire

#: Seconds for which a transfer can be used.
TRANSFER_LIFE_S = 3600
#: One PUT takes no more (S3's own limit).
MAX_TRANSFER_BYTES = 5 << 30

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class UploadUrl(Answer):
    """Where bytes go: one PUT of exactly what was announced, with these headers and no `Authorization`.

    Attributes:
        url: Absolute, or a path of this service (`/v1/blobs/...`).
        headers: To be sent with it.
        expires_at: Until when the PUT must have begun.
    """

    url: str
    headers: dict[str, str] = Field(default_factory=dict)
    expires_at: Time


class TransferCreate(Wire):
    """Announce a file, or a directory's tar, that is to go into a session.

    Attributes:
        sha256: Of its bytes, in hex; None lets it go in unchecked, beyond its size.
    """

    size_bytes: int = Field(ge=0, le=MAX_TRANSFER_BYTES)
    sha256: Sha256 | None = None


class Transfer(Answer):
    """An announced file. It can be used once, by its tenant, until `expires_at`; repeating that use is harmless."""

    id: str
    size_bytes: int
    put: UploadUrl
    expires_at: Time
