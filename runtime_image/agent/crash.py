"""Named points at which a test lets the agent die, to prove that no action runs twice.

`SHOAL_CRASH_AT=after_intent` makes the agent exit with 137, as by SIGKILL, the first time it comes by that point.
`SHOAL_CRASH_ONCE=FILE` keeps that to once over restarts: the file is made just before the exit, and its presence
disarms the point. Without `SHOAL_TESTING=1` an agent that finds `SHOAL_CRASH_AT` refuses to start, so that no
production host carries a live point.
"""

from __future__ import annotations

import os
from typing import Final

POINTS: Final = frozenset({"before_admission", "after_intent", "after_fork", "after_result", "before_reply"})

_armed: str | None = None


def arm() -> None:
    """Read the environment once, at start.

    Raises:
        RuntimeError: A point is named that does not exist, or `SHOAL_TESTING` is not 1.
    """
    global _armed
    point = os.environ.get("SHOAL_CRASH_AT")
    if not point:
        _armed = None
        return
    if os.environ.get("SHOAL_TESTING") != "1":
        raise RuntimeError("SHOAL_CRASH_AT is for tests: it needs SHOAL_TESTING=1")
    if point not in POINTS:
        raise RuntimeError(f"SHOAL_CRASH_AT={point} is not one of {', '.join(sorted(POINTS))}")
    once = os.environ.get("SHOAL_CRASH_ONCE")
    _armed = None if once and os.path.exists(once) else point


def passing(point: str) -> None:
    """Die here if this point is armed; costs one comparison otherwise."""
    if _armed != point:
        return
    once = os.environ.get("SHOAL_CRASH_ONCE")
    if once:
        os.close(os.open(once, os.O_CREAT | os.O_WRONLY, 0o600))
    os._exit(137)
