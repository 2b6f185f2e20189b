"""Which paths of a tree a list of globs names.

A glob is a path relative to /, a slash before or after it means nothing. `*`, `?` and `[...]` stand for
characters of one name, hidden ones too; a name that is `**` stands for any number of directories, also for
none; at the end, for everything below. What lies in a directory that is named is named with it:

    tmp/*              all in /tmp, not /tmp itself
    **/__pycache__     wherever it is
    workspace/**/*.o   at any depth below /workspace
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from runtime_image.layers.entries import Entry, Kind

_DEEP = "**"
_MAX_NODES = 4096
# (which pattern, how many of its names are behind us)
_State = tuple[int, int]


class PathGlobs:
    """Globs over paths. What it costs to ask follows the path's length: no pattern makes it explode.

    Raises:
        ValueError: A glob that names nothing, or the root, or climbs.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [_names_of(pattern) for pattern in patterns]
        self._nodes: dict[frozenset[_State], _Node] = {}
        # By the name's own pattern: it is in many nodes. The groups of these are atomic: linear enough for
        # whoever writes the pattern.
        self._matchers = {
            name: re.compile(fnmatch.translate(name)).match
            for name in {name for names in self._patterns for name in names}
            if name != _DEEP and any(character in name for character in "*?[")
        }
        self._start = frozenset(
            state for number in range(len(self._patterns)) for state in self._reached(number, 0)
        )

    def match(self, path: str) -> bool:
        """Whether the globs name that path, or a directory that it lies in; the root never.

        Args:
            path: As `Entry.path`.
        """
        states = self._start
        for name in path.split("/") if path else ():
            reached = self.below(states, name)
            if reached is None:
                return True
            states = reached
        return False

    @property
    def start(self) -> frozenset[_State]:
        """What may still match below the root."""
        return self._start

    def below(self, states: frozenset[_State], name: str) -> frozenset[_State] | None:
        """What may still match below that name in a directory; None: the name itself is matched."""
        return self._node(states).step(name)

    def _node(self, states: frozenset[_State]) -> _Node:
        node = self._nodes.get(states)
        if node is None:
            if len(self._nodes) >= _MAX_NODES:
                self._nodes.clear()
            node = self._nodes[states] = self._compiled(states)
        return node

    def _compiled(self, states: frozenset[_State]) -> _Node:
        node = _Node()
        for number, at in states:
            names = self._patterns[number]
            name, last = names[at], at + 1 == len(names)
            if name == _DEEP:
                if last:
                    node.everything = True
                node.stay |= self._reached(number, at)
                continue
            after = None if last else self._reached(number, at + 1)
            if name in self._matchers:
                node.globs.append((self._matchers[name], after))
            else:
                node.literals.setdefault(name, []).append(after)
        return node

    def _reached(self, number: int, at: int) -> frozenset[_State]:
        names = self._patterns[number]
        if names[at] == _DEEP and at + 1 < len(names):
            return frozenset({(number, at), (number, at + 1)})
        return frozenset({(number, at)})


@dataclass(slots=True)
class _Node:
    """What names lead to; None in place of states: a match."""

    everything: bool = False
    stay: set[_State] = field(default_factory=set)
    literals: dict[str, list[frozenset[_State] | None]] = field(default_factory=dict)
    globs: list[tuple[Callable[[str], object], frozenset[_State] | None]] = field(default_factory=list)

    def step(self, name: str) -> frozenset[_State] | None:
        if self.everything:
            return None
        reached = set(self.stay)
        for after in self.literals.get(name, ()):
            if after is None:
                return None
            reached |= after
        for matches, after in self.globs:
            if matches(name):
                if after is None:
                    return None
                reached |= after
        return frozenset(reached)


class Without:
    """A `keep` for `pack`, `repack` and `walk`: all but what the globs name, marks of deletion included.

    It has to be asked in their order, parents first; asking again about the same entry is fine.
    """

    def __init__(self, globs: PathGlobs) -> None:
        self._globs = globs
        # The directories down to where the walk is.
        self._above: list[tuple[str, frozenset[_State]]] = [("", globs.start)]

    def __call__(self, entry: Entry) -> bool:
        if not entry.path:
            return True
        parent, _, name = entry.path.rpartition("/")
        while self._above[-1][0] != parent:
            self._above.pop()
        states = self._globs.below(self._above[-1][1], name)
        if states is None:
            return False
        if entry.kind is Kind.DIRECTORY:
            self._above.append((entry.path, states))
        return True


def _names_of(pattern: str) -> list[str]:
    names: list[str] = []
    for name in pattern.split("/"):
        if name in ("", ".") or (name == _DEEP and names[-1:] == [_DEEP]):
            continue
        if name == ".." or "\0" in name:
            raise ValueError(f"no path can match {pattern[:200]!r}")
        names.append(name)
    if not names:
        raise ValueError(f"{pattern[:200]!r} names nothing below the root")
    return names
