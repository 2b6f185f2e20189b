"""Byte streams of a layer blob: hashed, compressed and bounded."""

from __future__ import annotations

import gzip
import hashlib
import io
from typing import IO, BinaryIO, cast

import zstandard

from runtime_image.layers.errors import LayerRefused

_CHUNK = 1024 * 1024
# zstd refuses windows above this by default as well; a hostile frame could ask for gigabytes.
_MAX_WINDOW_BYTES = 128 * 1024 * 1024
# One header with its pax records, and one sparse map, have to fit in this.
_MAX_HEADER_BYTES = 8 * 1024 * 1024
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC = b"\x1f\x8b"


class HashingReader(io.RawIOBase):
    """Passes a stream through and hashes what was read."""

    def __init__(self, source: IO[bytes], peeked: bytes = b"") -> None:
        self._source = source
        self._peeked = peeked
        self._hash = hashlib.sha256()
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size is None or size < 0:
            size = _CHUNK
        if self._peeked:
            data, self._peeked = self._peeked[:size], self._peeked[size:]
        else:
            data = self._source.read(size)
        self._hash.update(data)
        self.bytes_read += len(data)
        return data

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        """Reads to the end."""
        while self.read(_CHUNK):
            pass

    @property
    def digest(self) -> str:
        """Of all that was read so far."""
        return "sha256:" + self._hash.hexdigest()


class TarReader:
    """What `tarfile` reads from: forward only, bounded in total and per header.

    `tarfile` reads pax records and sparse maps whole, whatever size they claim, and takes a damaged
    header for the end of the archive. Both are caught here.

    Raises:
        LayerRefused: The stream is longer than `max_bytes`, damaged, or claims absurd headers.
    """

    def __init__(self, source: IO[bytes], max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._at = 0
        self._header_bytes = 0
        self._last_block = b""

    def begin_header(self) -> None:
        """Starts a new allowance for header bytes."""
        self._header_bytes = 0

    def tell(self) -> int:
        return self._at

    def seek(self, position: int) -> None:
        if position < self._at:
            raise LayerRefused("the archive points backwards")
        while self._at < position:
            if not self.read_data(min(_CHUNK, position - self._at)):
                raise LayerRefused("the archive ends within a member")

    def read(self, size: int = -1) -> bytes:
        """Header bytes, for `tarfile` alone."""
        if size < 0 or self._header_bytes + size > _MAX_HEADER_BYTES:
            raise LayerRefused("a header of absurd size")
        data = self.read_data(size)
        while len(data) < size:
            more = self.read_data(size - len(data))
            if not more:
                break
            data += more
        self._header_bytes += len(data)
        self._last_block = data
        return data

    def read_data(self, size: int) -> bytes:
        """Members' bytes: at most `size`, b"" at the end."""
        try:
            data = self._source.read(size)
        except (zstandard.ZstdError, gzip.BadGzipFile, EOFError) as error:
            raise LayerRefused(f"damaged compression: {error}") from error
        self._at += len(data)
        if self._at > self._max_bytes:
            raise LayerRefused(f"the layer unpacks to more than {self._max_bytes} bytes")
        return data

    def finish(self) -> None:
        """Checks that the archive really ended, and reads what padding is left."""
        if self._last_block.strip(b"\0"):
            raise LayerRefused("a damaged header")
        if len(self._last_block) != 512:
            raise LayerRefused("the archive is cut off")
        while self.read_data(_CHUNK):
            pass


def decompressed(source: IO[bytes]) -> tuple[HashingReader, IO[bytes]]:
    """Opens a zstd, gzip or plain stream, told apart by its first bytes.

    Returns:
        The reader that hashes the stream as it is stored, and the stream of its content.
    """
    head = source.read(4)
    hashing = HashingReader(source, head)
    if head.startswith(_ZSTD_MAGIC):
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        plain = decompressor.stream_reader(cast(BinaryIO, hashing), read_size=_CHUNK, read_across_frames=True)
        return hashing, cast(IO[bytes], plain)
    if head.startswith(_GZIP_MAGIC):
        return hashing, cast(IO[bytes], gzip.GzipFile(fileobj=io.BufferedReader(hashing, _CHUNK)))
    return hashing, cast(IO[bytes], hashing)
