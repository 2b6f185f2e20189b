"""The guest's MessagePack against the library the agent reads it with, and against noise."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_image.guest.pack import dumps, loads


def nested(depth: int) -> object:
    """A list in a list in ..."""
    return [nested(depth - 1)] if depth else 1


KEYS = st.text(max_size=40) | st.integers(0, 300)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(KEYS, inner, max_size=20),
    max_leaves=30,
)


@given(VALUES)
def test_the_library_reads_what_the_guest_writes(value: object) -> None:
    """Same values, whatever they are."""
    assert msgpack.unpackb(dumps(value), strict_map_key=False) == value


@given(VALUES)
def test_the_guest_reads_what_the_library_writes(value: object) -> None:
    """Also in the library's shorter forms."""
    assert loads(msgpack.packb(value)) == value


@given(st.binary(max_size=200))
def test_noise_is_a_value_error_and_nothing_else(data: bytes) -> None:
    """Whatever the bytes, reading ends with a value or ValueError, in memory bounded by their number."""
    try:
        loads(data)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 100 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffa",
        b"\x01\x01",
        b"\xc1",
        b"\x81\x90\x01",
    ],
)
def test_broken_bytes_are_refused(data: bytes) -> None:
    """Truncated, trailing, too deep, absurd sizes, unhashable keys."""
    with pytest.raises(ValueError):
        loads(data)


def test_odd_names_travel() -> None:
    """File names that are not UTF-8 keep their bytes as surrogate escapes."""
    name = b"a\xff\xfeb".decode("utf-8", "surrogateescape")
    assert loads(dumps(name)) == name


@pytest.mark.parametrize("value", [object(), {1, 2}, nested(20)])
def test_what_frames_do_not_carry_is_a_type_error(value: object) -> None:
    """Said at the sender, not found out at the receiver."""
    with pytest.raises(TypeError):
        dumps(value)
