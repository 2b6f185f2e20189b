"""The head and tail of a stream, against the plain truth: the whole stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime_image.guest.tape import Tape

PIECES = st.lists(st.binary(max_size=40), max_size=12)


def kept(tape: Tape) -> list[tuple[int, bytes]]:
    """Everything readable, as runs by offset."""
    runs: list[tuple[int, bytes]] = []
    offset = 0
    while True:
        start, data = tape.read(offset, 7)
        if not data:
            return runs
        if runs and runs[-1][0] + len(runs[-1][1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + data)
        else:
            runs.append((start, data))
        offset = start + len(data)


@given(PIECES, st.integers(0, 70))
def test_keeps_head_and_tail_of_any_stream(pieces: list[bytes], limit: int) -> None:
    """Whole up to the limit; beyond, exactly the first and last halves, the total and what is missing."""
    tape = Tape(limit)
    for piece in pieces:
        tape.feed(piece)
    whole = b"".join(pieces)
    runs = kept(tape)
    assert tape.total == len(whole)
    assert all(whole[start : start + len(data)] == data for start, data in runs)
    assert sum(len(data) for _, data in runs) == min(len(whole), limit)
    assert tape.dropped == max(0, len(whole) - limit)
    if len(whole) > limit > 1:
        assert runs[0] == (0, whole[: limit - limit // 2])
        assert runs[-1] == (len(whole) - limit // 2, whole[len(whole) - limit // 2 :])


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=30), st.booleans()), max_size=15), st.integers(0, 50)
)
def test_a_copy_by_way_of_gaps_is_never_wrong(pieces: list[tuple[bytes, bool]], limit: int) -> None:
    """A reader that misses pieces keeps only true bytes at true offsets, and ends with the right total."""
    copy, whole = Tape(limit), b""
    for piece, seen in pieces:
        if seen:
            copy.skip(len(whole))
            copy.feed(piece)
        whole += piece
    copy.skip(len(whole))
    assert copy.total == len(whole)
    runs = kept(copy)
    assert copy.dropped == len(whole) - sum(len(data) for _, data in runs)
    assert all(whole[start : start + len(data)] == data for start, data in runs)
