"""Several layers as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime_image.layers.entries import Content, Entry
from runtime_image.layers.pack import feed
from runtime_image.layers.treesink import TreeSink
from runtime_image.layers.walk import walk


def squash(layers: Sequence[Path], into: Path, *, bottom: bool = False) -> None:
    """Writes one tree that shows what the layers show when they lie over each other.

    Args:
        layers: Bottom first.
        into: Must not exist. What was written until an error stays, for the caller to remove.
        bottom: Nothing will lie below the result: it needs no whiteouts and no opaque marks. Otherwise
            it keeps those that hide what lies below.
    """
    into.mkdir(mode=0o700)
    with TreeSink(into, marks=not bottom) as sink:
        for layer in layers:
            feed(walk(layer), _Over(sink))


class _Over:
    """Puts one layer's entries over what is there already."""

    def __init__(self, sink: TreeSink) -> None:
        self._sink = sink

    def put(self, entry: Entry, content: Content | None = None) -> None:
        if entry.opaque:
            self._sink.clear(entry.path)
        self._sink.put(entry, content)

    def link(self, path: str, target: str) -> None:
        self._sink.link(path, target)
