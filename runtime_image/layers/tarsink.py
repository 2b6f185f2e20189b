"""Entries as an OCI layer tar: POSIX pax format, whiteouts as `.wh.` names.

Python's `tarfile` makes the headers. GNU tar is not used to write: it knows no whiteouts, and it would
take a program start on the path where a snapshot of a few files has a few milliseconds.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable

from runtime_image.layers.entries import Content, Entry, Kind
from runtime_image.layers.errors import TreeChanged, TreeUnsupported

WHITEOUT_PREFIX = ".wh."
OPAQUE_NAME = ".wh..wh..opq"
XATTR_PREFIX = "SCHILY.xattr."
# OCI has no way to say that a file is really called `.wh.something`. Ours is a pax record that other
# tools ignore.
LITERAL_KEY = "SHOAL.literal"
# The other way round: the whiteout of such a file, whose name other tools take for AUFS's bookkeeping.
WHITEOUT_KEY = "SHOAL.whiteout"

_BLOCK = 512
_CHUNK = 1024 * 1024
# Small pieces are gathered: each hand-over to hash and compressor has a price.
_GATHER = 256 * 1024
_TYPES = {
    Kind.DIRECTORY: tarfile.DIRTYPE,
    Kind.FILE: tarfile.REGTYPE,
    Kind.SYMLINK: tarfile.SYMTYPE,
    Kind.FIFO: tarfile.FIFOTYPE,
}


class TarSink:
    """Writes entries as a tar stream.

    Args:
        write: Takes the stream's bytes in order.
        clamp_mtime_s: Later times become this one (SOURCE_DATE_EPOCH); None keeps every time.
    """

    def __init__(self, write: Callable[[bytes], object], *, clamp_mtime_s: int | None = None) -> None:
        self._write = write
        self._clamp_ns = None if clamp_mtime_s is None else clamp_mtime_s * 1_000_000_000
        self._gathered = bytearray()
        self.bytes_written = 0

    def put(self, entry: Entry, content: Content | None = None) -> None:
        if entry.kind is Kind.WHITEOUT:
            parent, _, name = entry.path.rpartition("/")
            self._mark(
                f"{parent}/{WHITEOUT_PREFIX}{name}" if parent else WHITEOUT_PREFIX + name,
                hides_literal=name.startswith(WHITEOUT_PREFIX),
            )
            return
        info = self._info(entry)
        if entry.kind is Kind.FILE:
            if content is None:
                raise ValueError(f"no content for {entry.path!r}")
            self._file(info, entry, content)
            return
        if entry.kind not in _TYPES:
            raise TreeUnsupported(f"a layer holds no {entry.kind.name.lower()}: {entry.path[:200]!r}")
        info.type = _TYPES[entry.kind]
        info.linkname = entry.link_target
        self._header(info)
        if entry.opaque:
            self._mark(f"{entry.path}/{OPAQUE_NAME}" if entry.path else OPAQUE_NAME)

    def link(self, path: str, target: str) -> None:
        info = tarfile.TarInfo(path)
        info.type = tarfile.LNKTYPE
        info.linkname = target
        if _looks_like_a_mark(path):
            info.pax_headers = {LITERAL_KEY: "1"}
        self._header(info)

    def finish(self) -> None:
        """Writes the end of the archive."""
        self._emit(b"\0" * (2 * _BLOCK))
        self._emit(b"\0" * (-self.bytes_written % tarfile.RECORDSIZE))
        self._flush()

    def _info(self, entry: Entry) -> tarfile.TarInfo:
        info = tarfile.TarInfo(entry.path or ".")
        info.mode, info.uid, info.gid = entry.mode, entry.uid, entry.gid
        mtime_ns = entry.mtime_ns
        if self._clamp_ns is not None:
            mtime_ns = min(mtime_ns, self._clamp_ns)
        seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
        info.mtime = seconds
        records: dict[str, str] = {}
        if nanoseconds or seconds < 0:
            records["mtime"] = decimal_time(mtime_ns)
        for key, value in sorted(entry.xattrs.items()):
            # As GNU tar escapes them: "=" ends a pax keyword.
            keyword = XATTR_PREFIX + key.replace("%", "%25").replace("=", "%3D")
            records[keyword] = value.decode("utf-8", "surrogateescape")
        if _looks_like_a_mark(entry.path):
            records[LITERAL_KEY] = "1"
        info.pax_headers = records
        return info

    def _mark(self, path: str, *, hides_literal: bool = False) -> None:
        info = tarfile.TarInfo(path)
        info.mode = 0
        if hides_literal:
            info.pax_headers = {WHITEOUT_KEY: "1"}
        self._header(info)

    def _file(self, info: tarfile.TarInfo, entry: Entry, content: Content) -> None:
        extents = list(content.extents())
        info.size = sum(length for _, length in extents)
        table = b""
        if info.size != entry.size:
            table = self._sparse(info, entry, extents)
        self._header(info)
        self._emit(table)
        left = info.size - len(table)
        while left:
            data = content.read(min(_CHUNK, left))
            if not data:
                raise TreeChanged(f"{entry.path[:200]!r} is shorter than its size")
            left -= len(data)
            self._emit(data)
        self._emit(b"\0" * (-info.size % _BLOCK))

    @staticmethod
    def _sparse(info: tarfile.TarInfo, entry: Entry, extents: list[tuple[int, int]]) -> bytes:
        """Turns the header into GNU's sparse format 1.0 and gives the map that precedes the data."""
        if not extents or sum(extents[-1]) != entry.size:
            extents = [*extents, (entry.size, 0)]
        numbers = [len(extents), *(number for extent in extents for number in extent)]
        table = "".join(f"{number}\n" for number in numbers).encode()
        table += b"\0" * (-len(table) % _BLOCK)
        info.pax_headers = {
            **info.pax_headers,
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": info.name,
            "GNU.sparse.realsize": str(entry.size),
        }
        # Short and ASCII: a `path` record would come after GNU.sparse.name and win over it.
        info.name = "GNUSparseFile.0/sparse"
        info.size += len(table)
        return table

    def _header(self, info: tarfile.TarInfo) -> None:
        self._emit(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _emit(self, data: bytes) -> None:
        self.bytes_written += len(data)
        self._gathered += data
        if len(self._gathered) >= _GATHER:
            self._flush()

    def _flush(self) -> None:
        if self._gathered:
            self._write(bytes(self._gathered))
            self._gathered.clear()


def decimal_time(time_ns: int) -> str:
    """Seconds since 1970 as a pax record has them, exact to the nanosecond."""
    sign = "-" if time_ns < 0 else ""
    seconds, nanoseconds = divmod(abs(time_ns), 1_000_000_000)
    return f"{sign}{seconds}.{nanoseconds:09d}".rstrip("0").rstrip(".")


def _looks_like_a_mark(path: str) -> bool:
    return path.rpartition("/")[2].startswith(WHITEOUT_PREFIX)
