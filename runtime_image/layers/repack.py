"""A layer anew, without some of what it holds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from runtime_image.layers.dirs import remove_tree
from runtime_image.layers.entries import Entry
from runtime_image.layers.pack import BlobWriter, PackedLayer, feed, seal, unpack
from runtime_image.layers.tarsink import TarSink
from runtime_image.layers.walk import Found, walk


def repack(
    blob: Path,
    out: BinaryIO,
    *,
    keep: Callable[[Entry], bool],
    scratch: Path,
    max_bytes: int,
    expect_digest: str | None = None,
    level: int = 3,
    threads: int = 1,
) -> PackedLayer:
    """Writes a blob again with the entries that are kept, and those exactly as they were.

    A whiteout or an opaque mark goes with its path: what was left out of a layer shows again what is below
    it. Of hard links the first name that is kept brings the bytes. Where everything is kept, the diff_id
    stays that of a blob which `pack` wrote.

    Args:
        blob: May be anybody's.
        keep: Asked once for each entry below the root, parents first; False leaves it out, with all that
            is in it.
        scratch: A directory closed to other users, for the tree; nothing stays there.
        max_bytes, expect_digest: As for `unpack`.

    Raises:
        LayerRefused, DigestMismatch, TreeUnsupported: The blob cannot be used.
        OSError: The machine failed.
    """
    tree = scratch / f"repack-{secrets.token_hex(4)}"
    try:
        unpacked = unpack(blob, tree, max_bytes=max_bytes, expect_digest=expect_digest)
        writer = BlobWriter(out, level=level, threads=threads)
        sink = TarSink(writer.write)
        # A directory without an entry of its own gets none: it would hide what is known of it below.
        implied = frozenset(unpacked.implied)
        kept = (found for found in _kept(tree, keep) if found.entry.path not in implied)
        return seal(writer, sink, feed(kept, sink))
    finally:
        remove_tree(tree)


def _kept(tree: Path, keep: Callable[[Entry], bool]) -> Iterator[Found]:
    wanted = True

    def descend(entry: Entry) -> bool:
        return wanted  # the walk asks about a directory once its caller has seen it

    for found in walk(tree, descend=descend):
        wanted = not found.entry.path or keep(found.entry)
        if wanted:
            yield found
