"""What may become of what: one table a kind, and one function.

`diagram` draws a table, so that the documentation cannot tell another story.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from shoal.contract.states import HostState, ImageState, SessionState, SnapshotState

_S = SessionState
SESSION: Mapping[SessionState, frozenset[SessionState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.RUNNING, _S.ENDING, _S.ENDED}),
    _S.STARTING: frozenset({_S.PENDING, _S.RUNNING, _S.RESTORING, _S.ENDING, _S.ENDED}),
    _S.RUNNING: frozenset({_S.PAUSED, _S.RESTORING, _S.ENDING, _S.ENDED}),
    _S.PAUSED: frozenset({_S.RUNNING, _S.RESTORING, _S.ENDING, _S.ENDED}),
    _S.RESTORING: frozenset({_S.RESTORING, _S.RUNNING, _S.ENDING, _S.ENDED}),
    _S.ENDING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}

SNAPSHOT: Mapping[SnapshotState, frozenset[SnapshotState]] = {
    SnapshotState.CREATING: frozenset({SnapshotState.AVAILABLE, SnapshotState.FAILED}),
    SnapshotState.AVAILABLE: frozenset(),
    SnapshotState.FAILED: frozenset(),
}

IMAGE: Mapping[ImageState, frozenset[ImageState]] = {
    ImageState.BUILDING: frozenset({ImageState.AVAILABLE, ImageState.FAILED}),
    ImageState.AVAILABLE: frozenset(),
    ImageState.FAILED: frozenset({ImageState.BUILDING}),
}

_H = HostState
HOST: Mapping[HostState, frozenset[HostState]] = {
    _H.STARTING: frozenset({_H.READY, _H.LOST, _H.GONE}),
    _H.READY: frozenset({_H.DRAINING, _H.LOST, _H.GONE}),
    _H.DRAINING: frozenset({_H.READY, _H.LOST, _H.GONE}),
    _H.LOST: frozenset({_H.GONE}),
    _H.GONE: frozenset(),
}

#: States in which a session has, or will have, a sandbox.
LIVE = frozenset({_S.PENDING, _S.STARTING, _S.RUNNING, _S.PAUSED, _S.RESTORING})
#: States in which a session waits for a place.
UNPLACED = frozenset({_S.PENDING, _S.RESTORING})

State = TypeVar("State", SessionState, SnapshotState, ImageState, HostState)


class IllegalMove(Exception):
    """A move that the table does not have: an error of this program."""


def move(table: Mapping[State, frozenset[State]], old: State, new: State) -> State:
    """`new`, if the table lets `old` become it.

    Raises:
        IllegalMove: It does not.
    """
    if new not in table[old]:
        raise IllegalMove(f"{type(old).__name__}: {old.value} -> {new.value}")
    return new


def diagram(table: Mapping[State, frozenset[State]]) -> str:
    """The table as a Mermaid state diagram; the first state is where things begin."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table)).value}"]
    for old, following in table.items():
        lines += [f"    {old.value} --> {new.value}" for new in table if new in following]
        if not following:
            lines.append(f"    {old.value} --> [*]")
    return "\n".join(lines)


DIAGRAMS = {"session": SESSION, "snapshot": SNAPSHOT, "image": IMAGE, "host": HOST}
