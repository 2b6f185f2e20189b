"""Large bytes beside the entrance: announce them, and where blobs are a directory, take and give them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import StreamingResponse

from api.state import BEARER, KNOWN_QUERY, All, ImageWriter, Use, Writer
from provisioner.blobs.port import BlobCorrupt
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.images import LayersAsked, LayerUploads
from shoal.contract.transfers import Transfer, TransferCreate

router = APIRouter(dependencies=[KNOWN_QUERY])
Token = Annotated[str, Path(description="The link's own signature and claims.")]


@router.post(
    "/v1/transfers",
    response_model=Transfer,
    status_code=201,
    dependencies=[BEARER],
    tags=["files"],
    summary="Announce a large file that is to go into a session",
)
async def create_transfer(who: Writer, parts: All, body: TransferCreate) -> Transfer:
    """Put its bytes at `put.url`, then `PUT /v1/sessions/{id}/files?path=&transfer=` with no body (and the same
    `Content-Type: application/x-tar` for a directory). Used once, by its tenant, within the hour. Answers 501
    `not_implemented` where the entrance carries bodies of any size: send the file itself then."""
    if parts.settings.answer_limit_bytes is None:
        raise ShoalError(
            ErrorCode.NOT_IMPLEMENTED, "This entrance carries bodies of any size: send the file itself."
        )
    return await parts.services.transfers.announce(who, body)


@router.post(
    "/v1/layers",
    response_model=LayerUploads,
    dependencies=[BEARER],
    tags=["images"],
    summary="Ask where to push the layers of an image",
)
async def ask_layers(who: ImageWriter, use: Use, body: LayersAsked) -> LayerUploads:
    """For each layer that is not there yet, a URL that takes it and nothing else. Put the layers there, then register
    the image with `source: {"manifest": ...}`; it is verified before it can be used."""
    return await use.images.layers(who, body)


@router.get("/v1/blobs/{token}", include_in_schema=False)
async def read_blob(use: Use, token: Token) -> Response:
    """A link of `provisioner.blob_links`: it is its own permission."""
    claims = use.links.check(token, "get")
    info = await use.blobs.head(claims.name)
    if info is None:
        raise ShoalError(ErrorCode.NOT_FOUND, "There is nothing at this link.")
    return StreamingResponse(
        use.blobs.get(claims.name),
        headers={"content-length": str(info.size_bytes)},
        media_type=claims.media_type or "application/octet-stream",
    )


@router.put("/v1/blobs/{token}", include_in_schema=False, status_code=204)
async def write_blob(request: Request, use: Use, token: Token) -> None:
    """The same, for writing: of the size and the sum that the link says."""
    claims = use.links.check(token, "put")
    try:
        await use.blobs.put(claims.name, _exactly(request, claims.size_bytes), sha256=claims.sha256)
    except BlobCorrupt as error:
        raise invalid("body", "is not what was announced; nothing was stored") from error


async def _exactly(request: Request, size_bytes: int | None) -> AsyncIterator[bytes]:
    seen = 0
    async for chunk in request.stream():
        seen += len(chunk)
        if size_bytes is not None and seen > size_bytes:
            raise invalid("body", f"is over the {size_bytes} bytes that were announced; nothing was stored")
        yield chunk
    if size_bytes is not None and seen != size_bytes:
        raise invalid(
            "body", f"has {seen} bytes, not the {size_bytes} that were announced; nothing was stored"
        )
