"""The journal's records on the disk: a length, a checksum, and JSON.

    frame    = length (4 bytes) crc32 (4 bytes) flags (1 byte) payload
    payload  = head (one line of JSON) "\\n" body (JSON)            compressed with zstd where flags has ZSTD
    head     = {"k": "i", "seq", "id", "sha", "at"}                 an intent; the body is the action
             | {"k": "r", "seq", "status", "at", "e"}               a result; the body is the observation, or with
                                                                    "e": true the error's detail

Little endian. A frame is written with one `write`; after a crash the last may be torn, which its length or its
checksum tells: it is cut off. Bodies are kept as the bytes that are answered, so that a replay copies them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

import zstandard

_FRAME: Final = struct.Struct("<IIB")
FRAME_BYTES: Final = _FRAME.size
ZSTD: Final = 1
#: Payloads from this size on are compressed: what floods is mostly the same over and over.
COMPRESS_FROM_BYTES: Final = 16_384
#: No frame is larger: an action's body is at most 80 MiB, an observation's two streams of 16 MiB, six bytes a byte.
MAX_PAYLOAD_BYTES: Final = 1 << 29

_compressor = zstandard.ZstdCompressor(level=1)
_decompressor = zstandard.ZstdDecompressor()


def encode(head: bytes, body: bytes) -> bytes:
    """One frame. `head` has no newline in it."""
    payload = head + b"\n" + body
    flags = 0
    if len(payload) >= COMPRESS_FROM_BYTES:
        payload = _compressor.compress(payload)
        flags = ZSTD
    return _FRAME.pack(len(payload), zlib.crc32(payload), flags) + payload


def decode(payload: bytes, flags: int) -> tuple[bytes, bytes]:
    """Head and body of a payload that has passed its checksum."""
    if flags & ZSTD:
        payload = _decompressor.decompress(payload, max_output_size=MAX_PAYLOAD_BYTES)
    head, _, body = payload.partition(b"\n")
    return head, body


def parse(frame: bytes) -> tuple[bytes, bytes]:
    """Head and body of one whole frame.

    Raises:
        ValueError: It is damaged.
    """
    length, crc, flags = _FRAME.unpack_from(frame)
    payload = frame[FRAME_BYTES:]
    if len(payload) != length or zlib.crc32(payload) != crc:
        raise ValueError("a journal record does not match its checksum")
    return decode(payload, flags)


def frames(data: memoryview) -> Iterator[tuple[int, int, bytes, bytes]]:
    """(offset, size, head, body) of the whole frames in `data`, in order; ends at the first torn or damaged one."""
    offset = 0
    while offset + FRAME_BYTES <= len(data):
        length, crc, flags = _FRAME.unpack_from(data, offset)
        end = offset + FRAME_BYTES + length
        if length > MAX_PAYLOAD_BYTES or end > len(data):
            return
        payload = bytes(data[offset + FRAME_BYTES : end])
        if zlib.crc32(payload) != crc:
            return
        head, body = decode(payload, flags)
        yield offset, end - offset, head, body
        offset = end
