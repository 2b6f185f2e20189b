"""Images: register, read, list, delete. A tag never moves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from api.routes.sessions import Cursor, Limit
from api.state import BEARER, KNOWN_QUERY, ImageReader, ImageWriter, Use
from shoal.contract.base import MAX_WAIT_S
from shoal.contract.images import Image, ImagePage, ImagePut
from shoal.contract.states import ImageState

router = APIRouter(prefix="/v1/images", tags=["images"], dependencies=[BEARER, KNOWN_QUERY])

ImageName = Annotated[str, Path(description="The image's name; it may have slashes.")]
ImageTag = Annotated[str, Path(description="Its tag.", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait while it is being made.")]


def _status(image: Image, settled: int) -> int:
    return 202 if image.state is ImageState.BUILDING else settled


@router.get("", response_model=ImagePage, summary="List images")
async def list_images(who: ImageReader, use: Use, cursor: Cursor = None, limit: Limit = 100) -> ImagePage:
    """By name, then tag."""
    return await use.images.list(who, cursor=cursor, limit=limit)


@router.put(
    "/{name:path}:{tag}",
    response_model=Image,
    responses={202: {"model": Image, "description": "It is being built or pulled: `phase` tells."}},
    summary="Register an image",
)
async def put_image(
    who: ImageWriter, use: Use, name: ImageName, tag: ImageTag, body: ImagePut, response: Response
) -> Image:
    """From a recipe, a registry reference, an archive, a snapshot (`pack`), or layers that are stored already.
    Repeatable; the same tag with another source is refused."""
    image = await use.images.put(who, name, tag, body)
    response.status_code = _status(image, 200)
    return image


@router.get(
    "/{name:path}:{tag}",
    response_model=Image,
    responses={202: {"model": Image, "description": "It is still being built or pulled."}},
    summary="Read an image, or wait for it",
)
async def get_image(
    who: ImageReader, use: Use, name: ImageName, tag: ImageTag, response: Response, wait_s: Wait = 0.0
) -> Image:
    """`failed` comes with its error and the end of the log."""
    image = await use.images.get(who, name, tag, wait_s=wait_s)
    response.status_code = _status(image, 200)
    return image


@router.delete("/{name:path}:{tag}", status_code=204, summary="Delete an image")
async def delete_image(who: ImageWriter, use: Use, name: ImageName, tag: ImageTag) -> None:
    """Takes the name away; sessions that started from it go on. Repeatable."""
    await use.images.delete(who, name, tag)
