"""Files and directories between here and a session: checksummed, any size, constant memory.

What is larger than the service's entrance carries goes by its blob store (`shoal.contract.transfers`). A directory
travels as a tar. What a sandbox sends is not trusted: it is unpacked below the destination only, links last, so that
nothing is ever written through a link that came with it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, BinaryIO

from shoal.client import building
from shoal.client.effects import Op, Reply, Send
from shoal.client.errors import ServiceError, of_code
from shoal.client.places import CHUNK_BYTES, at, put_at
from shoal.client.retry import call
from shoal.client.session_core import SessionCore
from shoal.contract.base import MAX_WAIT_S
from shoal.contract.errors import ErrorCode
from shoal.contract.transfers import MAX_TRANSFER_BYTES, Transfer, TransferCreate

#: Tars up to this size stay in memory while they are sent.
SPOOL_BYTES = 32 * 1_048_576
#: Of larger uploads the service is asked first whether its entrance carries them.
ASK_BYTES = 4 * 1_048_576
TAR = "application/x-tar"
#: The sha256 of the whole body in hex: of an upload in the request, of a download in the answer.
CHECKSUM_HEADER = "x-shoal-sha256"


class Upload:
    """The body of one upload: can be read again for a repeated request."""

    def __init__(self, stream: IO[bytes], *, kind: str, checksum: bool = True) -> None:
        self._stream = stream
        self._start = stream.tell()
        digest = hashlib.sha256()
        size = 0
        while chunk := stream.read(CHUNK_BYTES):
            size += len(chunk)
            if checksum:
                digest.update(chunk)
        self.size_bytes = size
        self.sha256 = digest.hexdigest() if checksum else None
        self.kind = kind

    def chunks(self) -> Iterator[bytes]:
        """The body, from its start."""
        self._stream.seek(self._start)
        while chunk := self._stream.read(CHUNK_BYTES):
            yield chunk


@contextmanager
def upload_of(source: str | os.PathLike[str] | bytes | BinaryIO) -> Iterator[Upload]:
    """An upload from a path (a directory becomes a tar), bytes, or an open binary file.

    A file that cannot seek (a pipe) is first written aside.

    Raises:
        OSError: The source cannot be read.
    """
    if isinstance(source, bytes):
        yield Upload(io.BytesIO(source), kind="application/octet-stream")
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as held:
                with tarfile.open(fileobj=held, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                    tar.add(path, arcname=".")
                held.seek(0)
                yield Upload(held, kind=TAR)
        else:
            with path.open("rb") as stream:
                yield Upload(stream, kind="application/octet-stream")
    elif source.seekable():
        yield Upload(source, kind="application/octet-stream")
    else:
        with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as held:
            while chunk := source.read(CHUNK_BYTES):
                held.write(chunk)
            held.seek(0)
            yield Upload(held, kind="application/octet-stream")


def put(core: SessionCore, upload: Upload, path: str, options: Mapping[str, Any]) -> Op[Reply]:
    """Writes a file (or unpacks a tar into a directory), aside and then renamed.

    Raises:
        OSError: As the sandbox's system refused.
        ServiceError: PAYLOAD_TOO_LARGE for more than a transfer carries.
    """
    params = {"path": path}
    if options.get("mode") is not None:
        params["mode"] = f"{options['mode']:04o}"
    if options.get("owner") is not None:
        params["owner"] = str(options["owner"])
    if options.get("create_parents") is not None:
        params["create_parents"] = "true" if options["create_parents"] else "false"
    headers = {"content-type": upload.kind}
    if upload.sha256 is not None:
        headers[CHECKSUM_HEADER] = upload.sha256
    send = Send(method="PUT", path=f"{core.path}/files", params=params, headers=headers)
    if upload.size_bytes > ASK_BYTES and not core.client.config.direct:
        announced = yield from _announce(core, upload)
        if announced is not None:
            return (yield from _refused_as_os_error(_put_beside(core, upload, send, announced)))
    whole = replace(
        send,
        headers={**headers, "content-length": str(upload.size_bytes)},
        source=upload.chunks,
        # The service answers only when all is written.
        wait_s=60.0,
    )
    try:
        return (yield from _refused_as_os_error(core.send(whole)))
    except ServiceError as error:
        if error.code is not ErrorCode.PAYLOAD_TOO_LARGE:
            raise
        announced = yield from _announce(core, upload)
        if announced is None:
            raise
    return (yield from _refused_as_os_error(_put_beside(core, upload, send, announced)))


def _announce(core: SessionCore, upload: Upload) -> Op[Transfer | None]:
    """A transfer for the upload; None where the service carries any size itself, or is older than transfers."""
    if upload.size_bytes > MAX_TRANSFER_BYTES:
        return None
    asked = TransferCreate(size_bytes=upload.size_bytes, sha256=upload.sha256)
    send = Send(
        method="POST", path="/v1/transfers", content=building.body(asked), headers=building.json_headers()
    )
    try:
        return building.parsed(Transfer, (yield from call(core.client.context, send)))
    except ServiceError as error:
        if error.code in (ErrorCode.NOT_IMPLEMENTED, ErrorCode.NOT_FOUND, ErrorCode.METHOD_NOT_ALLOWED):
            return None
        raise


def _put_beside(core: SessionCore, upload: Upload, send: Send, announced: Transfer) -> Op[Reply]:
    """Puts the bytes at the transfer's URL, and has the session's host take them from there."""
    yield from call(core.client.context, put_at(announced.put, upload.chunks, upload.size_bytes))
    take = replace(
        send,
        params={**send.params, "transfer": announced.id},
        headers={**send.headers, "content-length": "0"},
        content=b"",
        wait_s=MAX_WAIT_S,
    )
    while True:
        reply = yield from core.send(take)
        if reply.status != 202:
            return reply


def _refused_as_os_error(op: Op[Reply]) -> Op[Reply]:
    """What the sandbox's system refused, as Python says it: FileNotFoundError, PermissionError ..."""
    try:
        return (yield from op)
    except ServiceError as error:
        number = getattr(errno, str(error.details.get("errno")), None)
        if not isinstance(number, int):
            raise
        raise OSError(
            number, error.details.get("message", error.message), error.details.get("path")
        ) from error


