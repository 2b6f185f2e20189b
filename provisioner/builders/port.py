"""The builder port: from a recipe, a reference or an archive to layers in the blob store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from shoal.contract.images import ArchiveSource, ImageManifest, RecipeSource, RegistrySource

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
