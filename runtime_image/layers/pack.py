"""A tree to a blob and back.

digest    sha256 of the blob as stored (tar + zstd): names the layer
diff_id   sha256 of the tar inside: what OCI calls the layer's DiffID
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import zstandard

from runtime_image.layers.dirs import remove_tree
from runtime_image.layers.entries import Entry, Kind
from runtime_image.layers.errors import DigestMismatch, LayerRefused
from runtime_image.layers.stream import TarReader, decompressed
from runtime_image.layers.tarsink import TarSink
from runtime_image.layers.tarsource import extract
from runtime_image.layers.treesink import Sink, TreeSink
from runtime_image.layers.walk import Found, content_of, walk

# Trees below this are compressed in the calling thread: starting one costs more than it gives.
_SMALL_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """A blob that was written.

    Attributes:
        size_bytes: Of the blob.
        uncompressed_bytes: Of the tar inside; what `unpack` needs as `max_bytes`.
        entries: Files, directories, links and whiteouts in it.
        skipped: Paths left out because a layer cannot hold them (device nodes), at most 100 named.
    """

    digest: str
    diff_id: str
    size_bytes: int
    uncompressed_bytes: int
    entries: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnpackedLayer:
    """A blob that was laid out as a directory.

    Attributes:
        digest: Of the blob as it was read.
        uncompressed_bytes: Of the tar inside.
        skipped: Paths left out because a layer cannot hold them (device nodes), at most 100 named.
        implied: Directories without an entry of their own, made because something lies in them: root's
            and 0755. Over another layer they would hide what its directory is really like.
    """

    path: Path
    digest: str
    size_bytes: int
    uncompressed_bytes: int
    entries: int
    skipped: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()


class BlobWriter:
    """Compresses a tar stream into a blob and takes both digests on the way.

    Args:
        level: zstd's; 3 is its default.
        threads: zstd worker threads beside the caller's own. The bytes do not depend on the number,
            only on whether there are any.
    """

    def __init__(self, out: BinaryIO, *, level: int = 3, threads: int = 1) -> None:
        self._out = out
        self._level = level
        self._threads = threads
        self._plain = hashlib.sha256()
        self._stored = hashlib.sha256()
        self._held: list[bytes] = []
        self._compressor: zstandard.ZstdCompressionObj | None = None
        self.plain_bytes = 0
        self.stored_bytes = 0

    def write(self, data: bytes) -> None:
        """Adds bytes of the tar."""
        self._plain.update(data)
        self.plain_bytes += len(data)
        if self._compressor is None:
            self._held.append(data)
            if self.plain_bytes >= _SMALL_BYTES:
                self._start(self._threads)
            return
        self._store(self._compressor.compress(data))

    def close(self) -> tuple[str, str]:
        """Ends the blob.

        Returns:
            (digest, diff_id)
        """
        if self._compressor is None:
            self._start(0)
        assert self._compressor is not None
        self._store(self._compressor.flush())
        return "sha256:" + self._stored.hexdigest(), "sha256:" + self._plain.hexdigest()

    def _start(self, threads: int) -> None:
        compressor = zstandard.ZstdCompressor(level=self._level, threads=threads, write_checksum=True)
        self._compressor = compressor.compressobj()
        for data in self._held:
            self._store(self._compressor.compress(data))
        self._held.clear()

    def _store(self, data: bytes) -> None:
        if data:
            self._stored.update(data)
            self.stored_bytes += len(data)
            self._out.write(data)


def pack(
    tree: Path,
    out: BinaryIO,
    *,
    level: int = 3,
    threads: int = 1,
    clamp_mtime_s: int | None = None,
    prefix: str = "",
    keep: Callable[[Entry], bool] | None = None,
) -> PackedLayer:
    """Writes a tree in overlayfs form as a layer blob. The same tree always gives the same bytes.

    The tree may come from a sandbox: no symlink in it is followed, nothing but regular files is opened.
    Sockets are left out (a layer has none); where one may hide something below, a whiteout takes its
    place, which only a live upper can tell (`Found.merged`).

    Args:
        clamp_mtime_s: Later times become this one (SOURCE_DATE_EPOCH); None keeps every time.
        prefix: Where the tree's root sits in the layer, such as "workspace"; the directories above
            it come along as root's and 0755.
        keep: Asked for each entry below the root, by its path in the tree; False leaves it out, with
            all that is in it.

    Raises:
        TreeChanged: A file changed underneath.
        TreeUnsupported: The tree cannot be a layer.
    """
    writer = BlobWriter(out, level=level, threads=threads)
    sink = TarSink(writer.write, clamp_mtime_s=clamp_mtime_s)
    found = walk(tree, descend=keep)
    if keep is not None:
        found = (item for item in found if not item.entry.path or keep(item.entry))
    counts = feed(found, sink, prefix=prefix.strip("/"))
    return seal(writer, sink, counts)


@dataclass(kw_only=True)
class Counts:
    """How much went into a sink."""

    entries: int = 0
    skipped: list[str] | None = None

    def skip(self, path: str) -> None:
        if self.skipped is None:
            self.skipped = []
        if len(self.skipped) < 100:
            self.skipped.append(path)


def seal(writer: BlobWriter, sink: TarSink, counts: Counts) -> PackedLayer:
    """Ends the archive and the blob."""
    sink.finish()
    digest, diff_id = writer.close()
    return PackedLayer(
        digest=digest,
        diff_id=diff_id,
        size_bytes=writer.stored_bytes,
        uncompressed_bytes=writer.plain_bytes,
        entries=counts.entries,
        skipped=tuple(counts.skipped or ()),
    )


def feed(found_entries: Iterable[Found], sink: Sink, *, prefix: str = "") -> Counts:
    """Puts what a walk finds into a sink, hard links as links."""
    counts = Counts()
    first_names: dict[tuple[int, int], str] = {}
    if prefix:
        _prefix_parents(prefix, sink)
    for found in found_entries:
        entry = found.entry
        if prefix:
            entry = _moved(entry, f"{prefix}/{entry.path}" if entry.path else prefix)
        if entry.kind is Kind.DEVICE:
            counts.skip(entry.path)
            continue
        if entry.kind is Kind.SOCKET:
            counts.skip(entry.path)
            if not found.merged:
                continue
            # Something of the same name may lie below, and must not come back in its place.
            entry = Entry(path=entry.path, kind=Kind.WHITEOUT)
        counts.entries += 2 if entry.opaque else 1  # the opaque mark is one of its own
        if entry.identity is not None:
            first = first_names.setdefault(entry.identity, entry.path)
            if first != entry.path:
                sink.link(entry.path, first)
                continue
        if entry.kind is Kind.FILE:
            fd, content = content_of(found)
            try:
                sink.put(entry, content)
            finally:
                os.close(fd)
        else:
            sink.put(entry)
    return counts


def unpack(
    blob: Path | IO[bytes], into: Path, *, max_bytes: int, expect_digest: str | None = None
) -> UnpackedLayer:
    """Lays a blob out as a directory in overlayfs form, complete or not at all.

    The blob may be anybody's (zstd, gzip and plain tars are taken). It is unpacked beside `into` and
    renamed once its digest was checked. `into`'s parent has to be closed to other users: setuid files
    and file capabilities in it are real.

    Args:
        into: Must not exist; its parent must.
        max_bytes: Of the uncompressed tar, at most.
        expect_digest: "sha256:..." of the blob; None takes any.

    Raises:
        LayerRefused: The blob is malformed, too large or tries to leave its directory.
        DigestMismatch: It is not the blob that was asked for.
        FileExistsError: `into` exists.
        OSError: The machine failed, a full disk for one. Nothing is left in any case.
    """
    if isinstance(blob, Path):
        with blob.open("rb", buffering=0) as source:
            return unpack(source, into, max_bytes=max_bytes, expect_digest=expect_digest)
    if os.path.lexists(into):
        raise FileExistsError(f"{into} exists")
    aside = into.parent / f".{into.name}.{secrets.token_hex(4)}.partial"
    aside.mkdir(mode=0o755)
    try:
        hashing, plain = decompressed(blob)
        reader = TarReader(plain, max_bytes)
        try:
            with TreeSink(aside) as sink:
                counts = extract(reader, sink)
        except (tarfile.TarError, UnicodeError, ValueError, OverflowError) as error:
            raise LayerRefused(f"not a layer tar: {error}") from error
        hashing.drain()
        if expect_digest is not None and hashing.digest != expect_digest:
            raise DigestMismatch(expect_digest, hashing.digest)
        aside.rename(into)
    except BaseException:
        remove_tree(aside)
        raise
    return UnpackedLayer(
        path=into,
        digest=hashing.digest,
        size_bytes=hashing.bytes_read,
        uncompressed_bytes=reader.tell(),
        entries=counts.entries,
        skipped=tuple(counts.skipped),
        implied=tuple(sorted(sink.implied)),
    )


def _moved(entry: Entry, path: str) -> Entry:
    return Entry(
        path=path,
        kind=entry.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        link_target=entry.link_target,
        identity=entry.identity,
        opaque=entry.opaque,
        xattrs=entry.xattrs,
    )


def _prefix_parents(prefix: str, sink: Sink) -> None:
    names = prefix.split("/")
    for depth in range(len(names)):
        sink.put(Entry(path="/".join(names[:depth]), kind=Kind.DIRECTORY, mode=0o755))