class StreamSink:
    """Writes a body to an open file that can seek, from where it is; checks its sum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._start = stream.tell() if stream.seekable() else None
        self._digest = hashlib.sha256()
        self.headers: Mapping[str, str] = {}
        self.size_bytes = 0

    def start(self, headers: Mapping[str, str]) -> None:
        """A (new) body begins."""
        if self._start is None:
            if self.size_bytes:
                raise of_code(
                    ErrorCode.UNAVAILABLE, "the download broke off, and its target cannot seek back"
                )
        else:
            self._stream.seek(self._start)
            self._stream.truncate()
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self.headers = headers

    def write(self, chunk: bytes) -> None:
        """The next bytes."""
        self._stream.write(chunk)
        self._digest.update(chunk)
        self.size_bytes += len(chunk)

    @property
    def is_tar(self) -> bool:
        """Whether the body is a directory's tar."""
        kind = self.headers.get("x-shoal-kind")
        return kind == "directory" or self.headers.get("content-type", "").startswith(TAR)

    def finish(self, told: Mapping[str, str]) -> None:
        """The body is whole. Compares its sum with the one the service told, if it told one.

        Args:
            told: What the service told of it elsewhere, in lower case: where it led to the body.
        """
        self.headers = {**self.headers, **told}
        expected = self.headers.get(CHECKSUM_HEADER)
        if expected is not None and expected != self._digest.hexdigest():
            raise of_code(ErrorCode.UNAVAILABLE, "the download does not match its checksum")


