"""A builder in memory: answers what it was told to, when it was told to."""

from __future__ import annotations

import asyncio
import hashlib

from provisioner.blobs import names
from provisioner.blobs.port import Blobs
from provisioner.builders.port import Progress
from shoal.contract.errors import ShoalError
from shoal.contract.images import ArchiveSource, ImageManifest, Layer, RecipeSource, RegistrySource


class FakeBuilder:
    """The `Builder` port: one layer per source, named after it. `error` fails the next build; `gate` holds builds."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.error: ShoalError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.built: list[str] = []

    async def build(
        self, name: str, tag: str, source: RecipeSource | RegistrySource | ArchiveSource, progress: Progress
    ) -> ImageManifest:
        """As the port says."""
        await progress("building")
        await self.gate.wait()
        self.built.append(f"{name}:{tag}")
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        data = source.model_dump_json().encode()
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        await self._blobs.put(names.layer(digest), data)
        layer = Layer(digest=digest, diff_id=digest, size_bytes=len(data), role="base")
        return ImageManifest(architecture="amd64", layers=[layer])
