"""Reading a layer tar that anybody may have written."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import IO, cast

from runtime_image.layers.entries import Entry, Kind, keeps_xattr
from runtime_image.layers.errors import LayerRefused
from runtime_image.layers.stream import TarReader
from runtime_image.layers.tarsink import LITERAL_KEY, OPAQUE_NAME, WHITEOUT_KEY, WHITEOUT_PREFIX, XATTR_PREFIX
from runtime_image.layers.treesink import TreeSink

# A tree of more entries than this fits no sandbox disk (one inode each), and no index in memory.
MAX_ENTRIES = 4_000_000


@dataclass(kw_only=True)
class Extracted:
    """What an archive held.

    Attributes:
        skipped: Paths of what was left out, the first 100.
    """

    entries: int = 0
    skipped: list[str] = field(default_factory=list)


class _MemberContent:
    def __init__(self, reader: TarReader, member: tarfile.TarInfo) -> None:
        self._reader = reader
        self._left: int
        sparse = cast("list[tuple[int, int]] | None", member.sparse)
        if sparse is None:
            self._extents = [(0, member.size)] if member.size else []
        else:
            self._extents = _checked_map(sparse, member)
        self._left = sum(length for _, length in self._extents)

    def extents(self) -> Sequence[tuple[int, int]]:
        return self._extents

    def read(self, size: int) -> bytes:
        data = self._reader.read_data(min(size, self._left))
        if self._left and not data:
            raise LayerRefused("the archive ends within a file")
        self._left -= len(data)
        return data

    def fileno(self) -> int | None:
        return None


def extract(reader: TarReader, sink: TreeSink) -> Extracted:
    """Puts every member of an archive into a tree.

    Device nodes are skipped: a sandbox has its own, and none may come from outside. A member that
    would leave the tree refuses the whole archive.

    Raises:
        LayerRefused: See `TreeSink` and `TarReader`.
        tarfile.TarError: It is no tar at all.
    """
    done = Extracted()
    reader.begin_header()
    archive = tarfile.TarFile(
        fileobj=cast(IO[bytes], reader), mode="r", encoding="utf-8", errors="surrogateescape"
    )
    while True:
        reader.begin_header()
        member = archive.next()
        if member is None:
            break
        archive.members = []  # type: ignore[attr-defined]  # else it remembers every one of them
        done.entries += 1
        if done.entries > MAX_ENTRIES:
            raise LayerRefused(f"more than {MAX_ENTRIES} entries")
        _take(member, reader, sink, done)
    reader.finish()
    return done


def _take(member: tarfile.TarInfo, reader: TarReader, sink: TreeSink, done: Extracted) -> None:
    path = clean_path(member.pax_headers.get("GNU.sparse.name", member.name))
    if member.size < 0:
        raise LayerRefused("a negative size", path)
    parent, _, name = path.rpartition("/")
    if name.startswith(WHITEOUT_PREFIX) and LITERAL_KEY not in member.pax_headers:
        _take_mark(parent, name, path, sink, literal=WHITEOUT_KEY in member.pax_headers)
    elif member.type == tarfile.LNKTYPE:
        sink.link(path, clean_path(member.linkname))
    elif member.isdir():
        sink.put(_entry(path, Kind.DIRECTORY, member))
    elif member.issym():
        sink.put(_entry(path, Kind.SYMLINK, member))
    elif member.isfifo():
        sink.put(_entry(path, Kind.FIFO, member))
    elif member.isdev():
        if len(done.skipped) < 100:
            done.skipped.append(path)
    elif member.isreg():
        sink.put(_entry(path, Kind.FILE, member), _MemberContent(reader, member))
    else:
        raise LayerRefused(f"an entry of unknown type {member.type!r}", path)


def _take_mark(parent: str, name: str, path: str, sink: TreeSink, *, literal: bool) -> None:
    if name == OPAQUE_NAME and not literal:
        sink.make_opaque(parent)
        return
    hidden = name.removeprefix(WHITEOUT_PREFIX)
    if hidden.startswith(WHITEOUT_PREFIX) and not literal:
        return  # AUFS's own bookkeeping, which the image specification says to ignore
    if hidden in ("", ".", ".."):
        raise LayerRefused("a whiteout of nothing", path)
    sink.hide(f"{parent}/{hidden}" if parent else hidden)


def clean_path(name: str) -> str:
    """A member's name as a path under the root; "" for the root itself.

    Raises:
        LayerRefused: It is absolute or climbs.
    """
    if name.startswith("/"):
        raise LayerRefused("an absolute path", name)
    names = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in names:
        raise LayerRefused("a path that climbs", name)
    return "/".join(names)


def _entry(path: str, kind: Kind, member: tarfile.TarInfo) -> Entry:
    xattrs: dict[str, bytes] = {}
    for keyword, value in member.pax_headers.items():
        if keyword.startswith(XATTR_PREFIX):
            key = keyword.removeprefix(XATTR_PREFIX).replace("%3D", "=").replace("%25", "%")
            if keeps_xattr(key):
                xattrs[key] = value.encode("utf-8", "surrogateescape")
    return Entry(
        path=path,
        kind=kind,
        mode=member.mode & 0o7777,
        uid=member.uid,
        gid=member.gid,
        size=member.size if kind is Kind.FILE else 0,
        mtime_ns=_mtime_ns(member),
        link_target=member.linkname if kind is Kind.SYMLINK else "",
        xattrs=xattrs,
    )


def _mtime_ns(member: tarfile.TarInfo) -> int:
    exact = member.pax_headers.get("mtime")
    if exact is None:
        return int(member.mtime) * 1_000_000_000
    try:
        return int(Decimal(exact) * 1_000_000_000)
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise LayerRefused("a time that is no number", member.name) from error


def _checked_map(sparse: list[tuple[int, int]], member: tarfile.TarInfo) -> list[tuple[int, int]]:
    at = 0
    extents = []
    for offset, length in sparse:
        if length == 0:  # the end mark, or the old format's empty slots
            continue
        if offset < at or length < 0 or offset + length > member.size:
            raise LayerRefused("a sparse map that contradicts itself", member.name)
        at = offset + length
        extents.append((offset, length))
    return extents
