"""Directories as tar streams, both ways. In helpers only."""

from __future__ import annotations

import os
import tarfile
from errno import EINVAL, ENOTDIR

from .files import describe, open_regular, path_of
from .workers import PIECE, Sink, Source, bad

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Out:
    """A file object that sends."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._written = 0

    def tell(self) -> int:
        return self._written

    def write(self, data: bytes) -> int:
        self._written += len(data)
        for start in range(0, len(data), PIECE):
            self._sink.data(memoryview(data)[start : start + PIECE])
        return len(data)


def send_tree(path: bytes, sink: Sink) -> None:
    """The tree below `path` as a PAX tar: modes, owners, times, symbolic and hard links kept.

    Sockets have no place in a tar and are left out, as are files that went while it was made.
    """
    root = os.path.realpath(os.fsdecode(path))
    out: Any = _Out(sink)
    archive = tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed below
    archive.copybufsize = PIECE  # type: ignore[attr-defined]
    for directory, names, files in os.walk(root):
        names.sort()
        below = os.path.relpath(directory, root)
        links = [name for name in names if os.path.islink(os.path.join(directory, name))]
        for name in [None, *sorted([*files, *links])]:
            full = directory if name is None else os.path.join(directory, name)
            inside = below if name is None else os.path.normpath(os.path.join(below, name))
            try:
                _add(archive, full, inside)
            except FileNotFoundError:
                continue
    archive.close()


def _add(archive: tarfile.TarFile, full: str, inside: str) -> None:
    # None for a socket, whatever its annotation says.
    member: Any = archive.gettarinfo(full, inside)
    if member is None:
        return
    modified_ns = os.lstat(full).st_mtime_ns
    if modified_ns >= 0:
        # The module's own floats lose the nanoseconds.
        member.pax_headers = {"mtime": f"{modified_ns // 10**9}.{modified_ns % 10**9:09}"}
    if not member.isreg():
        archive.addfile(member)
        return
    fd, info = open_regular(os.fsencode(full))
    with os.fdopen(fd, "rb") as file:
        member.size = info.st_size
        archive.addfile(member, file)


def extract(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Unpack the tar (plain or gzip) that comes through the pipe below `path`, which is made.

    Modes, times, symbolic and hard links are kept; the owner is whoever the operation runs as.

    Raises:
        OSError: EINVAL, not a tar, or a name that leads out of `path`.
    """
    path = os.fsdecode(path_of(request))
    if request.get("create_parents"):
        os.makedirs(path, 0o755, exist_ok=True)
    elif not os.path.isdir(path):
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            raise OSError(ENOTDIR, "Not a directory", path) from None
    sink.item({})
    sink.flush()
    members = 0
    directories: list[tarfile.TarInfo] = []
    try:
        stream: Any = source
        with tarfile.open(fileobj=stream, mode="r|*", bufsize=PIECE) as archive:
            for member in archive:
                _check(member)
                members += 1
                # Directories get their times and modes last: what is put into them changes both.
                archive.extract(member, path, set_attrs=not member.isdir(), **_as_is(archive))
                if member.isdir():
                    directories.append(member)
            for member in sorted(directories, key=lambda item: item.name, reverse=True):
                full = os.path.join(path, member.name)
                os.chmod(full, member.mode & 0o7777)
                _set_time(member, full)
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as err:
        # The last two are what a header's numbers can be: no numbers, or of no time there is.
        raise bad(f"not a tar that can be unpacked: {err}") from None
    while source.read(PIECE):
        # Padding behind the archive's end.
        pass
    return {**describe(os.stat(path)), "members": members}


def _set_time(member: tarfile.TarInfo, full: str) -> None:
    seconds, _, fraction = member.pax_headers.get("mtime", "").partition(".")
    if seconds.isdigit() and (fraction.isdigit() or not fraction):
        modified_ns = int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))
    else:
        modified_ns = int(member.mtime * 10**9)
    os.utime(full, ns=(modified_ns, modified_ns))


def _as_is(archive: tarfile.TarFile) -> dict[str, Any]:
    archive.utime = _set_time  # type: ignore[assignment,method-assign]
    archive.chown = lambda *args: None  # type: ignore[method-assign]
    # Newer versions ask for a filter; the checks are ours.
    return {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}


def _check(member: tarfile.TarInfo) -> None:
    names = [member.name, *([member.linkname] if member.islnk() else [])]
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise OSError(EINVAL, f"a name that leads out: {name!r:.200}")
    if member.ischr() or member.isblk():
        raise OSError(EINVAL, f"a device: {member.name!r:.200}")
