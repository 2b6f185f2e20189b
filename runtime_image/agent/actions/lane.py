"""The order of a session's steps: one after another in a lane, as they arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from runtime_image.agent.actions.run import ActionRun


class Lane:
    """Starts queued steps one at a time. A session has one lane; a `parallel` step or list has its own."""

    def __init__(self, start: Callable[[ActionRun, Lane], None], skip: Callable[[ActionRun], None]) -> None:
        self._start = start
        self._skip = skip
        self._waiting: deque[ActionRun] = deque()
        self._active: ActionRun | None = None
        self._pumping = False

    def add(self, run: ActionRun) -> None:
        """Queue a step; it starts at once when nothing is before it."""
        self._waiting.append(run)
        self._pump()

    def release(self, run: ActionRun) -> None:
        """The step has ended, or needs its place no more: the next one may start. Harmless when repeated."""
        if self._active is run:
            self._active = None
            self._pump()

    def remove(self, run: ActionRun) -> bool:
        """Take a step out of the queue; False when it is not waiting."""
        try:
            self._waiting.remove(run)
        except ValueError:
            return False
        return True

    def _pump(self) -> None:
        # Steps that end within their own start would recurse once each; the loop keeps the stack flat.
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._active is None and self._waiting:
                run = self._waiting.popleft()
                if run.batch is not None and run.batch.stopped:
                    self._skip(run)
                    continue
                self._active = run
                self._start(run, self)
        finally:
            self._pumping = False
