"""Building and importing images from the command line.

Prints one JSON object on standard output, progress on standard error. Exits with 0, 1 for a typed
failure, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from runtime_image.builder.build import build_layer, build_recipe, compose, copy_image
from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.manifest import ImageManifest, LayerRole, blob_name, machine_architecture
from runtime_image.builder.oci import import_oci, import_tar
from runtime_image.builder.progress import StderrProgress
from runtime_image.builder.repack import repack_layers
from runtime_image.builder.workspace import build_workspace, fetch_source, load_workspace

_ROOM = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Without the program's name; None takes the process's own.
    """
    options = _parser().parse_args(arguments)
    progress = StderrProgress(as_json=options.json_progress)
    try:
        said = _run(options, progress)
    except BuildError as error:
        progress("failed", reason=error.reason.value, detail=error.detail)
        return 1
    print(json.dumps(said))
    return 0


def _run(options: argparse.Namespace, progress: StderrProgress) -> dict[str, object]:
    out: Path = options.out
    if options.command == "build":
        return _told(
            build_recipe(
                options.recipe, out, cache=options.cache, rebuild=options.rebuild, progress=progress
            ),
            out,
        )
    if options.command == "import-oci":
        return _told(
            import_oci(options.reference, out, name=options.name, tag=options.tag, progress=progress), out
        )
    if options.command == "import-tar":
        return _told(
            import_tar(options.file, out, name=options.name, tag=options.tag, progress=progress), out
        )
    if options.command == "repack":
        exclude = [*options.exclude, *(_globs(options.exclude_file) if options.exclude_file else ())]
        return _told(repack_layers(options.blob, exclude, out, progress=progress), out)
    if options.command == "workspace":
        spec = load_workspace(options.spec)
        out.mkdir(parents=True, exist_ok=True)
        source = options.sdist or fetch_source(spec, options.requirements, out)
        layer = build_workspace(spec, source, out, progress=progress)
        if options.base is not None:
            base = ImageManifest.load(options.base)
            copy_image(options.base, base, out)
            manifest = compose(base, (layer,), name=f"{base.name}-{spec.name}", tag=spec.version)
            manifest.save(out)
            return {**_told(manifest, out), "workspace_layer": layer.digest}
        name, tag = spec.name, spec.version
    else:
        layer = build_layer(
            options.dir, out, prefix=options.prefix, role=LayerRole(options.role), name=options.name
        )
        name, tag = options.name or options.role, "latest"
    # An image of the layer alone: registered, it can be put over any base.
    alone = ImageManifest(name=name, tag=tag, architecture=machine_architecture(), layers=(layer,))
    alone.save(out)
    return {**layer.model_dump(mode="json"), "blob": str(out / blob_name(layer.digest))}


def _globs(path: Path) -> list[str]:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(BuildReason.BAD_EXCLUDE, f"{path}: {error}") from error
    if not isinstance(said, list) or not all(isinstance(glob, str) for glob in said):
        raise BuildError(BuildReason.BAD_EXCLUDE, f"{path} is no list of globs")
    return said


def _told(manifest: ImageManifest, out: Path) -> dict[str, object]:
    return {
        "image": f"{manifest.name}:{manifest.tag}",
        "digest": manifest.digest,
        "layers": [layer.digest for layer in manifest.layers],
        "size_bytes": sum(layer.size_bytes for layer in manifest.layers),
        "uncompressed_bytes": sum(layer.uncompressed_bytes for layer in manifest.layers),
        "out": str(out),
    }


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, required=True, help="directory for blobs and image.json")
    common.add_argument("--json-progress", action="store_true", help="progress as JSON lines")
    parser = argparse.ArgumentParser(prog="python -m runtime_image.builder", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", parents=[common], help="build a recipe")
    build.add_argument("--recipe", type=Path, required=True)
    build.add_argument("--cache", type=Path, default=None, help="images by recipe digest")
    build.add_argument("--rebuild", action="store_true", help="build although the cache has it")

    called = argparse.ArgumentParser(add_help=False)
    called.add_argument("--name", default="imported", help="the image's name here")
    called.add_argument("--tag", default="latest")
    oci = commands.add_parser("import-oci", parents=[common, called], help="from a registry or a layout")
    oci.add_argument("reference", help="as skopeo takes it: docker://..., oci:DIR, docker-archive:FILE")
    tar = commands.add_parser(
        "import-tar", parents=[common, called], help="a root filesystem, or docker save"
    )
    tar.add_argument("file", type=Path)

    layer = commands.add_parser("build-layer", parents=[common], help="pack a directory as a layer")
    layer.add_argument("--dir", type=Path, required=True)
    layer.add_argument("--prefix", required=True, help="where it appears, such as /workspace")
    layer.add_argument("--role", choices=[LayerRole.WORKSPACE.value, LayerRole.TOOLKIT.value], required=True)
    layer.add_argument("--name", default=None)

    again = commands.add_parser("repack", parents=[common], help="layers anew without some of their paths")
    again.add_argument("blob", type=Path, nargs="+", help="a layer's blob")
    again.add_argument(
        "--exclude", metavar="GLOB", action="append", default=[], help="relative to /; ** across directories"
    )
    again.add_argument("--exclude-file", type=Path, default=None, help="a JSON list of such globs")

    workspace = commands.add_parser("workspace", parents=[common], help="the demonstration's workspace")
    workspace.add_argument("--spec", type=Path, default=_ROOM / "examples/workspaces/toolz.toml")
    workspace.add_argument("--requirements", type=Path, default=_ROOM / "requirements/workspace.txt")
    workspace.add_argument("--sdist", type=Path, default=None, help="the archive, instead of fetching it")
    workspace.add_argument(
        "--base", type=Path, default=None, help="an image's directory: write image.json of both to --out"
    )
    return parser
