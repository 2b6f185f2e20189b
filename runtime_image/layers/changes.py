"""Which paths an upper adds, changes and removes, seen from inside the sandbox."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runtime_image.layers.dirs import DirStack
from runtime_image.layers.entries import OPAQUE_XATTR, Kind, keeps_xattr, kind_of
from runtime_image.layers.errors import TreeChanged
from runtime_image.layers.walk import Found, walk

# Files of equal size and mode are compared byte by byte up to this; larger ones count as changed: they
# were copied up for a reason.
_COMPARED_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Sorted paths without a leading slash.

    Attributes:
        added: Not there before; every file and directory of a new directory is named.
        changed: Other content, kind, mode, owner, link target or xattrs. Times alone are no change.
        removed: No longer there; a removed directory stands for all that was in it.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def changes(upper: Path, lowers: Sequence[Path]) -> Changes:
    """Compares an upper with the layers below it.

    Walks the upper only and looks its paths up in the lowers; a directory that hides its lower content
    (opaque) is the one thing that is listed below as well. The upper may be in use: what changes
    meanwhile may be missed or told twice, and what vanishes is passed over.

    Args:
        lowers: Bottom first, as everywhere in this package.
    """
    with ExitStack() as opened:
        view = LowerView([opened.enter_context(DirStack(layer)) for layer in lowers])
        added: list[str] = []
        changed: list[str] = []
        removed: list[str] = []
        for found in walk(upper, live=True):
            entry = found.entry
            if not entry.path:
                continue
            below = view.find(entry.path)
            if entry.kind is Kind.WHITEOUT:
                if below is not None:
                    removed.append(entry.path)
                continue
            if below is None:
                added.append(entry.path)
            elif _differs(found, below):
                changed.append(entry.path)
            if entry.kind is Kind.DIRECTORY and found.under_opaque and below is not None:
                present = found.names()
                removed += [f"{entry.path}/{name}" for name in view.names(entry.path) if name not in present]
        return Changes(
            added=tuple(sorted(added)), changed=tuple(sorted(changed)), removed=tuple(sorted(removed))
        )


@dataclass(frozen=True, kw_only=True)
class LowerEntry:
    """What the lowers show at a path, valid until the view is asked again."""

    stat: os.stat_result
    dir_fd: int
    name: str

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.stat.st_mode)


class LowerView:
    """Layers as overlayfs would show them, one path at a time, without mounting them."""

    def __init__(self, layers: Sequence[DirStack]) -> None:
        """Takes the layers bottom first."""
        self._top_first = list(reversed(layers))

    def find(self, path: str) -> LowerEntry | None:
        """The topmost entry at that path; None when no layer shows one."""
        return next(self._at(path), None)

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; empty when it is none."""
        shown: dict[str, bool] = {}
        for place in self._at(path):
            if not place.is_directory:
                break
            with os.scandir(f"/proc/self/fd/{place.dir_fd}/{place.name}") as entries:
                for item in entries:
                    there = kind_of(item.stat(follow_symlinks=False)) is not Kind.WHITEOUT
                    shown.setdefault(item.name, there)
        return sorted(name for name, there in shown.items() if there)

    def _at(self, path: str) -> Iterator[LowerEntry]:
        """What shows at the path, top first: one non-directory, or the directories that merge."""
        *above, name = path.split("/")
        only_directories = False
        for stack in self._top_first:
            state, fd = _descend(stack, above)
            if fd is None:
                if state is _HIDES:
                    return
                continue
            try:
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                if state is _HIDES:
                    return
                continue
            kind = kind_of(st)
            if kind is Kind.WHITEOUT or (only_directories and kind is not Kind.DIRECTORY):
                return
            yield LowerEntry(stat=st, dir_fd=fd, name=name)
            if kind is not Kind.DIRECTORY or state is _HIDES or _is_opaque(fd, name):
                return
            only_directories = True


_MERGES, _HIDES = object(), object()


def _descend(stack: DirStack, names: list[str]) -> tuple[object, int | None]:
    """Goes to a directory of one layer.

    Returns:
        Whether that layer hides the same path in those below it, and the directory's descriptor; None
        when the layer has no such directory.
    """
    state = _MERGES
    fd = stack.goto([])
    for depth, name in enumerate(names):
        try:
            kind = kind_of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        except FileNotFoundError:
            return state, None
        if kind is not Kind.DIRECTORY:
            return _HIDES, None
        if _is_opaque(fd, name):
            state = _HIDES
        fd = stack.goto(names[: depth + 1])
    return state, fd


def _is_opaque(dir_fd: int, name: str) -> bool:
    try:
        where = f"/proc/self/fd/{dir_fd}/{name}"
        return os.getxattr(where, OPAQUE_XATTR, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _differs(found: Found, below: LowerEntry) -> bool:
    entry, st = found.entry, below.stat
    if (
        kind_of(st) is not entry.kind
        or stat.S_IMODE(st.st_mode) != entry.mode
        or (st.st_uid, st.st_gid) != (entry.uid, entry.gid)
    ):
        return True
    where = f"/proc/self/fd/{below.dir_fd}/{below.name}"
    kept = {
        key: os.getxattr(where, key, follow_symlinks=False)
        for key in os.listxattr(where, follow_symlinks=False)
        if keeps_xattr(key)
    }
    if kept != entry.xattrs:
        return True
    if entry.kind is Kind.SYMLINK:
        return os.readlink(below.name, dir_fd=below.dir_fd) != entry.link_target
    return entry.kind is Kind.FILE and (st.st_size != entry.size or _content_differs(found, below))


def _content_differs(found: Found, below: LowerEntry) -> bool:
    if found.entry.size > _COMPARED_BYTES:
        return True
    try:
        ours = found.open()
    except TreeChanged:
        return True
    try:
        theirs = os.open(below.name, _OPEN_FILE, dir_fd=below.dir_fd)
        try:
            at = 0
            while True:
                data = os.pread(ours, _CHUNK, at)
                if data != os.pread(theirs, _CHUNK, at):
                    return True
                if not data:
                    return False
                at += len(data)
        finally:
            os.close(theirs)
    finally:
        os.close(ours)
