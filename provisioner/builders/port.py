"""The builder port: from a recipe, a reference, an archive or other layers to layers in the blob store.
`tests/contract/test_builders.py` is what of it can be promised without a network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.images import (
    ArchiveSource,
    ImageManifest,
    ImageSource,
    Layer,
    LayersSource,
    RecipeSource,
    RegistrySource,
    SnapshotSource,
    Source,
)

Progress = Callable[[str], Awaitable[None]]


class Builder(Protocol):
    """Makes images."""

    async def build(
        self, name: str, tag: str, source: RecipeSource | RegistrySource | ArchiveSource, progress: Progress
    ) -> ImageManifest:
        """Make an image; its layers are in the blob store when this returns.

        Args:
            progress: Called with the name of each phase as it begins.

        Raises:
            ShoalError: IMAGE_BUILD_FAILED or IMAGE_PULL_FAILED, `details.log` with the end of the log; UNAVAILABLE.
        """

    async def repack(
        self, layers: Sequence[Layer], exclude: Sequence[str], progress: Progress
    ) -> list[Layer]:
        """Write layers anew without the paths that `exclude` names; they are in the blob store when this returns.

        Args:
            layers: Of the blob store, bottom first.
            exclude: Globs, as `SnapshotSource` has them.
            progress: Called with the name of each phase as it begins.

        Returns:
            One layer for each, in the same order, of the same role and name; where nothing of it was named, the same.

        Raises:
            ShoalError: IMAGE_BUILD_FAILED, also for a layer that is not there; UNAVAILABLE.
        """


def needs_builder(source: Source) -> bool:
    """Whether an image of this source must be built, or written anew."""
    match source:
        case LayersSource() | ImageSource():
            return False
        case SnapshotSource(exclude=exclude):
            return bool(exclude)
        case _:
            return True


def no_builder() -> ShoalError:
    """The refusal of a service that has none."""
    return ShoalError(
        ErrorCode.NOT_IMPLEMENTED,
        "This service builds no images: build it where there is a builder, and push its layers with "
        "`shoal image push`.",
        details={"instead": "push"},
    )
