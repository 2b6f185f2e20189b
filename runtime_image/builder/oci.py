"""Images that others built: OCI registries and layouts, docker-save archives, root filesystem tars."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime_image.builder.build import write_blob
from runtime_image.builder.debian import image_filter
from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.manifest import (
    ImageConfig,
    ImageLayer,
    ImageManifest,
    LayerRole,
    layer_of,
    machine_architecture,
)
from runtime_image.builder.progress import Progress, silent
from runtime_image.layers import LayerError, dress_implied, remove_tree, squash, unpack
from runtime_image.layers.entries import Entry, Kind
from runtime_image.layers.walk import walk

# What a layer of somebody else's image may unpack to.
MAX_LAYER_BYTES = 32 * 1024**3
# Room is left below the limit of 16 for workspace, toolkits and snapshots; what is more is squashed
# into the bottom one.
MAX_IMPORTED_LAYERS = 8

_TRANSPORTS = ("docker://", "oci:", "oci-archive:", "docker-archive:", "dir:")
#: How skopeo says that it did not even ask; what follows may say why.
_NO_REFERENCE = re.compile(
    r"Invalid source name .*?(?:invalid reference format(: [^\"]*)?|Invalid image name|$)", re.M
)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def import_oci(
    reference: str, out: Path, *, name: str, tag: str, progress: Progress = silent
) -> ImageManifest:
    """Brings an image that skopeo can reach into our form, layer by layer.

    Whiteouts, hard links, xattrs and the configuration's environment, working directory and user are
    kept; device nodes are not. The image for this machine's architecture is taken from an index.

    Args:
        reference: With skopeo's transport (`docker://...`, `oci:DIR`, `docker-archive:FILE`); without
            one it is a registry reference.
        out: For blobs and `image.json`; made when missing.
        name, tag: What the image is called here.

    Raises:
        BuildError: `missing_tool`, `bad_reference`, `pull_failed` or `bad_archive`.
    """
    if shutil.which("skopeo") is None:
        raise BuildError(BuildReason.MISSING_TOOL, "skopeo is not installed: apt-get install skopeo")
    source = reference if reference.startswith(_TRANSPORTS) else f"docker://{reference}"
    with _scratch() as scratch:
        layout = scratch / "layout"
        progress("pull", reference=reference)
        command = ["skopeo", "copy", "--quiet", "--insecure-policy"]
        command += [f"--override-arch={machine_architecture()}", "--override-os=linux"]
        done = subprocess.run(
            [*command, "--", source, f"oci:{layout}:image"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            if (wrong := _NO_REFERENCE.search(done.stderr)) is not None:
                why = wrong[1] or ""
                raise BuildError(BuildReason.BAD_REFERENCE, f"is no reference of an image{why}")
            raise BuildError(BuildReason.PULL_FAILED, f"{reference}: {done.stderr.strip()[-2000:]}")
        manifest = _from_layout(
            layout, scratch, out, name, tag, {"source": "oci", "reference": reference}, progress
        )
    progress("done", digest=manifest.digest)
    return manifest


def import_tar(
    archive: Path, out: Path, *, name: str, tag: str, progress: Progress = silent
) -> ImageManifest:
    """Brings a tarball into our form: a root filesystem, or what `docker save` wrote. It tells them apart.

    Args:
        archive: Plain, gzip or zstd.
        out, name, tag: As for `import_oci`.

    Raises:
        BuildError: `missing_tool`, `pull_failed` or `bad_archive`.
    """
    if not archive.is_file():
        raise BuildError(BuildReason.BAD_ARCHIVE, f"no file {archive}")
    transport = _saved_image(archive)
    if transport is not None:
        manifest = import_oci(f"{transport}:{archive}", out, name=name, tag=tag, progress=progress)
        provenance = {"source": "archive", "file": archive.name}
        manifest = manifest.model_copy(update={"provenance": provenance})
        manifest.save(out)
        return manifest
    with _scratch() as scratch:
        progress("unpack", file=archive.name)
        tree = scratch / "tree"
        _unpacked(archive, tree, archive.name)
        if not any((tree / top).is_dir() for top in ("bin", "usr", "etc", "lib", "sbin")):
            raise BuildError(BuildReason.BAD_ARCHIVE, f"{archive.name} holds no root filesystem")
        out.mkdir(parents=True, exist_ok=True)
        progress("pack")
        layer = layer_of(write_blob(tree, out, keep=image_filter()), LayerRole.BASE, name)
    manifest = ImageManifest(
        name=name,
        tag=tag,
        architecture=machine_architecture(),
        layers=(layer,),
        provenance={"source": "tar", "file": archive.name},
    )
    manifest.save(out)
    progress("done", digest=manifest.digest)
    return manifest


def _from_layout(
    layout: Path,
    scratch: Path,
    out: Path,
    name: str,
    tag: str,
    provenance: dict[str, str],
    progress: Progress,
) -> ImageManifest:
    index = _json(layout / "index.json")
    image = _json(_blob(layout, _only(index.get("manifests")).get("digest")))
    config = _json(_blob(layout, (image.get("config") or {}).get("digest")))
    architecture = str(config.get("architecture") or machine_architecture())
    if architecture != machine_architecture():
        raise BuildError(
            BuildReason.BAD_ARCHIVE,
            f"the image is for {architecture}, this machine is {machine_architecture()}",
        )
    blobs = [_blob(layout, (layer or {}).get("digest")) for layer in image.get("layers") or ()]
    if not blobs:
        raise BuildError(BuildReason.BAD_ARCHIVE, "an image without layers")
    out.mkdir(parents=True, exist_ok=True)
    layers = tuple(_layers(blobs, scratch, out, name, progress))
    manifest = ImageManifest(
        name=name,
        tag=tag,
        architecture=architecture,
        layers=layers,
        config=_config(config.get("config") or {}),
        provenance=provenance,
    )
    manifest.save(out)
    return manifest


def _layers(
    blobs: list[Path], scratch: Path, out: Path, name: str, progress: Progress
) -> Iterator[ImageLayer]:
    to_squash = max(1, len(blobs) - MAX_IMPORTED_LAYERS + 1)
    trees: list[Path] = []
    below: list[Path] = []
    for number, blob in enumerate(blobs):
        progress("unpack", layer=number + 1, layers=len(blobs))
        tree = scratch / f"layer{number}"
        what = f"layer {number + 1}"
        implied = _unpacked(blob, tree, what, expect_digest=f"sha256:{blob.name}")
        try:
            dress_implied(tree, implied, [*below, *trees])
        except LayerError as error:
            raise BuildError(BuildReason.BAD_ARCHIVE, f"{what}: {error}") from error
        trees.append(tree)
        if number + 1 < to_squash:
            continue
        if number + 1 == to_squash and (number or not _is_clean_bottom(tree)):
            # The bottom layer has nothing to hide; whiteouts in it would show as broken entries.
            flat = scratch / "flat"
            squash(trees, flat, bottom=True)
            for used in trees:
                remove_tree(used)
            tree = flat
        trees.clear()
        bottom = number + 1 == to_squash
        packed = write_blob(tree, out, keep=image_filter() if bottom else _no_sockets)
        yield layer_of(packed, LayerRole.BASE, name)
        below.append(tree)


def _is_clean_bottom(tree: Path) -> bool:
    return not any(found.entry.kind is Kind.WHITEOUT or found.entry.opaque for found in walk(tree))


def _no_sockets(entry: Entry) -> bool:
    return entry.kind not in (Kind.SOCKET, Kind.DEVICE)


def _unpacked(blob: Path, tree: Path, what: str, *, expect_digest: str | None = None) -> tuple[str, ...]:
    try:
        return unpack(blob, tree, max_bytes=MAX_LAYER_BYTES, expect_digest=expect_digest).implied
    except LayerError as error:
        raise BuildError(BuildReason.BAD_ARCHIVE, f"{what}: {error}") from error


def _saved_image(archive: Path) -> str | None:
    """skopeo's transport for an archive of an image; None for any other tar."""
    try:
        with tarfile.open(archive, "r|*") as tar:
            for number, member in enumerate(tar):
                name = member.name.removeprefix("./")
                if name == "manifest.json":
                    return "docker-archive"
                if name == "oci-layout":
                    # What docker save writes nowadays is both; the manifest comes after the blobs.
                    return "docker-archive" if _has(archive, "manifest.json") else "oci-archive"
                if number > 100_000:
                    break
    except (tarfile.TarError, EOFError, OSError):
        return None  # unpacking it will say what is wrong, or take zstd
    return None


