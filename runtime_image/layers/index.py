"""What a tree looked like: enough to say later what has changed in it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import zstandard

from runtime_image.layers.copy import flush
from runtime_image.layers.entries import Kind
from runtime_image.layers.errors import LayerError
from runtime_image.layers.walk import Found, walk

_FORMAT = 1
_MAX_DUMP_BYTES = 1 << 30
# Kernels before 6.13 stamp with the last timer tick: two changes within one look the same. What changed
# this shortly before the index was taken counts as changed next time (git's "racily clean" files).
_RACY_NS = 20_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexEntry:
    """One path as it was.

    Attributes:
        inode, ctime_ns: With the device, a fingerprint that root inside a sandbox cannot forge: the
            kernel alone sets them, on each change of content, owner, mode, links or xattrs.
        opaque: Directories only.
    """

    kind: Kind
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    opaque: bool = False
    link_target: str = ""

    def same_as(self, other: IndexEntry) -> bool:
        """Whether nothing about it has changed."""
        return self == other


@dataclass(frozen=True, kw_only=True)
class LayerIndex:
    """A tree at a moment.

    Attributes:
        entries: By path; "" is the root.
        device: Of the filesystem; inode numbers mean nothing on another.
        taken_ns: Wall clock just before the walk, nanoseconds since 1970.
    """

    entries: dict[str, IndexEntry]
    device: int
    taken_ns: int

    def certain(self, path: str) -> IndexEntry | None:
        """The entry, unless it changed too shortly before the index was taken to be told apart."""
        entry = self.entries.get(path)
        if entry is not None and entry.ctime_ns > self.taken_ns - _RACY_NS:
            return None
        return entry

    def dump(self) -> bytes:
        """Compact bytes for `load`."""
        rows = [
            [
                path,
                entry.kind.value,
                entry.mode,
                entry.uid,
                entry.gid,
                entry.size,
                entry.mtime_ns,
                entry.inode,
                entry.ctime_ns,
                int(entry.opaque),
                entry.link_target,
            ]
            for path, entry in self.entries.items()
        ]
        said = {"format": _FORMAT, "device": self.device, "taken_ns": self.taken_ns, "entries": rows}
        return zstandard.ZstdCompressor().compress(json.dumps(said, separators=(",", ":")).encode())

    @classmethod
    def load(cls, data: bytes) -> LayerIndex:
        """Reads what `dump` wrote.

        Raises:
            LayerError: It is not that, or of a format from the future.
        """
        try:
            said = json.loads(zstandard.ZstdDecompressor().decompress(data, _MAX_DUMP_BYTES))
            if said["format"] != _FORMAT:
                raise LayerError(f"an index of format {said['format']}, not {_FORMAT}")
            entries = {
                row[0]: IndexEntry(
                    kind=Kind(row[1]),
                    mode=row[2],
                    uid=row[3],
                    gid=row[4],
                    size=row[5],
                    mtime_ns=row[6],
                    inode=row[7],
                    ctime_ns=row[8],
                    opaque=bool(row[9]),
                    link_target=row[10],
                )
                for row in said["entries"]
            }
            return cls(entries=entries, device=said["device"], taken_ns=said["taken_ns"])
        except (zstandard.ZstdError, ValueError, KeyError, TypeError, IndexError) as error:
            raise LayerError(f"not an index: {error}") from error


def index(tree: Path, *, flush_first: bool = True) -> LayerIndex:
    """Takes the index of a tree that nobody writes meanwhile (a frozen sandbox's upper).

    It has to be the live tree, not a copy: copies have other inodes.

    Args:
        flush_first: Write dirty pages back before, without which a later store through a shared
            mapping could go unseen. False when the caller has done so since it froze the writers.
    """
    if flush_first:
        flush(tree)
    taken_ns = time.time_ns()
    entries: dict[str, IndexEntry] = {}
    device = 0
    for found in walk(tree, xattrs=False):
        entries[found.entry.path] = index_entry(found)
        device = found.stat.st_dev
    return LayerIndex(entries=entries, device=device, taken_ns=taken_ns)


def index_entry(found: Found) -> IndexEntry:
    """The index's line for what a walk stands on."""
    entry = found.entry
    return IndexEntry(
        kind=entry.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        inode=found.stat.st_ino,
        ctime_ns=found.stat.st_ctime_ns,
        opaque=entry.opaque,
        link_target=entry.link_target,
    )
