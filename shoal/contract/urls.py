"""The short-lived URLs by which a host reads and writes objects: what it asks for, and what it gets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.contract.base import Answer, SessionId, Wire


class LayerGet(Answer):
    """Read a layer."""

    op: Literal["layer_get"] = "layer_get"
    digest: str


class LayerPut(Answer):
    """Write a snapshot's layer (its digest is known only after it was made)."""

    op: Literal["layer_put"] = "layer_put"
    digest: str
    size_bytes: int


class JournalPut(Answer):
    """Write the journal of a session's epoch."""

    op: Literal["journal_put"] = "journal_put"
    session: SessionId
    epoch: int


class JournalGet(Answer):
    """Read the journal of a session's epoch."""

    op: Literal["journal_get"] = "journal_get"
    session: SessionId
    epoch: int


class TransferGet(Answer):
    """Read a file that is to go into a session. `use` says for what, so that another use of it is refused."""

    op: Literal["transfer_get"] = "transfer_get"
    transfer: str
    session: SessionId
    use: str


class TransferPut(Answer):
    """Write a file that is to go out of a session."""

    op: Literal["transfer_put"] = "transfer_put"
    transfer: str
    session: SessionId
    size_bytes: int
    sha256: str


UrlAsked = Annotated[
    LayerGet | LayerPut | JournalPut | JournalGet | TransferGet | TransferPut, Field(discriminator="op")
]


class UrlsAsked(Wire):
    """A host asks for short-lived URLs, each for one object and one method."""

    items: list[UrlAsked] = Field(min_length=1, max_length=100)


class Url(Answer):
    """A presigned URL: `https://...` for an object store, `file:///...` where store and host share a disk.
    `exists`: for a put, the object is there already and need not be sent. `size_bytes`, `sha256`: for a transfer's get,
    what was announced."""

    url: str
    exists: bool = False
    size_bytes: int | None = None
    sha256: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)


class Urls(Answer):
    """In the order asked."""

    urls: list[Url]