def _has(archive: Path, wanted: str) -> bool:
    with tarfile.open(archive, "r|*") as tar:
        return any(member.name.removeprefix("./") == wanted for member in tar)


def _config(said: dict[str, Any]) -> ImageConfig:
    env = dict(line.split("=", 1) for line in said.get("Env") or () if "=" in line)
    entrypoint = [*(said.get("Entrypoint") or ()), *(said.get("Cmd") or ())]
    return ImageConfig(
        env=env,
        workdir=said.get("WorkingDir") or None,
        user=said.get("User") or None,
        entrypoint=tuple(str(word) for word in entrypoint),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(BuildReason.BAD_ARCHIVE, f"{path.name}: {error}") from error
    if not isinstance(said, dict):
        raise BuildError(BuildReason.BAD_ARCHIVE, f"{path.name} is no JSON object")
    return said


def _blob(layout: Path, digest: object) -> Path:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise BuildError(BuildReason.BAD_ARCHIVE, f"not a digest: {str(digest)[:100]!r}")
    return layout / "blobs" / "sha256" / match.group(1)


def _only(manifests: object) -> dict[str, Any]:
    if not isinstance(manifests, list) or len(manifests) != 1 or not isinstance(manifests[0], dict):
        raise BuildError(BuildReason.BAD_ARCHIVE, "an index that does not name one image")
    return manifests[0]


@contextmanager
def _scratch() -> Iterator[Path]:
    """A private directory, removed with trees of any depth in it."""
    path = Path(tempfile.mkdtemp(prefix="shoal-import-"))
    try:
        yield path
    finally:
        remove_tree(path)
