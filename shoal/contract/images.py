"""Images: a name and a tag for an immutable stack of layers and its defaults."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shoal.contract.base import Answer, SnapshotId, Time, WaitSeconds, Wire
from shoal.contract.errors import ErrorDetail
from shoal.contract.sessions import EnvName, EnvValue, ResourcesAsked
from shoal.contract.states import ImageState
from shoal.contract.transfers import UploadUrl

#: The manifest's own version; a reader refuses a newer one.
IMAGE_FORMAT = 1
MAX_LAYERS = 16

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
LayerRole = Literal["base", "workspace", "toolkit", "snapshot"]


class Layer(Answer):
    """One layer: `digest` of the compressed OCI tar (its name in the blob store), `diff_id` of the plain one."""

    digest: Digest
    diff_id: Digest
    size_bytes: int
    role: LayerRole = "base"
    name: str | None = None


class ImageConfig(Answer):
    """Defaults inside: environment, working directory, user; None means /workspace and root."""

    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None


class ImageManifest(Answer):
    """What an image digest names: layers bottom first. `provenance` says where it came from, for people; it is no part
    of what the digest names."""

    format: int = IMAGE_FORMAT
    architecture: str
    layers: list[Layer] = Field(max_length=MAX_LAYERS)
    config: ImageConfig = Field(default_factory=ImageConfig)
    provenance: dict[str, str] = Field(default_factory=dict)

    def canonical(self) -> bytes:
        """The one way it is written where its digest is taken, and as which it is stored."""
        plain = self.model_copy(update={"provenance": {}}).model_dump(mode="json")
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def digest(self) -> str:
        """The image's name for good, wherever it is built and whatever it is called."""
        return "sha256:" + hashlib.sha256(self.canonical()).hexdigest()


def _names_something(glob: str) -> str:
    names = [name for name in glob.split("/") if name not in ("", ".")]
    if not names or ".." in names or "\0" in glob:
        raise ValueError("a glob of paths below /, such as tmp/* or **/__pycache__; it cannot climb")
    return glob


#: A path relative to /. `*`, `?` and `[...]` stand for characters of one name; a name that is `**` for any number of
#: directories, also for none, and at the end for everything below.
PathGlob = Annotated[str, Field(max_length=4096), AfterValidator(_names_something)]


class RecipeSource(Wire):
    """Build from a recipe file's text (TOML); `files` it names are not taken from any directory."""

    recipe: str = Field(max_length=1_048_576)


class RegistrySource(Wire):
    """Take an OCI image by reference: `docker://...`, `oci:DIR`, `docker-archive:FILE`."""

    ref: str = Field(max_length=1000)


class ArchiveSource(Wire):
    """Take a rootfs tarball, a docker-save archive, or a directory that the builder wrote (`image.json` and its
    layers), from the control plane's own machine: an absolute path."""

    archive: str = Field(max_length=4096)


class SnapshotSource(Wire):
    """`pack`: what a session made becomes an image. `exclude` are paths left out of it: globs relative to /, `*` within
    a name, `**` across directories, a directory with all that is in it. There the image is as the one below it: what
    that has stays, also where the session changed or removed it."""

    snapshot: SnapshotId
    exclude: list[PathGlob] = Field(default_factory=list, max_length=1000)


class ImageSource(Wire):
    """Take another image's layers, to put a workspace and toolkits over them: nothing is built or copied."""

    image: str = Field(max_length=300)


class LayersSource(Wire):
    """Register a manifest whose layers are in the blob store already (`shoal image push`, the builder)."""

    manifest: ImageManifest


Source = RecipeSource | RegistrySource | ArchiveSource | SnapshotSource | ImageSource | LayersSource


class ImagePut(Wire):
    """`PUT /v1/images/{name}:{tag}`.

    Attributes:
        source: Where its tree comes from.
        workspace, toolkits: `name:tag` of images whose own layers go over the base, in that order.
        resources: What sessions of it ask for unless they say otherwise.
    """

    source: Source
    workspace: str | None = None
    toolkits: list[str] = Field(default_factory=list, max_length=8)
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    resources: ResourcesAsked = Field(default_factory=ResourcesAsked)
    wait_s: WaitSeconds = 25.0


class Image(Answer):
    """An image. `digest` is set once it is available; tags never move."""

    name: str
    tag: str
    state: ImageState
    phase: str | None = None
    digest: str | None = None
    layers: list[Layer] = Field(default_factory=list)
    config: ImageConfig = Field(default_factory=ImageConfig)
    resources: ResourcesAsked = Field(default_factory=ResourcesAsked)
    provenance: dict[str, str] = Field(default_factory=dict)
    size_bytes: int = 0
    created_at: Time
    available_at: Time | None = None
    error: ErrorDetail | None = None


class LayerAsked(Wire):
    """A layer that is to be pushed: its blob's digest and size."""

    digest: Digest
    size_bytes: int = Field(ge=0)


class LayersAsked(Wire):
    """`POST /v1/layers`: which of these are still to be sent, and where to?"""

    layers: list[LayerAsked] = Field(min_length=1, max_length=MAX_LAYERS)


class LayerUpload(Answer):
    """`exists`: it is there already; otherwise `put` takes it, and nothing but it."""

    digest: Digest
    exists: bool
    put: UploadUrl | None = None


class LayerUploads(Answer):
    """In the order asked."""

    layers: list[LayerUpload]


class ImagePage(Answer):
    """Images by name, then tag."""

    images: list[Image]
    cursor: str | None = None
