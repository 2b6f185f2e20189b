"""Time, injected: what the wall says and what has passed."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two clocks: `now` for records, `monotonic` (seconds) for durations and leases."""

    def now(self) -> datetime:
        """The time of day, aware, in UTC."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """The time of day, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()
