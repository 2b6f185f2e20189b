"""Frames: what is sent is what is read; anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_image.guest import wire


@given(st.integers(1, 7), st.integers(0, 3), st.integers(0, 2**32 - 1), st.binary(max_size=2000))
def test_frames_come_through(kind: int, stream: int, ident: int, body: bytes) -> None:
    """Kind, stream, id and body of every frame."""
    assert wire.split(wire.frame(kind, stream, ident, body)) == (kind, stream, ident, body)


@given(st.binary(max_size=64))
def test_noise_is_a_wire_error_or_a_frame(data: bytes) -> None:
    """No bytes make the reader fail otherwise, and what it takes for a frame is one."""
    try:
        kind, stream, ident, body = wire.split(data)
    except wire.WireError:
        return
    assert wire.frame(kind, stream, ident, bytes(body)) == data


@pytest.mark.parametrize("size", [0, 7, wire.FRAME_LIMIT + 1])
def test_sizes_are_bounded(size: int) -> None:
    """Shorter than a header, longer than a frame."""
    with pytest.raises(wire.WireError):
        wire.split(b"\x01" + bytes(size - 1) if size else b"")


def test_the_largest_data_frame_is_a_frame() -> None:
    """DATA_LIMIT fills a frame to the last byte."""
    frame = wire.data_frame(1, wire.STDOUT, 1 << 40, bytes(wire.DATA_LIMIT))
    assert len(frame) == wire.FRAME_LIMIT
    assert wire.split(frame)[0] == wire.DATA
