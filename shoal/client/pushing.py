"""An image that the builder wrote, on its way to a service: what it is, and its layers' bytes.

The builder's output is a directory of `image.json` and one `<sha256>.tar.zst` a layer, or a tar of such a directory.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal.client.places import CHUNK_BYTES
from shoal.contract.images import ImageManifest, Layer, LayerUpload

MANIFEST_NAME = "image.json"
#: Layers on their way at once.
AT_ONCE = 4

#: Called with a layer's digest and how many of its bytes have been sent since the last call; negative when it begins
#: anew.
Progress = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image on this machine's disk.

    Attributes:
        directory: Where its layers are.
    """

    directory: Path
    manifest: ImageManifest

    def path(self, layer: Layer) -> Path:
        """A layer's file."""
        return self.directory / f"{layer.digest.removeprefix('sha256:')}.tar.zst"

    def missing(self, uploads: Sequence[LayerUpload]) -> list[tuple[Layer, LayerUpload]]:
        """Each layer that is still to be sent, once, the largest first: they take longest."""
        layers = {layer.digest: layer for layer in self.manifest.layers}
        pairs = {upload.digest: (layers[upload.digest], upload) for upload in uploads if not upload.exists}
        return sorted(pairs.values(), key=lambda pair: -pair[0].size_bytes)

    def chunks(self, layer: Layer, progress: Progress | None) -> Callable[[], Iterator[bytes]]:
        """The layer's bytes, from their start each time."""
        sent = 0

        def read() -> Iterator[bytes]:
            nonlocal sent
            if progress is not None and sent:
                progress(layer.digest, -sent)
            sent = 0
            with self.path(layer).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
                    sent += len(chunk)
                    if progress is not None:
                        progress(layer.digest, len(chunk))

        return read


@contextmanager
def built_image(place: str | os.PathLike[str]) -> Iterator[BuiltImage]:
    """The image at a path.

    Raises:
        OSError: It cannot be read.
        ValueError: It is none that the builder wrote, or not whole; the message says what is wrong.
    """
    path = Path(place)
    if path.is_dir():
        yield _opened(path)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-push-") as held:
        _unpack(path, Path(held))
        yield _opened(Path(held))


def _opened(directory: Path) -> BuiltImage:
    try:
        manifest = ImageManifest.model_validate_json((directory / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{directory} has no {MANIFEST_NAME}: it is not what the builder wrote") from None
    except ValidationError as error:
        raise ValueError(
            f"{directory / MANIFEST_NAME} is no manifest of an image: {error.errors()[0]['msg']}"
        ) from error
    image = BuiltImage(directory=directory, manifest=manifest)
    for layer in manifest.layers:
        file = image.path(layer)
        if not file.is_file() or file.stat().st_size != layer.size_bytes:
            raise ValueError(f"the layer {file.name} is missing, or is not of {layer.size_bytes} bytes")
    return image


def _unpack(archive: Path, into: Path) -> None:
    """Takes the manifest and the layers out of a tar, wherever in it they are; nothing else."""
    try:
        with tarfile.open(archive, mode="r:*") as tar:
            for member in tar:
                name = Path(member.name).name
                source = tar.extractfile(member) if member.isfile() else None
                if source is None or not (name == MANIFEST_NAME or name.endswith(".tar.zst")):
                    continue
                with (into / name).open("wb") as out:
                    while chunk := source.read(CHUNK_BYTES):
                        out.write(chunk)
    except tarfile.TarError as error:
        raise ValueError(f"{archive} is no tar of what the builder wrote: {error}") from error
