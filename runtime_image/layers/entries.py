"""One file, directory or mark of a layer, and where its bytes come from."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

OPAQUE_XATTR = "trusted.overlay.opaque"
ORIGIN_XATTR = "trusted.overlay.origin"
# Overlay marks that make a tree meaningless apart from the mount it came from.
_UNPORTABLE_XATTRS = frozenset({"trusted.overlay.redirect", "trusted.overlay.metacopy"})
_KEPT_XATTRS = frozenset({"security.capability", "system.posix_acl_access", "system.posix_acl_default"})


class Kind(StrEnum):
    """What an entry is. Values are one letter: they fill the index."""

    DIRECTORY = "d"
    FILE = "f"
    SYMLINK = "l"
    FIFO = "p"
    WHITEOUT = "w"
    SOCKET = "s"
    DEVICE = "c"


def kind_of(st: os.stat_result) -> Kind:
    """Names the kind; a character device 0/0 is overlayfs's whiteout."""
    mode = st.st_mode
    if stat.S_ISREG(mode):
        return Kind.FILE
    if stat.S_ISDIR(mode):
        return Kind.DIRECTORY
    if stat.S_ISLNK(mode):
        return Kind.SYMLINK
    if stat.S_ISCHR(mode) and st.st_rdev == 0:
        return Kind.WHITEOUT
    if stat.S_ISFIFO(mode):
        return Kind.FIFO
    if stat.S_ISSOCK(mode):
        return Kind.SOCKET
    return Kind.DEVICE


def keeps_xattr(name: str) -> bool:
    """Whether an extended attribute travels with a layer.

    The user's own do, with file capabilities and ACLs. `trusted.*` never does: overlayfs takes
    orders from it, so one that came from outside could point a mount anywhere.
    """
    return name.startswith("user.") or name in _KEPT_XATTRS


def is_unportable_xattr(name: str) -> bool:
    """Whether this mark says that the entry's content is elsewhere."""
    return name in _UNPORTABLE_XATTRS


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of a tree, by its path under the tree's root.

    Attributes:
        path: Relative, "/" separated, no leading or trailing slash; "" is the root itself. Bytes
            that are not UTF-8 are surrogate-escaped.
        mode: Permission bits with setuid, setgid and sticky; no file type.
        size: Apparent size in bytes; 0 for all but files.
        identity: (device, inode) of what may have more than one name; None otherwise.
        opaque: Directories only: what lower layers have there is hidden.
    """

    path: str
    kind: Kind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime_ns: int = 0
    link_target: str = ""
    identity: tuple[int, int] | None = None
    opaque: bool = False
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


class Content(Protocol):
    """A file's bytes: the extents that hold data, then those data one after another."""

    def extents(self) -> Sequence[tuple[int, int]]:
        """Ascending (offset, length) pairs; what lies between them is a hole."""

    def read(self, size: int) -> bytes:
        """The next at most `size` bytes of the concatenated extents; b"" at their end."""

    def fileno(self) -> int | None:
        """An open file with these very bytes at these offsets, for copies inside the kernel."""


class FileContent:
    """Content of an open regular file, holes found by SEEK_HOLE.

    Raises:
        TreeChanged: By whoever reads, when fewer bytes come than the size said.
    """

    def __init__(self, fd: int, st: os.stat_result) -> None:
        self._fd = fd
        self._extents = _data_extents(fd, st)
        self._at = 0
        self._done_in_extent = 0

    def extents(self) -> Sequence[tuple[int, int]]:
        return self._extents

    def read(self, size: int) -> bytes:
        if self._at >= len(self._extents):
            return b""
        offset, length = self._extents[self._at]
        want = min(size, length - self._done_in_extent)
        data = os.pread(self._fd, want, offset + self._done_in_extent)
        self._done_in_extent += len(data)
        if self._done_in_extent >= length:
            self._at += 1
            self._done_in_extent = 0
        return data

    def fileno(self) -> int | None:
        return self._fd


def _data_extents(fd: int, st: os.stat_result) -> list[tuple[int, int]]:
    size = st.st_size
    if size == 0:
        return []
    if st.st_blocks * 512 >= size:
        return [(0, size)]
    extents: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            if error.errno == errno.EINVAL:  # a filesystem that cannot tell
                return [(0, size)]
            raise
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start >= size:
            break
        extents.append((start, end - start))
        at = end
    return extents
