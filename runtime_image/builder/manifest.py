"""What an image is: layers bottom first, and defaults. Written as `image.json` beside the blobs."""

from __future__ import annotations

import json
import platform
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime_image.layers import PackedLayer
from shoal.contract import images as wire

MANIFEST_NAME = "image.json"
_Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class LayerRole(StrEnum):
    """What a layer brings. Bumping one layer rebuilds none of the others."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    SNAPSHOT = "snapshot"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageLayer(_Model):
    """One layer of an image.

    Attributes:
        digest: sha256 of the blob; the blob's file is `blob_name(digest)`.
        diff_id: sha256 of the tar inside.
        uncompressed_bytes: Of the tar inside: the limit to unpack it under.
        name: What the layer is called, for people; None when it has no name.
    """

    digest: _Digest
    diff_id: _Digest
    size_bytes: int = Field(ge=0)
    uncompressed_bytes: int = Field(ge=0)
    role: LayerRole
    name: str | None = None


class ImageConfig(_Model):
    """What a sandbox of this image starts with unless the session says otherwise.

    Attributes:
        env: The image's own variables.
        workdir: None: the platform's default.
        user: Name or id, optionally ":group"; None is root.
        entrypoint: Kept from registry images for the record. Sandboxes do not run it.
    """

    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    entrypoint: tuple[str, ...] = ()


class ImageManifest(_Model):
    """An image, complete: whoever has it and its blobs needs nothing else.

    Attributes:
        layers: Bottom first.
        recipe_digest: Of the recipe that it was built from; None for imports.
        provenance: Where it came from, for people: source, suite, package versions.
    """

    format: Literal[1] = 1
    name: str
    tag: str
    architecture: str
    layers: tuple[ImageLayer, ...]
    config: ImageConfig = Field(default_factory=ImageConfig)
    recipe_digest: str | None = None
    provenance: dict[str, str] = Field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Names the image, here and in every service: layers, defaults and architecture; neither its name nor its
        provenance."""
        return wire.ImageManifest.model_validate_json(self.model_dump_json()).digest

    def save(self, directory: Path) -> Path:
        """Writes `image.json`, whole or not at all."""
        aside = directory / f".{MANIFEST_NAME}"
        aside.write_text(self.model_dump_json(indent=2) + "\n")
        return aside.rename(directory / MANIFEST_NAME)

    @classmethod
    def load(cls, directory: Path) -> ImageManifest:
        """Reads `image.json`.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is not one.
        """
        return cls.model_validate_json((directory / MANIFEST_NAME).read_bytes())


def layer_of(packed: PackedLayer, role: LayerRole, name: str | None = None) -> ImageLayer:
    """The manifest's line for a blob that was packed."""
    return ImageLayer(
        digest=packed.digest,
        diff_id=packed.diff_id,
        size_bytes=packed.size_bytes,
        uncompressed_bytes=packed.uncompressed_bytes,
        role=role,
        name=name,
    )


def blob_name(digest: str) -> str:
    """The blob's file name beside `image.json`."""
    return f"{digest.removeprefix('sha256:')}.tar.zst"


def canonical_json(value: object) -> bytes:
    """The one way a value is written where its digest is taken."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def machine_architecture() -> str:
    """This machine's architecture as OCI names it."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
