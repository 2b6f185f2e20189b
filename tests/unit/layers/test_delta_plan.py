"""What a delta has to hold, decided from two indexes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime_image.layers import LayerError, LayerIndex, ParentMismatch
from runtime_image.layers.delta import DeltaPlan, plan_delta
from runtime_image.layers.entries import Kind
from runtime_image.layers.index import IndexEntry

LATER_NS = 1_000_000_000_000


def line(kind: Kind, inode: int, *, opaque: bool = False, ctime_ns: int = 1) -> IndexEntry:
    return IndexEntry(
        kind=kind,
        mode=0o644,
        uid=0,
        gid=0,
        size=0,
        mtime_ns=1,
        inode=inode,
        ctime_ns=ctime_ns,
        opaque=opaque,
    )


ROOT = line(Kind.DIRECTORY, 1)


def tree(**entries: IndexEntry) -> LayerIndex:
    """An index; in the keys "__" stands for a slash."""
    named = {path.replace("__", "/"): entry for path, entry in entries.items()}
    return LayerIndex(entries={"": ROOT, **named}, device=1, taken_ns=LATER_NS)


def plan(before: LayerIndex, now: LayerIndex) -> DeltaPlan:
    return plan_delta(now, before)


D, F, W, S = Kind.DIRECTORY, Kind.FILE, Kind.WHITEOUT, Kind.SOCKET


def test_nothing_changed_writes_the_root_only() -> None:
    """An idle sandbox's delta is empty but for the root."""
    same = tree(a=line(F, 2), d=line(D, 3), d__f=line(F, 4), gone=line(W, 5))
    assert plan(same, same) == DeltaPlan(write={""})


def test_a_change_brings_the_directories_above_it() -> None:
    """Their owners and modes would otherwise be made up when the delta is laid out."""
    before = tree(d=line(D, 2), d__e=line(D, 3), d__e__f=line(F, 4), d__g=line(F, 5))
    now = tree(d=line(D, 2), d__e=line(D, 3), d__e__f=line(F, 4, ctime_ns=9), d__g=line(F, 5))
    assert plan(before, now).write == {"", "d", "d/e", "d/e/f"}


def test_what_went_is_whited_out_once() -> None:
    """A removed directory is one whiteout, not one for each thing in it."""
    before = tree(d=line(D, 2), d__e=line(D, 3), d__e__f=line(F, 4), d__g=line(F, 5))
    now = tree(d=line(D, 2), d__g=line(F, 5))
    made = plan(before, now)
    assert made.whiteouts == {"d/e"}
    assert made.write == {"", "d"}


def test_a_replaced_directory_is_written_whole() -> None:
    """A directory that newly hides what is below is complete and opaque in the delta."""
    before = tree(d=line(D, 2), d__old=line(F, 3), d__kept=line(F, 4))
    now = tree(d=line(D, 9, opaque=True), d__kept=line(F, 4))
    made = plan(before, now)
    assert made.write == {"", "d", "d/kept"}
    assert made.keep_opaque == {"d"}
    assert made.whiteouts == set()


def test_a_directory_that_stays_opaque_is_not_so_in_the_delta() -> None:
    """Its mark would hide the parent's content, most of which is not in the delta."""
    before = tree(d=line(D, 2, opaque=True), d__a=line(F, 3), d__b=line(F, 4))
    now = tree(d=line(D, 2, opaque=True, ctime_ns=9), d__a=line(F, 3))
    made = plan(before, now)
    assert made.write == {"", "d"}
    assert made.keep_opaque == set()
    assert made.whiteouts == {"d/b"}


def test_all_names_of_a_changed_file_go_together() -> None:
    """A hard link cannot point into another layer."""
    before = tree(a=line(F, 2), d=line(D, 3), d__b=line(F, 2), other=line(F, 5))
    now = tree(
        a=line(F, 2, ctime_ns=9),
        d=line(D, 3),
        d__b=line(F, 2, ctime_ns=9),
        d__c=line(F, 2, ctime_ns=9),
        other=line(F, 5),
    )
    assert plan(before, now).write == {"", "a", "d", "d/b", "d/c"}


def test_a_socket_in_a_files_place_hides_the_file() -> None:
    """A layer has no sockets, but the file must not come back."""
    made = plan(tree(a=line(F, 2)), tree(a=line(S, 3)))
    assert made.whiteouts == {"a"}
    assert made.write == {""}


def test_what_changed_just_before_the_index_counts_as_changed() -> None:
    """Two changes within one tick of an old kernel's clock look the same."""
    racy = tree(a=line(F, 2, ctime_ns=LATER_NS - 1))
    assert plan(racy, racy).write == {"", "a"}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(tree(d=line(D, 2), d__w=line(W, 3)), tree(d=line(D, 2)), id="a whiteout vanished"),
        pytest.param(tree(d=line(D, 2, opaque=True)), tree(d=line(D, 2)), id="an opaque mark vanished"),
        pytest.param(tree(), replace(tree(), device=2), id="another filesystem"),
    ],
)
def test_what_cannot_be_said_is_refused(before: LayerIndex, now: LayerIndex) -> None:
    """Nothing can be put over a layer that would let a lower one show again."""
    with pytest.raises(ParentMismatch):
        plan(before, now)


def test_an_index_survives_its_dump() -> None:
    """Odd names included; garbage is refused."""
    odd = tree(**{"\udcff\n": line(F, 2), "d": line(D, 3, opaque=True)})
    assert LayerIndex.load(odd.dump()) == odd
    with pytest.raises(LayerError):
        LayerIndex.load(b"garbage")
    with pytest.raises(LayerError):
        LayerIndex.load(odd.dump()[:-3])
