"""Frames between agent and guest: one datagram of a SOCK_SEQPACKET socket pair each.

A frame is an 8 byte header (kind, stream, 2 bytes reserved, id) and a body of at most
`FRAME_LIMIT` minus the header. Numbers are little endian. Both ends check what they get; the
agent treats a frame that breaks a rule below as an attack and closes the link.

    HELLO     body: map. The agent's first frame (a nonce in it); the guest answers once with the
              same nonce. Whatever the agent reads before that answer was meant for an earlier agent.
    REQUEST   agent to guest. id: request id. body: map, in pieces of one frame each while `MORE`
              is set. Descriptors ride on the first piece, named in order by the map's "fds".
    RESPONSE  guest to agent, exactly one a request, always one frame. body: map.
    DATA      id: handle of a process, stream: which of its streams. body: u64 offset, bytes.
              Offsets only grow; a jump means that bytes in between were dropped by the cap.
    CREDIT    id, stream as above. body: u64, how many bytes in all the receiver has allowed so far.
    END       agent to guest: stdin ends here.
    EXIT      guest to agent, once a process, after all its DATA. body: map.

Why credit: no stream may fill the socket while another waits. A sender keeps to the sum granted;
a slow stream only stops itself.
"""

from __future__ import annotations

from struct import Struct

VERSION = 1
FRAME_LIMIT = 65536
HEADER = Struct("<BBHI")
OFFSET = Struct("<Q")

HELLO, REQUEST, RESPONSE, DATA, CREDIT, END, EXIT = 1, 2, 3, 4, 5, 6, 7

STDIN, STDOUT, STDERR, RESULT = 0, 1, 2, 3

# In the `stream` byte of REQUEST.
MORE = 1

BODY_LIMIT = FRAME_LIMIT - HEADER.size
DATA_LIMIT = BODY_LIMIT - OFFSET.size
# argv and environment of 1 MiB together, an edit's old and new text, code for a context.
REQUEST_LIMIT = 8 << 20
FDS_LIMIT = 4
# Credit a stream starts with, both ways, and how far ahead of the consumer it may run.
WINDOW = 256 << 10


class WireError(Exception):
    """A frame that is not one of ours."""


def frame(kind: int, stream: int, ident: int, body: bytes = b"") -> bytes:
    """One frame ready to send."""
    return HEADER.pack(kind, stream, 0, ident) + body


def data_frame(ident: int, stream: int, offset: int, data: bytes | bytearray | memoryview) -> bytes:
    """A DATA frame; `data` is at most `DATA_LIMIT` bytes."""
    return b"".join((HEADER.pack(DATA, stream, 0, ident), OFFSET.pack(offset), data))


def credit_frame(ident: int, stream: int, allowed: int) -> bytes:
    """A CREDIT frame; `allowed` is the sum since the stream began."""
    return HEADER.pack(CREDIT, stream, 0, ident) + OFFSET.pack(allowed)


def split(data: bytes | memoryview) -> tuple[int, int, int, memoryview]:
    """Kind, stream, id and body of a datagram.

    Raises:
        WireError: too short, too long, an unknown kind, or reserved bits set.
    """
    view = memoryview(data)
    if not HEADER.size <= len(view) <= FRAME_LIMIT:
        raise WireError(f"frame of {len(view)} bytes")
    kind, stream, reserved, ident = HEADER.unpack_from(view)
    if not HELLO <= kind <= EXIT or reserved or stream > RESULT:
        raise WireError(f"frame of kind {kind}, stream {stream}, reserved {reserved}")
    return kind, stream, ident, view[HEADER.size :]


def number(body: memoryview) -> int:
    """The u64 a CREDIT body is.

    Raises:
        WireError: another length.
    """
    if len(body) != OFFSET.size:
        raise WireError(f"credit of {len(body)} bytes")
    (value,) = OFFSET.unpack(body)
    return int(value)
