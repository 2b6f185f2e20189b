"""Layers without some of their paths: what `pack` with `exclude` makes of a snapshot's."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from runtime_image.builder.build import blob_in
from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.manifest import ImageManifest, LayerRole, layer_of, machine_architecture
from runtime_image.builder.oci import MAX_LAYER_BYTES
from runtime_image.builder.progress import Progress, silent
from runtime_image.layers import LayerError, PathGlobs, Without, remove_tree, repack

_BLOB_NAME = re.compile(r"([0-9a-f]{64})\.tar\.zst")


def repack_layers(
    blobs: Sequence[Path], exclude: Sequence[str], out: Path, *, progress: Progress = silent
) -> ImageManifest:
    """Writes layers anew without the paths that the globs name, one for one and in the order given.

    What is left out of a layer is left out as a change: a path that a layer below has is as it is there,
    also where the layer had removed it.

    Args:
        blobs: Where a file's name is a digest's (`blob_name`), its bytes are held to it.
        exclude: See `PathGlobs`.
        out: For blobs and `image.json`; made when missing. Trees are laid out in it and removed.

    Raises:
        BuildError: `bad_exclude` or `bad_archive`.
    """
    try:
        globs = PathGlobs(exclude)
    except ValueError as error:
        raise BuildError(BuildReason.BAD_EXCLUDE, str(error)) from error
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".repack-", dir=out))
    layers = []
    try:
        for number, blob in enumerate(blobs, start=1):
            progress("repack", layer=number, layers=len(blobs))
            named = _BLOB_NAME.fullmatch(blob.name)
            if not blob.is_file():
                raise BuildError(BuildReason.BAD_ARCHIVE, f"no file {blob}")
            write = partial(
                repack,
                blob,
                keep=Without(globs),
                scratch=scratch,
                max_bytes=MAX_LAYER_BYTES,
                expect_digest=f"sha256:{named.group(1)}" if named else None,
            )
            try:
                packed = blob_in(out, write)
            except LayerError as error:
                raise BuildError(BuildReason.BAD_ARCHIVE, f"layer {number}: {error}") from error
            layers.append(layer_of(packed, LayerRole.SNAPSHOT))
    finally:
        remove_tree(scratch)
    manifest = ImageManifest(
        name="repacked",
        tag="latest",
        architecture=machine_architecture(),
        layers=tuple(layers),
        provenance={"source": "repack"},
    )
    manifest.save(out)
    progress("done", digest=manifest.digest)
    return manifest
