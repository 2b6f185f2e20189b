"""Ids of steps, which count up by themselves.

A script that runs again uses the same ids in the same order and so gets the recorded observations: it fast-forwards.
For that, ids must be the same on every run, and never be shared by two that act apart:

- A handle counts `step-1`, `step-2`, ... Threads that share a handle share the counter: no id is given twice, but their
  order is chance; give each its own space (`box.steps("thread-3")`) when the script should fast-forward.
- A copy of a handle (pickled to another process, a Ray task, `copy.copy`) gets a space of its own, named by the place
  where the copy was made: the first copy made after `step-4` counts `step-4+1-1`, `step-4+1-2`, ... It is the same on
  every run of the same script, and the original goes on with `step-5`. Unpickling the same bytes twice (a task that
  Ray repeats) gives the same space on purpose: the repeated task fast-forwards.
- A forked child's handles likewise: `step-4+f1-1`, where 1 counts the forks of the process.
- Two handles made independently for one session (by name, or by id) use the same space: that is what a restarted script
  does. Acting differently under the same id is refused (`ActionConflict`), never run; programs that mean to act on one
  session beside each other name their spaces: `shoal.session(id=..., steps="evaluator")`.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from typing import Any

from shoal.client.errors import of_code
from shoal.contract.base import ACTION_ID_PATTERN
from shoal.contract.errors import ErrorCode

_forks = 0
_living: weakref.WeakSet[StepCounter] = weakref.WeakSet()


class StepCounter:
    """Gives the ids of one space; safe to share between threads."""

    def __init__(self, prefix: str = "step") -> None:
        if not re.fullmatch(ACTION_ID_PATTERN, prefix):
            raise of_code(ErrorCode.INVALID_REQUEST, f"{prefix!r} cannot begin the id of a step")
        self._prefix = prefix
        self._given = 0
        self._copies = 0
        self._others: dict[str, int] = {}
        self._lock = threading.Lock()
        _living.add(self)

    @property
    def prefix(self) -> str:
        """What the ids of this space begin with."""
        return self._prefix

    @property
    def given(self) -> int:
        """How many ids were given."""
        return self._given

    def next(self) -> str:
        """The next step's id."""
        with self._lock:
            self._given += 1
            return f"{self._prefix}-{self._given}"

    def next_of(self, kind: str) -> str:
        """The next id of something else that a script makes, such as a snapshot: counted apart."""
        with self._lock:
            self._others[kind] = self._others.get(kind, 0) + 1
            return f"{self._prefix}-{kind}-{self._others[kind]}"

    def _place(self) -> str:
        return f"{self._prefix}-{self._given}"

    def copy(self) -> StepCounter:
        """A space for a copy of the handle, named by this place."""
        with self._lock:
            self._copies += 1
            return StepCounter(f"{self._place()}+{self._copies}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (StepCounter, (self.copy().prefix,))

    def _after_fork(self, forks: int) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._prefix = f"{self._place()}+f{forks}"
        self._given = self._copies = 0
        self._others.clear()


def _before_fork() -> None:
    global _forks
    _forks += 1


def _in_child() -> None:
    global _forks
    forks, _forks = _forks, 0
    for counter in list(_living):
        counter._after_fork(forks)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
