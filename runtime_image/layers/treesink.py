"""Writing a tree from entries, wherever they come from."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Protocol

from runtime_image.layers.dirs import DirStack, empty_directory, remove_entry
from runtime_image.layers.entries import (
    OPAQUE_XATTR,
    ORIGIN_XATTR,
    Content,
    Entry,
    Kind,
    keeps_xattr,
    kind_of,
)
from runtime_image.layers.errors import LayerRefused, TreeChanged

_CHUNK = 1024 * 1024
# Below this a read and a write are faster than a copy inside the kernel.
_SMALL_BYTES = 128 * 1024
_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
_WHITEOUT_DEVICE = os.makedev(0, 0)
# New files take over their directory's, so directories get theirs last.
_INHERITED_XATTR = "system.posix_acl_default"
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ID = 0xFFFFFFFE  # 0xFFFFFFFF means "leave as it is" to chown
_MAX_TIME_S = 1 << 34
# What the kernel says to a name, size or path that only a malformed entry would have.
_ENTRY_FAULTS = frozenset(
    {errno.ENAMETOOLONG, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENOTDIR, errno.EMLINK, errno.EOVERFLOW}
)


class Sink(Protocol):
    """Where entries go: a directory or a tar stream."""

    def put(self, entry: Entry, content: Content | None = None) -> None:
        """Adds one entry. Files need content; a parent comes before what is in it."""

    def link(self, path: str, target: str) -> None:
        """Adds another name for a non-directory that was put before."""


class TreeSink:
    """Writes entries below a directory, in overlayfs form, never outside of it.

    Attributes:
        implied: Directories that were made only because something lies in them, as root's and 0755.

    A later entry replaces an earlier one of the same path, as one layer over another would: a
    directory that takes the place of something else, or of a whiteout, is opaque.

    Raises (all methods):
        LayerRefused: The entry cannot be there: its path leads out, through a symlink, or is one the
            filesystem cannot hold.
        OSError: The machine failed, a full disk for one.
    """

    def __init__(self, root: Path, *, marks: bool = True) -> None:
        """Opens an existing directory.

        Args:
            marks: Write whiteouts and opaque marks; without, they only take effect on what was put
                before, as fits a tree that will have no layer below it.
        """
        self._stack = DirStack(root)
        self._directory_times: dict[str, int] = {}
        self._inherited: dict[str, bytes] = {}
        self.implied: set[str] = set()
        self._marks = marks
        self._clones = True
        self._kernel_copies = True

    def __enter__(self) -> TreeSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._stack.close()

    def put(self, entry: Entry, content: Content | None = None) -> None:
        try:
            self._put(entry, content)
        except OSError as error:
            raise _refusal(error, entry.path) from error

    def link(self, path: str, target: str) -> None:
        try:
            self._link(path, target)
        except OSError as error:
            raise _refusal(error, path) from error

    def make_opaque(self, path: str) -> None:
        """Hides what lower layers have in that directory; creates it when missing."""
        try:
            fd = self._into(_split(path))
            if self._marks:
                os.setxattr(fd, OPAQUE_XATTR, b"y")
        except OSError as error:
            raise _refusal(error, path) from error

    def hide(self, path: str) -> None:
        """Whites a path out, as one layer's tar may say beside having an entry of that name.

        The mark speaks of the layers below. A directory that is there already becomes opaque, other
        things hide what is below by being there.
        """
        try:
            parent, name = self._place(path)
            try:
                st = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                self._put(Entry(path=path, kind=Kind.WHITEOUT), None)
            else:
                if stat.S_ISDIR(st.st_mode):
                    self.make_opaque(path)
        except OSError as error:
            raise _refusal(error, path) from error

    def clear(self, path: str) -> None:
        """Removes what was put below that directory so far."""
        prefix = path + "/" if path else ""
        for known in [known for known in self._directory_times if known.startswith(prefix) and known != path]:
            del self._directory_times[known]
        try:
            fd = self._stack.goto(_split(path))
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing there, or something that the directory is about to replace
        empty_directory(fd)

    def finish(self) -> None:
        """Sets what writing below a directory would disturb or spread: times and default ACLs."""
        for path in sorted(self._directory_times):
            when = self._directory_times[path]
            try:
                fd = self._stack.goto(_split(path))
            except (FileNotFoundError, NotADirectoryError):
                continue  # replaced since
            if path in self._inherited:
                os.setxattr(fd, _INHERITED_XATTR, self._inherited[path])
            os.utime(fd, ns=(when, when))
        self._directory_times.clear()
        self._inherited.clear()

    def _put(self, entry: Entry, content: Content | None) -> None:
        if not (0 <= entry.uid <= _MAX_ID and 0 <= entry.gid <= _MAX_ID):
            raise LayerRefused("an owner that is no user id", entry.path)
        if entry.kind is Kind.DIRECTORY:
            self._directory(entry)
            return
        parent, name = self._place(entry.path)
        if entry.kind is Kind.WHITEOUT and not self._marks:
            with contextlib.suppress(FileNotFoundError):
                remove_entry(parent, name)
            return
        try:
            self._create(entry, parent, name, content)
        except FileExistsError:
            remove_entry(parent, name)
            self._create(entry, parent, name, content)

    def _create(self, entry: Entry, parent: int, name: str, content: Content | None) -> None:
        if entry.kind is Kind.FILE:
            if content is None:
                raise ValueError(f"no content for {entry.path!r}")
            fd = os.open(name, _OPEN_NEW, 0o600, dir_fd=parent)
            try:
                self._fill(fd, entry, content)
                _dress(fd, entry)
            finally:
                os.close(fd)
        elif entry.kind is Kind.SYMLINK:
            os.symlink(entry.link_target, name, dir_fd=parent)
            _dress_by_name(parent, name, entry)
        elif entry.kind is Kind.FIFO:
            os.mkfifo(name, 0o600, dir_fd=parent)
            _dress_by_name(parent, name, entry)
        elif entry.kind is Kind.WHITEOUT:
            # The only device node ever made here: 0/0 opens nothing.
            os.mknod(name, stat.S_IFCHR, _WHITEOUT_DEVICE, dir_fd=parent)
            # In a directory that nothing merges with, overlayfs filters whiteouts from listings only
            # where this mark says that there may be some. Empty: of unknown origin.
            os.setxattr(parent, ORIGIN_XATTR, b"")
        else:
            raise LayerRefused(f"a layer holds no {entry.kind.name.lower()}", entry.path)

    def _directory(self, entry: Entry) -> None:
        opaque = entry.opaque
        self.implied.discard(entry.path)
        if entry.path:
            parent, name = self._place(entry.path)
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=parent)
                    os.mkdir(name, 0o700, dir_fd=parent)
                    opaque = True
            fd = self._stack.enter(name)
        else:
            fd = self._stack.goto([])
        for key in os.listxattr(fd):
            if keeps_xattr(key) and (key not in entry.xattrs or key == _INHERITED_XATTR):
                os.removexattr(fd, key)
        self._inherited.pop(entry.path, None)
        if _INHERITED_XATTR in entry.xattrs:
            self._inherited[entry.path] = entry.xattrs[_INHERITED_XATTR]
        _dress(fd, entry)
        if opaque and self._marks:
            os.setxattr(fd, OPAQUE_XATTR, b"y")
        self._directory_times[entry.path] = _clamped(entry.mtime_ns)

    def _link(self, path: str, target: str) -> None:
        target_parent, target_name = self._place(target)
        if kind_of(os.stat(target_name, dir_fd=target_parent, follow_symlinks=False)) not in (
            Kind.FILE,
            Kind.SYMLINK,
            Kind.FIFO,
        ):
            raise LayerRefused("a hard link to what cannot have one", path)
        source = os.dup(target_parent)
        try:
            parent, name = self._place(path)
            for attempt in range(2):
                try:
                    os.link(target_name, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
                    return
                except FileExistsError:
                    if attempt or path == target:
                        return
                    remove_entry(parent, name)
        finally:
            os.close(source)

    def _place(self, path: str) -> tuple[int, str]:
        names = _split(path)
        if not names:
            raise LayerRefused("the root can only be a directory", path)
        return self._into(names[:-1]), names[-1]

    def _into(self, names: list[str]) -> int:
        try:
            return self._stack.goto(names)
        except FileNotFoundError:
            for made in self._stack.make(names):
                self.implied.add("/".join(names[:made]))
            return self._stack.fd

    def _fill(self, fd: int, entry: Entry, content: Content) -> None:
        source = content.fileno()
        if source is not None and entry.size and self._clones:
            try:
                fcntl.ioctl(fd, _FICLONE, source)
                return
            except OSError:  # another filesystem, or one without shared extents
                self._clones = False
        end = 0
        for offset, length in content.extents():
            end = offset + length
            while offset < end:
                step = self._copy_some(fd, content, source, offset, end - offset)
                if step == 0:
                    raise TreeChanged(f"{entry.path[:200]!r} is shorter than its size")
                offset += step
        if end < entry.size:
            os.ftruncate(fd, entry.size)

    def _copy_some(self, fd: int, content: Content, source: int | None, offset: int, length: int) -> int:
        if source is not None and self._kernel_copies and length > _SMALL_BYTES:
            try:
                return os.copy_file_range(source, fd, length, offset, offset)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                self._kernel_copies = False
        if source is not None:
            data = os.pread(source, min(_CHUNK, length), offset)
        else:
            data = content.read(min(_CHUNK, length))
        left = memoryview(data)
        while left:
            done = os.pwrite(fd, left, offset)
            left = left[done:]
            offset += done
        return len(data)


def _dress(fd: int, entry: Entry) -> None:
    # In this order: chown takes setuid bits and file capabilities away.
    os.fchown(fd, entry.uid, entry.gid)
    os.fchmod(fd, entry.mode & 0o7777)
    for key, value in entry.xattrs.items():
        if keeps_xattr(key) and key != _INHERITED_XATTR:
            os.setxattr(fd, key, value)
    when = _clamped(entry.mtime_ns)
    os.utime(fd, ns=(when, when))


def _dress_by_name(parent: int, name: str, entry: Entry) -> None:
    os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
    if entry.kind is not Kind.SYMLINK:
        os.chmod(name, entry.mode & 0o7777, dir_fd=parent)
    for key, value in entry.xattrs.items():
        if keeps_xattr(key):
            os.setxattr(f"/proc/self/fd/{parent}/{name}", key, value, follow_symlinks=False)
    when = _clamped(entry.mtime_ns)
    os.utime(name, ns=(when, when), dir_fd=parent, follow_symlinks=False)


def _clamped(mtime_ns: int) -> int:
    limit = _MAX_TIME_S * 1_000_000_000
    return max(-limit, min(limit, mtime_ns))


def _split(path: str) -> list[str]:
    if not path:
        return []
    names = path.split("/")
    for name in names:
        if name in ("", ".", ".."):
            raise LayerRefused("a path that does not lead straight down", path)
    return names


def _refusal(error: OSError, path: str) -> Exception:
    if error.errno in _ENTRY_FAULTS:
        return LayerRefused(f"impossible entry ({error.strerror})", path)
    if isinstance(error, FileNotFoundError):
        return LayerRefused("it points to what is not in the layer", path)
    return error
