"""How a build tells how far it is."""

from __future__ import annotations

import json
import sys
import time
from typing import Protocol


class Progress(Protocol):
    """Told of each phase as it begins, and of what is worth saying within one."""

    def __call__(self, phase: str, **fields: str | int | float) -> None: ...


def silent(phase: str, **fields: str | int | float) -> None:
    """Tells nobody."""


class StderrProgress:
    """Lines on standard error: for people, or one JSON object each for programs."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._started = time.monotonic()

    def __call__(self, phase: str, **fields: str | int | float) -> None:
        elapsed_s = round(time.monotonic() - self._started, 2)
        if self._as_json:
            line = json.dumps({"phase": phase, "elapsed_s": elapsed_s, **fields})
        else:
            said = " ".join(f"{key}={value}" for key, value in fields.items())
            line = f"[{elapsed_s:7.2f}s] {phase} {said}".rstrip()
        print(line, file=sys.stderr, flush=True)
