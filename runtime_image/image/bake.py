"""`python -m runtime_image.image.bake BLOB...`: unpack layers into a disk that becomes part of a machine image.

A blob is a file that the builder wrote, `<sha256 of the file>.tar.zst`. Hosts that start from the image have these
layers at once: an agent takes them as its own, whatever boot it is in.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from runtime_image.image.entrypoint import STATE
from runtime_image.layers import LayerCache, LayerError


def bake(blobs: Sequence[Path], layers_dir: Path) -> list[str]:
    """Unpack, verify and seal; the digests of all layers that are there then.

    Raises:
        LayerError: A blob is not what its name says, or no layer.
    """
    cache = LayerCache(layers_dir)
    for blob in blobs:
        digest = "sha256:" + blob.name.partition(".")[0]
        cache.ensure(digest, partial(_copy, blob))
    return cache.seal()


def _copy(blob: Path, target: Path) -> None:
    shutil.copyfile(blob, target)


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: a blob is refused, and stderr says why."""
    parser = argparse.ArgumentParser(prog="python -m runtime_image.image.bake", description=__doc__)
    parser.add_argument("--layers-dir", type=Path, default=STATE / "layers", help="default: %(default)s")
    parser.add_argument("blobs", type=Path, nargs="+", metavar="BLOB")
    options = parser.parse_args(argv)
    try:
        for digest in bake(options.blobs, options.layers_dir):
            print(digest)
    except (LayerError, OSError, ValueError) as error:
        print(f"bake: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
