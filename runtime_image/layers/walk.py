"""Reading a tree that someone untrusted has written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime_image.layers.dirs import DirStack
from runtime_image.layers.entries import (
    OPAQUE_XATTR,
    ORIGIN_XATTR,
    Entry,
    FileContent,
    Kind,
    is_unportable_xattr,
    keeps_xattr,
    kind_of,
)
from runtime_image.layers.errors import TreeChanged, TreeUnsupported

# Longer than any path a program can name at once; shorter than what would make a hostile tree of
# nested directories cost the square of its depth.
MAX_PATH_BYTES = 32 * 1024

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Kinds that may have several names and are the same thing under each.
# What the kernel says of a name that is no longer what it was a moment ago: gone, no symlink any more,
# an attribute less.
_GONE = frozenset({errno.ENOENT, errno.EINVAL, errno.ENODATA})
_LINKABLE = frozenset({Kind.FILE, Kind.SYMLINK, Kind.FIFO})


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """An entry while the walk stands on it.

    Attributes:
        stat: As lstat tells it.
        dir_fd: The directory it was found in; valid until the walk moves on.
        under_opaque: Whether a directory above it, or the directory itself, hides the lower layers.
        merged: In an upper: whether lower layers may show in the directory it is in. Overlayfs leaves
            its origin mark on directories that it copied up and on no others. In a tree that was
            copied or unpacked only the root's entries have it.
    """

    entry: Entry
    stat: os.stat_result
    dir_fd: int
    name: str
    under_opaque: bool
    merged: bool

    def names(self) -> set[str]:
        """The names in a directory; empty when it has vanished."""
        try:
            fd = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.dir_fd)
        except OSError:
            return set()
        try:
            return set(os.listdir(fd))
        finally:
            os.close(fd)

    def open(self) -> int:
        """Opens a regular file for reading.

        Raises:
            TreeChanged: It is no longer that file.
        """
        try:
            fd = os.open(self.name, _OPEN_FILE, dir_fd=self.dir_fd)
        except OSError as error:
            raise TreeChanged(f"{self.entry.path[:200]!r}: {error.strerror}") from error
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_ino != self.stat.st_ino:
            os.close(fd)
            raise TreeChanged(f"{self.entry.path[:200]!r} was replaced while it was read")
        return fd


@dataclass(slots=True)
class _Level:
    names: list[str]
    prefix: str
    opaque: bool
    merged: bool
    at: int = 0


def walk(
    tree: Path,
    *,
    xattrs: bool = True,
    descend: Callable[[Entry], bool] | None = None,
    live: bool = False,
) -> Iterator[Found]:
    """Yields the root, then everything below it, parents first and siblings sorted by name.

    Args:
        xattrs: Read extended attributes of everything; otherwise of directories only, as far as the
            opaque mark needs it.
        descend: Asked for each directory below the root; False skips what is in it.
        live: Somebody is writing: pass over what vanishes.

    Raises:
        TreeChanged: Something vanished under the walk, unless `live`.
        TreeUnsupported: The tree cannot be a layer.
    """
    with DirStack(tree) as stack:
        fd = stack.fd
        st = os.fstat(fd)
        root = entry_at("", "", st, fd, xattrs)
        yield Found(entry=root, stat=st, dir_fd=fd, name=".", under_opaque=root.opaque, merged=True)
        levels = [_Level(sorted(os.listdir(fd)), "", root.opaque, not root.opaque)]
        while levels:
            level = levels[-1]
            if level.at >= len(level.names):
                levels.pop()
                if levels:
                    stack.leave()
                continue
            name = level.names[level.at]
            level.at += 1
            fd = stack.fd
            try:
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                entry = entry_at(level.prefix + name, name, st, fd, xattrs)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                if live:
                    continue
                raise TreeChanged(f"{(level.prefix + name)[:200]!r}: {error.strerror}") from error
            opaque = level.opaque or entry.opaque
            yield Found(entry=entry, stat=st, dir_fd=fd, name=name, under_opaque=opaque, merged=level.merged)
            if entry.kind is Kind.DIRECTORY and (descend is None or descend(entry)):
                try:
                    fd = stack.enter(name)
                except (FileNotFoundError, NotADirectoryError) as error:
                    if live:
                        continue
                    raise TreeChanged(f"{entry.path[:200]!r}: {error.strerror}") from error
                merged = level.merged and not entry.opaque and ORIGIN_XATTR in os.listxattr(fd)
                levels.append(_Level(sorted(os.listdir(fd)), entry.path + "/", opaque, merged))


def content_of(found: Found) -> tuple[int, FileContent]:
    """Opens a file that the walk stands on; the caller closes the descriptor."""
    fd = found.open()
    return fd, FileContent(fd, found.stat)


def entry_at(path: str, name: str, st: os.stat_result, dir_fd: int, with_xattrs: bool = True) -> Entry:
    """Describes what an open directory has under a name, as an entry at `path`.

    Raises:
        TreeUnsupported: A layer cannot say it.
    """
    if len(path) > MAX_PATH_BYTES // 4 and len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise TreeUnsupported(f"a path of over {MAX_PATH_BYTES} bytes: {path[:100]!r}...")
    kind = kind_of(st)
    kept: dict[str, bytes] = {}
    opaque = False
    if with_xattrs or kind is Kind.DIRECTORY:
        # By way of the directory's descriptor: the last component is not followed, and neither
        # FIFOs nor devices are opened for it.
        where = f"/proc/self/fd/{dir_fd}/{name}" if name else f"/proc/self/fd/{dir_fd}/."
        for key in os.listxattr(where, follow_symlinks=False):
            if key == OPAQUE_XATTR:
                opaque = os.getxattr(where, key, follow_symlinks=False) == b"y"
            elif keeps_xattr(key):
                if with_xattrs:
                    kept[key] = os.getxattr(where, key, follow_symlinks=False)
            elif is_unportable_xattr(key):
                raise TreeUnsupported(
                    f"{path[:200]!r} carries {key}: mount with redirect_dir=off,metacopy=off"
                )
    return Entry(
        path=path,
        kind=kind,
        mode=stat.S_IMODE(st.st_mode),
        uid=st.st_uid,
        gid=st.st_gid,
        size=st.st_size if kind is Kind.FILE else 0,
        mtime_ns=st.st_mtime_ns,
        link_target=os.readlink(name, dir_fd=dir_fd) if kind is Kind.SYMLINK else "",
        identity=(st.st_dev, st.st_ino) if kind in _LINKABLE and st.st_nlink > 1 else None,
        opaque=opaque,
        xattrs=kept,
    )