def get(core: SessionCore, path: str, sink: StreamSink) -> Op[Reply]:
    """Reads a file, or a directory as a tar, into a sink; from the blob store where the service leads there."""
    send = Send(method="GET", path=f"{core.path}/files", params={"path": path}, sink=sink, wait_s=60.0)
    reply = yield from _refused_as_os_error(core.send(send))
    told: dict[str, str] = {}
    while reply.status == 303:
        told |= {name: value for name, value in reply.headers.items() if name.startswith("x-shoal-")}
        there = replace(at(reply.headers["location"], send.path), sink=sink, wait_s=60.0)
        reply = yield from _refused_as_os_error(call(core.client.context, there))
    sink.finish(told)
    return reply


@contextmanager
def download_to(target: str | os.PathLike[str]) -> Iterator[tuple[StreamSink, Callable[[], Path]]]:
    """A sink beside `target`, and a function that puts what arrived in its place.

    A file replaces `target` in one step (below it, if it is a directory there needs to be a name: give the whole
    path); a directory's tar is unpacked into `target`, which may exist.
    """
    path = Path(target)
    parent = path.parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=parent, prefix=f".{path.name}.", delete=False) as held:
        aside = Path(held.name)
        sink = StreamSink(held)

        def place() -> Path:
            held.flush()
            if sink.is_tar:
                unpack(aside, path)
            else:
                umask = os.umask(0)
                os.umask(umask)
                aside.chmod(0o666 & ~umask)
                aside.replace(path)
            return path

        try:
            yield sink, place
        finally:
            aside.unlink(missing_ok=True)


def unpack(archive: Path, into: Path) -> None:
    """Unpacks a tar that a sandbox sent. Devices and sockets are left out; owners are the caller's.

    Raises:
        OSError: It cannot be written.
        tarfile.TarError: It is not a tar, or a name in it leads out of `into`.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, mode="r:*") as tar:
        links: list[tarfile.TarInfo] = []
        plain: list[tarfile.TarInfo] = []
        for member in tar:
            _own(member)
            if member.issym() or member.islnk():
                links.append(member)
            elif member.isfile() or member.isdir():
                plain.append(member)
        links.sort(key=lambda member: member.issym())  # symbolic links last: nothing is written through them
        tar.extractall(into, members=_checked(plain + links, into), **_UNFILTERED)


#: tarfile's own filters came with Python 3.11.4, and Debian 12 has an older one: what they would do is done here.
_UNFILTERED: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}


def _own(member: tarfile.TarInfo) -> None:
    """Makes it the caller's: no foreign owner, no set-id bits, none but the owner writes; readable by the owner."""
    member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
    member.mode &= 0o755
    if member.isdir():
        member.mode |= 0o700
    elif not member.issym():
        member.mode = (member.mode if member.mode & 0o100 else member.mode & ~0o111) | 0o600


def _checked(members: list[tarfile.TarInfo], into: Path) -> Iterator[tarfile.TarInfo]:
    """Each member just before it is written: what was written until then decides where its name leads."""
    root = into.resolve()
    for member in members:
        member.name = member.name.lstrip("/")
        # A link's own place counts, not where it leads: a symbolic link is only a name.
        place = root / member.name
        if not (place.parent.resolve() / place.name if member.issym() else place.resolve()).is_relative_to(
            root
        ):
            raise tarfile.ExtractError(f"{member.name!r} would be written outside of the destination")
        if member.islnk() and not (root / member.linkname).resolve().is_relative_to(root):
            raise tarfile.ExtractError(
                f"{member.name!r} links to {member.linkname!r}, outside of the destination"
            )
        yield member


class MemorySink:
    """Reads one file into memory."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held = io.BytesIO()

    def fetch(self, core: SessionCore) -> Op[bytes]:
        """The file's bytes.

        Raises:
            IsADirectoryError: It is a directory.
            OSError: As the sandbox's system refused, such as FileNotFoundError.
        """
        sink = StreamSink(self._held)
        yield from get(core, self._path, sink)
        if sink.is_tar:
            raise IsADirectoryError(errno.EISDIR, "a directory is not one file", self._path)
        return self._held.getvalue()
