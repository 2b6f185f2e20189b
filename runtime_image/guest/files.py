"""File operations on single files: read, write, stat, mkdir, remove. In helpers only.

Paths resolve by the kernel, in the sandbox's own root, from the request's `cwd`. Only regular
files are opened: a FIFO or a device would block, or do things when looked at.
"""

from __future__ import annotations

import os
import stat
from errno import EEXIST, EINVAL, EISDIR, ENOENT

from .accounts import find_ids
from .workers import PIECE, Sink, Source, bad, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What one `read` gives at most; more goes by `open`.
READ_LIMIT = 16 << 20
_KINDS = (
    (stat.S_IFREG, "file"),
    (stat.S_IFDIR, "directory"),
    (stat.S_IFLNK, "symlink"),
    (stat.S_IFIFO, "fifo"),
    (stat.S_IFSOCK, "socket"),
    (stat.S_IFCHR, "char_device"),
    (stat.S_IFBLK, "block_device"),
)


def path_of(request: dict[str, Any], key: str = "path") -> bytes:
    """The request's path.

    Raises:
        OSError: EINVAL, empty or with a NUL.
    """
    path = request[key]
    raw = path if isinstance(path, bytes) else os.fsencode(path)
    if not raw or b"\0" in raw:
        raise bad("not a path")
    return raw


def describe(info: os.stat_result) -> dict[str, Any]:
    """What results say of a file."""
    kind = next((name for bits, name in _KINDS if stat.S_IFMT(info.st_mode) == bits), "other")
    return {
        "kind": kind,
        "size_bytes": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "mtime_ns": info.st_mtime_ns,
        "uid": info.st_uid,
        "gid": info.st_gid,
    }


