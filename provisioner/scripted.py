"""What the fakes beside the ports share: they record their calls, and a call can be told to fail."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

E = TypeVar("E", bound=Exception)


class Scripted(Generic[E]):
    """A fake whose n-th call fails, before its effect or after it (its answer is lost then).

    `calls` is what was asked, reads and writes alike. A call begins with `_begin` and, once it took effect, gives what
    that returned to `_end`.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.script: dict[int, tuple[E, bool]] = {}

    def fail_call(self, number: int, error: E | None = None, *, after: bool = False) -> None:
        """Let the call of this number (from now: 1 is the next) fail, before or after its effect."""
        self.script[len(self.calls) + number] = (error or self._usual_error(after=after), after)

    def _usual_error(self, *, after: bool) -> E:
        """The port's error for what is out of reach, `after` the effect of the call or before."""
        raise NotImplementedError

    def _recorded(self, call: str) -> None:
        """Called inside every call, before its effect and before what it is told to raise."""

    async def _begin(self, call: str) -> E | None:
        # Every call gives others a turn, as a real one does: races show.
        await asyncio.sleep(0)
        self.calls.append(call)
        self._recorded(call)
        error, after = self.script.get(len(self.calls), (None, False))
        if error is not None and not after:
            raise error
        return error

    @staticmethod
    def _end(lost: E | None) -> None:
        if lost is not None:
            raise lost
