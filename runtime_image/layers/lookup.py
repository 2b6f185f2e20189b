"""Looking into a stack of layers without mounting it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from runtime_image.layers.entries import OPAQUE_XATTR


def has_directory(layers: Sequence[Path], path: str) -> bool:
    """Whether `path` is surely a directory in the merged tree of `layers` (bottom first).

    False also where it takes more than a look at names to tell: a symlink on the way, a whiteout, an opaque
    directory. Layers do not change, so that the answer holds; nothing is followed.
    """
    parts = PurePosixPath(path).parts[1:]
    if not path.startswith("/") or ".." in parts:
        return False
    for layer in reversed(layers):
        place = str(layer)
        opaque = False
        for part in parts:
            place = f"{place}/{part}"
            try:
                found = os.lstat(place)
            except FileNotFoundError:
                break
            if not stat.S_ISDIR(found.st_mode):
                return False
            opaque = opaque or _is_opaque(place)
        else:
            return True
        if opaque:
            return False
    return False


def _is_opaque(directory: str) -> bool:
    try:
        return os.getxattr(directory, OPAQUE_XATTR, follow_symlinks=False) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise
