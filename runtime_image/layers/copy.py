"""Copying a tree in overlayfs form, and taking its last writes along."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from runtime_image.layers.changes import LowerView
from runtime_image.layers.dirs import DirStack, open_root
from runtime_image.layers.errors import TreeUnsupported
from runtime_image.layers.pack import Counts, feed
from runtime_image.layers.treesink import TreeSink
from runtime_image.layers.walk import entry_at, walk

_libc = ctypes.CDLL(None, use_errno=True)


def copy_tree(src: Path, dst: Path) -> Counts:
    """Copies a tree: owners, modes, times, hard links, holes, xattrs, whiteouts and opaque marks.

    Extents are shared where the filesystem can; elsewhere the kernel copies. No program is started:
    a tree of a few files takes a millisecond or so. Overlayfs's other marks (origin, impure) stay
    behind: they mean something only to the mount they came from.

    Args:
        src: May be written by a sandbox, which is frozen meanwhile.
        dst: Must not exist. What was copied until an error stays, for the caller to remove.

    Raises:
        TreeChanged: A file changed underneath.
        TreeUnsupported: The tree cannot be a layer.
    """
    dst.mkdir(mode=0o700)
    with TreeSink(dst) as sink:
        return feed(walk(src), sink)


def dress_root(upper: Path, layer: Path) -> None:
    """Gives a new upper's root the owner, mode, time and xattrs of a layer's root.

    Overlayfs shows the topmost root directory's, and a fresh upper is the topmost.

    Args:
        upper: An empty directory.
        layer: The topmost of the lowers.
    """
    with TreeSink(upper) as sink:
        sink.put(replace(next(walk(layer)).entry, opaque=False))


def dress_implied(tree: Path, implied: Sequence[str], lowers: Sequence[Path]) -> None:
    """Gives a layer's directories that had no entry of their own what the lowers say of them.

    Args:
        tree: A layer just unpacked.
        implied: Its `UnpackedLayer.implied`.
        lowers: Bottom first.

    Raises:
        TreeUnsupported: Where the lowers have a symlink or a file, so that the layer's own content would
            appear in another place than its maker meant.
    """
    with ExitStack() as opened:
        view = LowerView([opened.enter_context(DirStack(layer)) for layer in lowers])
        with TreeSink(tree) as sink:
            for path in sorted(implied):
                if not path:
                    continue
                below = view.find(path)
                if below is None:
                    continue
                if not below.is_directory:
                    raise TreeUnsupported(f"{path[:200]!r} is no directory in the layers below")
                sink.put(replace(entry_at(path, below.name, below.stat, below.dir_fd), opaque=False))


def flush(tree: Path) -> None:
    """Writes back all dirty pages of the filesystem that holds the tree.

    Before an index is taken this also makes later stores through a shared mapping visible: the
    kernel stamps a page's file again only once the page was written back.
    """
    fd = open_root(tree)
    try:
        if _libc.syncfs(fd) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(tree))
    finally:
        os.close(fd)
