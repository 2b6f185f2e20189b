"""Building and importing images from the command line.

Prints one JSON object on standard output, progress on standard error. Exits with 0, 1 for a typed
failure, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from runtime_image.builder.build import build_layer, build_recipe
from runtime_image.builder.errors import BuildError
from runtime_image.builder.manifest import ImageManifest, LayerRole, blob_name
from runtime_image.builder.progress import StderrProgress


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
    layer = build_layer(
        options.dir, out, prefix=options.prefix, role=LayerRole(options.role), name=options.name
    )
    return {**layer.model_dump(mode="json"), "blob": str(out / blob_name(layer.digest))}


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

    layer = commands.add_parser("build-layer", parents=[common], help="pack a directory as a layer")
    layer.add_argument("--dir", type=Path, required=True)
    layer.add_argument("--prefix", required=True, help="where it appears, such as /workspace")
    layer.add_argument("--role", choices=[LayerRole.WORKSPACE.value, LayerRole.TOOLKIT.value], required=True)
    layer.add_argument("--name", default=None)
    return parser
