"""Moving about in a tree by directory descriptors alone, so that no symlink is ever followed."""

from __future__ import annotations

import errno
import os
from types import TracebackType

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Deeper levels close the ones far above and walk to them again when they are needed.
_MAX_OPEN = 64


def open_root(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Opens the directory a tree lives in.

    Args:
        follow: Whether the last component may be a symlink: a path of the caller's own may.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))


class DirStack:
    """The open directories from a tree's root down to a current one.

    Any depth works with a bounded number of descriptors. Each step opens one component with
    O_NOFOLLOW: a symlink in the way is an `OSError` (ENOTDIR or ELOOP), never a detour.
    """

    def __init__(self, root: str | os.PathLike[str], *, follow: bool = True) -> None:
        self._names: list[str] = []
        self._fds: list[int | None] = []
        self._root_fd = open_root(root, follow=follow)

    def __enter__(self) -> DirStack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """The current directory's components; empty at the root. Not to be changed."""
        return self._names

    @property
    def fd(self) -> int:
        """The current directory's descriptor, valid until the next move."""
        return self._fd_at(len(self._names))

    def enter(self, name: str) -> int:
        """Steps into a child directory and returns its descriptor."""
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=self.fd)
        self._names.append(name)
        self._fds.append(fd)
        if len(self._fds) > _MAX_OPEN:
            self._drop(len(self._fds) - _MAX_OPEN - 1)
        return fd

    def leave(self) -> None:
        """Steps back to the parent."""
        self._drop(len(self._fds) - 1)
        self._fds.pop()
        self._names.pop()

    def goto(self, names: list[str]) -> int:
        """Moves to the directory with these components and returns its descriptor."""
        common = 0
        for ours, theirs in zip(self._names, names, strict=False):
            if ours != theirs:
                break
            common += 1
        while len(self._names) > common:
            self.leave()
        for name in names[common:]:
            self.enter(name)
        return self.fd

    def make(self, names: list[str]) -> list[int]:
        """Moves as `goto` and creates what is missing on the way, as root's and 0755.

        Returns:
            The depths that were created; 1 is a child of the root.
        """
        made = []
        for depth in range(1, len(names) + 1):
            try:
                self.goto(names[:depth])
            except FileNotFoundError:
                os.mkdir(names[depth - 1], 0o755, dir_fd=self.fd)
                fd = self.enter(names[depth - 1])
                os.fchmod(fd, 0o755)
                os.utime(fd, ns=(0, 0))
                made.append(depth)
        return made

    def close(self) -> None:
        """Closes everything. May be called twice."""
        for depth in range(len(self._fds)):
            self._drop(depth)
        self._fds.clear()
        self._names.clear()
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    def _drop(self, index: int) -> None:
        fd = self._fds[index]
        if fd is not None:
            os.close(fd)
            self._fds[index] = None

    def _fd_at(self, depth: int) -> int:
        if depth == 0:
            return self._root_fd
        fd = self._fds[depth - 1]
        if fd is not None:
            return fd
        # Walk again from the nearest directory that is still open, and keep the last stretch.
        start = depth - 1
        while start > 0 and self._fds[start - 1] is None:
            start -= 1
        at = self._root_fd if start == 0 else self._fd_at(start)
        for index in range(start, depth):
            following = os.open(self._names[index], _OPEN_DIRECTORY, dir_fd=at)
            if index > start and self._fds[index - 1] is None:
                os.close(at)
            if index >= depth - _MAX_OPEN:
                self._fds[index] = following
            at = following
        return at


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Removes a directory and all below it, at any depth, without following a symlink.

    Nothing there is fine; something that is no directory is unlinked.

    Raises:
        OSError: EBUSY at a mount point: what another filesystem holds is not touched.
    """
    try:
        stack = DirStack(path, follow=False)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
        return
    with stack:
        _empty(stack)
    os.rmdir(path)


def remove_entry(dir_fd: int, name: str) -> None:
    """Removes one entry of an open directory, whatever it is."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        remove_tree(f"/proc/self/fd/{dir_fd}/{name}")


def empty_directory(dir_fd: int) -> None:
    """Removes everything below an open directory, and keeps it."""
    with DirStack(f"/proc/self/fd/{dir_fd}") as stack:
        _empty(stack)


def _empty(stack: DirStack) -> None:
    device = os.fstat(stack.fd).st_dev
    while True:
        fd = stack.fd
        if os.fstat(fd).st_dev != device:
            raise OSError(errno.EBUSY, "a mount point in a tree to remove", "/".join(stack.names)[:200])
        below = None
        with os.scandir(fd) as found:
            for item in found:
                if item.is_dir(follow_symlinks=False):
                    below = item.name
                    break
                os.unlink(item.name, dir_fd=fd)
        if below is not None:
            stack.enter(below)
            continue
        if not stack.names:
            return
        name = stack.names[-1]
        stack.leave()
        os.rmdir(name, dir_fd=stack.fd)
