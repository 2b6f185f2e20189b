"""Recipe to image, and directory to layer."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from runtime_image.builder.debian import bootstrap, image_filter, packages_of
from runtime_image.builder.manifest import (
    ImageConfig,
    ImageLayer,
    ImageManifest,
    LayerRole,
    blob_name,
    canonical_json,
    layer_of,
    machine_architecture,
)
from runtime_image.builder.progress import Progress, silent
from runtime_image.builder.recipe import load_recipe
from runtime_image.builder.sources import choose_suite
from runtime_image.layers import PackedLayer, pack, remove_tree
from runtime_image.layers.entries import Entry


def build_recipe(
    recipe_path: Path,
    out: Path,
    *,
    cache: Path | None = None,
    rebuild: bool = False,
    progress: Progress = silent,
) -> ImageManifest:
    """Builds a recipe's image into a directory: blobs and `image.json`.

    Args:
        out: Made when missing. The manifest is written last.
        cache: Images by recipe digest: one built before is linked or copied instead. None: no cache.
        rebuild: Build although the cache has it, as for newer packages; the cache then holds the new one.

    Raises:
        BuildError: Typed by its `reason`.
    """
    loaded = load_recipe(recipe_path)
    wanted_suite = loaded.recipe.suite
    loaded = loaded.with_suite(choose_suite(wanted_suite))
    recipe = loaded.recipe
    if recipe.suite != wanted_suite:
        progress("suite", wanted=wanted_suite, used=recipe.suite)
    digest = loaded.digest
    cached = None if cache is None else cache / digest.removeprefix("sha256:")
    if cached is not None and not rebuild:
        manifest = _from_cache(cached, out)
        if manifest is not None:
            progress("cached", image=f"{recipe.name}:{recipe.tag}", digest=manifest.digest)
            return manifest
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-build-") as scratch:
        root = Path(scratch) / "root"
        try:
            progress("bootstrap", image=f"{recipe.name}:{recipe.tag}", suite=recipe.suite)
            epoch_s = bootstrap(loaded, root, Path(scratch), progress)
            progress("pack")
            packed = write_blob(root, out, clamp_mtime_s=_epoch(epoch_s), keep=image_filter(recipe.exclude))
            packages = packages_of(root)
        finally:
            remove_tree(root)
    manifest = ImageManifest(
        name=recipe.name,
        tag=recipe.tag,
        architecture=machine_architecture(),
        layers=(layer_of(packed, recipe.role, recipe.name),),
        config=ImageConfig(env=recipe.env, workdir=recipe.workdir, user=recipe.user),
        recipe_digest=digest,
        provenance={
            "source": "recipe",
            "suite": recipe.suite,
            "mirror_date_s": str(epoch_s),
            "packages": canonical_json(packages).decode(),
        },
    )
    manifest.save(out)
    if cached is not None:
        _to_cache(out, manifest, cached)
    progress("done", digest=manifest.digest, size_bytes=packed.size_bytes)
    return manifest


def build_layer(
    directory: Path, out: Path, *, prefix: str, role: LayerRole, name: str | None = None
) -> ImageLayer:
    """Packs a directory as a layer of its own, to be put over any base.

    Args:
        prefix: Where it appears in a sandbox, such as "/workspace".

    Returns:
        Its line for a manifest; the blob is in `out` under `blob_name(digest)`.
    """
    out.mkdir(parents=True, exist_ok=True)
    return layer_of(write_blob(directory, out, prefix=prefix), role, name)


def compose(base: ImageManifest, layers: tuple[ImageLayer, ...], *, name: str, tag: str) -> ImageManifest:
    """An image of a base with workspace and toolkit layers over it. No layer is rebuilt.

    Workspaces come before toolkits, each in the order given: a toolkit's files win.
    """
    rank = {LayerRole.WORKSPACE: 0, LayerRole.TOOLKIT: 1}
    ordered = sorted(layers, key=lambda layer: rank.get(layer.role, 2))
    return base.model_copy(update={"name": name, "tag": tag, "layers": (*base.layers, *ordered)})


def write_blob(
    tree: Path,
    out: Path,
    *,
    prefix: str = "",
    clamp_mtime_s: int | None = None,
    keep: Callable[[Entry], bool] | None = None,
) -> PackedLayer:
    """Packs a tree into `out` under its digest's name, whole or not at all. See `pack`."""
    return blob_in(
        out,
        partial(pack, tree, clamp_mtime_s=clamp_mtime_s, prefix=prefix, keep=keep),
    )


class WriteBlob(Protocol):
    """Writes a blob to an open file."""

    def __call__(self, out: BinaryIO, /, *, threads: int) -> PackedLayer: ...


def blob_in(out: Path, write: WriteBlob) -> PackedLayer:
    """A blob in `out` under its digest's name, whole or not at all."""
    aside = out / f".{secrets.token_hex(8)}.partial"
    try:
        with aside.open("wb") as blob:
            packed = write(blob, threads=os.cpu_count() or 1)
        aside.rename(out / blob_name(packed.digest))
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return packed


def copy_image(source: Path, manifest: ImageManifest, target: Path) -> None:
    """Brings an image's blobs and manifest into another directory, as hard links where it can."""
    target.mkdir(parents=True, exist_ok=True)
    for layer in manifest.layers:
        name = blob_name(layer.digest)
        if (target / name).exists():
            continue
        try:
            os.link(source / name, target / name)
        except OSError:  # another filesystem
            aside = target / f".{name}.partial"
            shutil.copyfile(source / name, aside)
            aside.rename(target / name)
    manifest.save(target)


def _from_cache(cached: Path, out: Path) -> ImageManifest | None:
    try:
        manifest = ImageManifest.load(cached)
        sizes = [(cached / blob_name(layer.digest)).stat().st_size for layer in manifest.layers]
    except (FileNotFoundError, ValueError):
        return None
    if sizes != [layer.size_bytes for layer in manifest.layers]:
        return None
    copy_image(cached, manifest, out)
    return manifest


def _to_cache(out: Path, manifest: ImageManifest, cached: Path) -> None:
    aside = cached.parent / f".{cached.name}.{secrets.token_hex(4)}"
    copy_image(out, manifest, aside)
    remove_tree(cached)
    aside.rename(cached)


def _epoch(mirror_date_s: int) -> int:
    return int(os.environ.get("SOURCE_DATE_EPOCH", mirror_date_s))
