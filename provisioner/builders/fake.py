"""A builder in memory: answers what it was told to, when it was told to."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from provisioner.blobs import names
from provisioner.blobs.port import BlobMissing, Blobs
from provisioner.builders.port import Progress
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.images import ArchiveSource, ImageManifest, Layer, RecipeSource, RegistrySource


class FakeBuilder:
    """The `Builder` port: one layer per source, named after it. `error` fails the next build; `gate` holds builds.

    Layers that can be repacked are the JSON of their files (`files_blob`); of others nothing is ever left out.
    """

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
        await self._held(f"{name}:{tag}")
        data = source.model_dump_json().encode()
        digest = await self._put(data)
        layer = Layer(digest=digest, diff_id=digest, size_bytes=len(data), role="base")
        return ImageManifest(architecture="amd64", layers=[layer])

    async def repack(
        self, layers: Sequence[Layer], exclude: Sequence[str], progress: Progress
    ) -> list[Layer]:
        """As the port says."""
        await progress("repack")
        await self._held("repack")
        return [await self._without(layer, exclude) for layer in layers]

    async def _without(self, layer: Layer, exclude: Sequence[str]) -> Layer:
        try:
            data = await self._blobs.read(names.layer(layer.digest))
        except BlobMissing as error:
            raise ShoalError(
                ErrorCode.IMAGE_BUILD_FAILED, f"The layer {layer.digest} is not in the blob store."
            ) from error
        try:
            files = json.loads(data)
        except ValueError:
            return layer
        if not isinstance(files, dict):
            return layer
        named = [re.compile(_pattern(glob)) for glob in exclude]
        kept = {
            path: content
            for path, content in files.items()
            if not any(glob.fullmatch(path) for glob in named)
        }
        if kept == files:
            return layer
        data = files_blob(kept)
        digest = await self._put(data)
        return layer.model_copy(update={"digest": digest, "diff_id": digest, "size_bytes": len(data)})

    async def _held(self, what: str) -> None:
        await self.gate.wait()
        self.built.append(what)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    async def _put(self, data: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        await self._blobs.put(names.layer(digest), data)
        return digest


def files_blob(files: Mapping[str, str]) -> bytes:
    """What the fake takes for a layer of these files, by path."""
    return json.dumps(files, sort_keys=True).encode()


def _pattern(glob: str) -> str:
    """A regular expression of the paths that a glob of `*` and `**` names, and of all below them."""
    said = "/".join(name for name in glob.split("/") if name)
    said = re.escape(said).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".+").replace(r"\*", "[^/]*")
    return f"{said}(?:/.*)?"