def open_regular(path: bytes) -> tuple[int, os.stat_result]:
    """A readable descriptor of a regular file, and its stat.

    Raises:
        OSError: it cannot be read; EISDIR, EINVAL when it is something else.
    """
    _check_regular(os.stat(path), path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        # Again: it may have been exchanged in between.
        _check_regular(info, path)
    except OSError:
        os.close(fd)
        raise
    return fd, info


def _check_regular(info: os.stat_result, path: bytes) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise OSError(EISDIR, "Is a directory", path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(EINVAL, f"not a regular file but a {describe(info)['kind']}", path)


def read(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Bytes `offset` to `offset + limit`, or lines when `lines` is set."""
    fd, info = open_regular(path_of(request))
    offset, limit = int(request.get("offset") or 0), request.get("limit")
    if offset < 0 or (limit is not None and limit < 0):
        raise bad("offset and limit are not negative")
    with os.fdopen(fd, "rb", buffering=64 << 10) as file:
        if request.get("lines"):
            for _ in range(offset):
                if not _skip_line(file):
                    break
            sent, more = _send_lines(file, sink, limit)
        else:
            if offset:
                file.seek(offset)
            room = READ_LIMIT if limit is None else min(int(limit), READ_LIMIT)
            sent = 0
            while sent < room and (data := file.read(min(PIECE, room - sent))):
                sink.data(data)
                sent += len(data)
            more = bool(file.read(1))
    # `truncated`: cut by our limit, not by the caller's.
    asked_all = limit is None or (not request.get("lines") and limit > READ_LIMIT) or request.get("lines")
    return {**describe(info), "eof": not more, "truncated": bool(asked_all and more and sent >= READ_LIMIT)}


def _skip_line(file: Any) -> bool:
    while piece := file.readline(PIECE):
        if piece.endswith(b"\n"):
            return True
    return False


def _send_lines(file: Any, sink: Sink, limit: int | None) -> tuple[int, bool]:
    sent, lines = 0, 0
    held: list[bytes] = []
    size = 0
    while (limit is None or lines < limit) and sent + size < READ_LIMIT:
        piece = file.readline(min(PIECE, READ_LIMIT - sent - size))
        if not piece:
            break
        held.append(piece)
        size += len(piece)
        lines += piece.endswith(b"\n")
        if size >= PIECE // 2:
            sink.data(b"".join(held)[:PIECE])
            rest = b"".join(held)[PIECE:]
            sink.data(rest)
            sent += size
            held, size = [], 0
    sink.data(b"".join(held))
    return sent + size, bool(file.read(1))


class Replacement:
    """A new content for a path: written beside it, then renamed over it.

    An overwrite keeps mode and owner unless others are asked for, and goes through symlinks.
    """

    def __init__(self, path: bytes, *, mode: int | None, owner: str | None, create_parents: bool) -> None:
        self._path = os.path.realpath(path)
        directory, name = os.path.split(self._path)
        if not name or path.endswith(b"/"):
            raise OSError(EISDIR, "Is a directory", path)
        try:
            known: os.stat_result | None = os.stat(self._path)
        except FileNotFoundError:
            known = None
        if known is not None:
            _check_regular(known, path)
            if not os.access(self._path, os.W_OK, effective_ids=True):
                raise OSError(13, "Permission denied", path)
        elif create_parents:
            os.makedirs(directory, 0o755, exist_ok=True)
        self.created = known is None
        self._aside = os.path.join(directory, b".%b.%b" % (name[:200], os.urandom(6).hex().encode()))
        try:
            self.fd = os.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as err:
            # The name beside is nobody's business.
            raise OSError(err.errno, err.strerror, path) from None
        try:
            if owner is not None:
                os.fchown(self.fd, *find_ids(owner))
            elif known is not None and (known.st_uid, known.st_gid) != (os.geteuid(), os.getegid()):
                try:
                    os.fchown(self.fd, known.st_uid, known.st_gid)
                except PermissionError:
                    # A user who may write another's file may not give files away.
                    pass
            if mode is None:
                mode = stat.S_IMODE(known.st_mode) if known is not None else 0o644
            self._mode = mode & 0o7777
            os.fchmod(self.fd, self._mode)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> os.stat_result:
        """Put it in place."""
        try:
            if self._mode & (stat.S_ISUID | stat.S_ISGID):
                # Writing took these bits off.
                os.fchmod(self.fd, self._mode)
            info = os.fstat(self.fd)
            os.rename(self._aside, self._path)
        except OSError:
            self.abort()
            raise
        os.close(self.fd)
        return info

    def abort(self) -> None:
        """As if nothing had been."""
        os.close(self.fd)
        os.unlink(self._aside)


def write(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Replace a file by `content`, or by what comes through the pipe when there is none."""
    target = Replacement(
        path_of(request),
        mode=request.get("mode"),
        owner=request.get("owner"),
        create_parents=bool(request.get("create_parents")),
    )
    content = request.get("content")
    try:
        if content is None:
            # Tells the agent that it may send.
            sink.item({})
            sink.flush()
            source.copy_to(target.fd)
        else:
            write_all(target.fd, content)
    except BaseException:
        target.abort()
        raise
    return {**describe(target.commit()), "created": target.created}


def open_stream(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """A file's whole content; of a directory, a tar."""
    path = path_of(request)
    info = os.stat(path)
    if stat.S_ISDIR(info.st_mode):
        from .tar import send_tree

        sink.item(describe(info))
        sink.flush()
        send_tree(path, sink)
        return describe(info)
    fd, info = open_regular(path)
    sink.item(describe(info))
    sink.flush()
    buffer = memoryview(bytearray(PIECE))
    while count := os.readv(fd, [buffer]):
        sink.data(buffer[:count])
    return describe(info)


def status(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """What a path is; with `follow`, what it leads to."""
    path = path_of(request)
    info = os.stat(path, follow_symlinks=bool(request.get("follow", True)))
    target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    return {**describe(info), "link_target": target}


def mkdir(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Make a directory; with `parents` also those above, and it may exist."""
    path, mode = path_of(request), request.get("mode")
    try:
        if request.get("parents"):
            parent = os.path.dirname(path.rstrip(b"/"))
            if parent:
                os.makedirs(parent, 0o755, exist_ok=True)
        os.mkdir(path, 0o755)
        created = True
    except FileExistsError:
        if not request.get("parents") or not os.path.isdir(path):
            raise OSError(EEXIST, "File exists", path) from None
        created = False
    if created:
        if mode is not None:
            os.chmod(path, mode & 0o7777)
        if request.get("owner") is not None:
            os.chown(path, *find_ids(request["owner"]))
    return {**describe(os.stat(path)), "created": created}


def remove(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Remove a file or an empty directory; with `recursive` a tree; with `missing_ok` maybe nothing."""
    path = path_of(request)
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(path)
        elif request.get("recursive"):
            import shutil

            shutil.rmtree(path)
        else:
            os.rmdir(path)
    except FileNotFoundError:
        if not request.get("missing_ok"):
            raise OSError(ENOENT, "No such file or directory", path) from None
        return {"removed": False}
    return {"removed": True}
