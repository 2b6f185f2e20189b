"""What changed in an upper since its last snapshot, as a layer of its own.

Let S be the layer made of the upper at the parent's index, over any lower layers. The delta D is such
that lowers + S + D shows the tree that lowers + upper shows now. Overlay marks in D therefore speak of
what S and the lowers show together: a path that went is a whiteout; a directory whose old content is all
gone (it was replaced) is opaque and complete; one that lives on is not opaque, even where the upper's is,
since S already hides what the upper's mark hides.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from runtime_image.layers.entries import Entry, Kind
from runtime_image.layers.errors import ParentMismatch
from runtime_image.layers.index import LayerIndex, index
from runtime_image.layers.pack import BlobWriter, Counts, PackedLayer, feed, seal
from runtime_image.layers.tarsink import TarSink
from runtime_image.layers.treesink import Sink, TreeSink
from runtime_image.layers.walk import Found, walk


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A delta that was written.

    Attributes:
        index: Of the tree now: the parent of the next delta.
        changed: Entries written, the directories above them included.
        removed: Whiteouts for what went since.
        packed: The blob; None when the delta was written as a tree.
    """

    index: LayerIndex
    changed: int
    removed: int
    packed: PackedLayer | None


def delta(now: Path, parent: LayerIndex, out: Path | BinaryIO, *, level: int = 3, threads: int = 1) -> Delta:
    """Writes what changed in a live upper since `parent` was taken of it.

    Nobody may write to the tree meanwhile. Work and bytes follow the change, not the tree: what did
    not change is looked at (one lstat), not read.

    Args:
        now: The same directory, on the same filesystem, that `parent` is the index of.
        out: A directory that does not exist: the delta as a tree, to be packed after the sandbox runs
            again. Or an open file: the delta as a blob.

    Raises:
        ParentMismatch: The change cannot be said over that parent: pack the tree whole instead, over
            the parent's own lowers.
        TreeChanged: Somebody wrote.
    """
    current = index(now)
    plan = plan_delta(current, parent)
    if isinstance(out, Path):
        out.mkdir(mode=0o700)
        with TreeSink(out) as sink:
            _write(now, plan, sink)
        packed = None
    else:
        writer = BlobWriter(out, level=level, threads=threads)
        tar = TarSink(writer.write)
        packed = seal(writer, tar, _write(now, plan, tar))
    return Delta(index=current, changed=len(plan.write), removed=len(plan.whiteouts), packed=packed)


@dataclass(kw_only=True)
class DeltaPlan:
    """What to write.

    Attributes:
        write: Paths to take from the tree, the root always.
        keep_opaque: Those of them whose opaque mark, if they have one, stays.
        whiteouts: Paths to hide that are no longer in the tree at all.
    """

    write: set[str] = field(default_factory=lambda: {""})
    keep_opaque: set[str] = field(default_factory=set)
    whiteouts: set[str] = field(default_factory=set)


def plan_delta(now: LayerIndex, parent: LayerIndex) -> DeltaPlan:
    """Decides what a delta has to hold. Pure.

    Raises:
        ParentMismatch: See `delta`.
    """
    if now.device != parent.device:
        raise ParentMismatch("the index is of another filesystem")
    planner = _Planner(now, parent)
    planner.run()
    return planner.plan


class _Planner:
    def __init__(self, now: LayerIndex, parent: LayerIndex) -> None:
        self._now = now
        self._parent = parent
        self.plan = DeltaPlan()
        # Directories of now that hide all the parent shows there.
        self._fresh: set[str] = set()
        # Directories of now with no lower layer showing through, below the parent.
        self._hiding: set[str] = set()

    def run(self) -> None:
        names: defaultdict[int, list[str]] = defaultdict(list)
        for path, entry in self._now.entries.items():
            self._visit(path)
            if entry.kind in (Kind.FILE, Kind.SYMLINK, Kind.FIFO):
                names[entry.inode].append(path)
        for path in self._parent.entries:
            if path not in self._now.entries:
                self._gone(path)
        # All names of one file go together: a link cannot reach into another layer.
        for group in names.values():
            if len(group) > 1 and not self.plan.write.isdisjoint(group):
                self.plan.write.update(group)
        for path in [*self.plan.write, *self.plan.whiteouts]:
            while path:
                path = _above(path)
                if path in self.plan.write:
                    break
                self.plan.write.add(path)

    def _visit(self, path: str) -> None:
        entry = self._now.entries[path]
        above = _above(path) if path else None
        fresh_above = above is not None and above in self._fresh
        hiding = entry.opaque or (above is not None and above in self._hiding)
        if entry.kind is Kind.DIRECTORY:
            before = self._parent.entries.get(path)
            was_directory = before is not None and before.kind is Kind.DIRECTORY
            if fresh_above or not was_directory or (entry.opaque and before and not before.opaque):
                self._fresh.add(path)
                self.plan.keep_opaque.add(path)
                self.plan.write.add(path)
            elif before is not None and before.opaque and not hiding:
                raise ParentMismatch(f"{path[:200]!r} stopped hiding what is below it")
            if hiding:
                self._hiding.add(path)
        if fresh_above:
            self.plan.write.add(path)
            return
        if entry.kind is Kind.SOCKET:
            # A layer has none: hide what the parent shows there; writing decides about the lowers.
            before = self._parent.entries.get(path)
            if before is None:
                self.plan.write.add(path)
            elif before.kind not in (Kind.SOCKET, Kind.WHITEOUT):
                self.plan.whiteouts.add(path)
            return
        before = self._parent.certain(path)
        if before is None or not before.same_as(entry):
            whited_out = self._parent.entries.get(path)
            if entry.kind is Kind.WHITEOUT and whited_out is not None and whited_out.kind is Kind.WHITEOUT:
                return
            self.plan.write.add(path)

    def _gone(self, path: str) -> None:
        above = _above(path)
        parent_now = self._now.entries.get(above)
        if parent_now is None or parent_now.kind is not Kind.DIRECTORY or above in self._fresh:
            return  # what hides the directory hides this
        if self._parent.entries[path].kind is Kind.WHITEOUT:
            if above not in self._hiding:
                raise ParentMismatch(f"{path[:200]!r} shows through again")
            return
        self.plan.whiteouts.add(path)


def _write(now: Path, plan: DeltaPlan, sink: Sink) -> Counts:
    for_walk = _selected(now, plan)
    counts = feed(for_walk, sink)
    for path in sorted(plan.whiteouts):
        sink.put(Entry(path=path, kind=Kind.WHITEOUT))
        counts.entries += 1
    return counts


def _selected(now: Path, plan: DeltaPlan) -> Iterator[Found]:
    for found in walk(now, descend=lambda entry: entry.path in plan.write):
        if found.entry.path not in plan.write:
            continue
        if found.entry.opaque and found.entry.path not in plan.keep_opaque:
            found = replace(found, entry=replace(found.entry, opaque=False))
        yield found


def _above(path: str) -> str:
    return os.path.dirname(path)
