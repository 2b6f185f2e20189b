"""What a run is measured by: counts and virtual times, put together as plain data."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """How many, and the p50, p95, p99 and largest (nearest rank); zeros when there are none."""
    ordered = sorted(values)

    def rank(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0

    return {
        "count": float(len(ordered)),
        "p50": rank(0.50),
        "p95": rank(0.95),
        "p99": rank(0.99),
        "max": round(ordered[-1], 3) if ordered else 0.0,
    }


@dataclass(kw_only=True)
class Measures:
    """Gathered while it runs.

    Attributes:
        first_s, later_s, restored_s: Seconds from the request until it runs: of the first wave, of all others, and of
            sessions whose host was lost, from when that was noticed.
        asked, refused: Requests to hosts, and those they refused.
        collided: Queue entries that another replica had claimed first.
        spreads: (moment, largest and mean number of sessions on a host, hosts); `loads` are those numbers whole.
        samples: Per second: (moment, sessions alive, waiting, instances, hosts ready).
    """

    first_s: array[float] = field(default_factory=lambda: array("d"))
    later_s: array[float] = field(default_factory=lambda: array("d"))
    restored_s: array[float] = field(default_factory=lambda: array("d"))
    asked: int = 0
    refused: int = 0
    collided: int = 0
    moved: int = 0
    spot_lost: int = 0
    alive: int = 0
    most_alive: int = 0
    ticks: int = 0
    tick_failures: int = 0
    tick_s: array[float] = field(default_factory=lambda: array("d"))
    orders_written: int = 0
    beats_written: int = 0
    host_starts_s: array[float] = field(default_factory=lambda: array("d"))
    spreads: list[tuple[float, int, float, int]] = field(default_factory=list)
    loads: list[tuple[int, ...]] = field(default_factory=list)
    samples: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    creates: Counter[int] = field(default_factory=Counter)
    placed: Counter[int] = field(default_factory=Counter)

    def created(self, now_s: float) -> None:
        """A session was written down."""
        self.creates[int(now_s)] += 1

    def ran(self, waited_s: float, first_wave: bool, restored: bool, at_s: float) -> None:
        """A session runs."""
        waits = self.restored_s if restored else self.first_s if first_wave else self.later_s
        waits.append(waited_s)
        self.placed[int(at_s)] += 1
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)

    def ended(self) -> None:
        """A session does not run any more."""
        self.alive -= 1

    def spread(self, now_s: float, loads: Sequence[int]) -> None:
        """How sessions lie on the hosts now."""
        if loads and sum(loads):
            self.spreads.append((now_s, max(loads), sum(loads) / len(loads), len(loads)))
            self.loads.append(tuple(loads))

    def worst_loads(self) -> tuple[int, ...]:
        """Sessions on each host at the moment when they were spread worst."""
        return max(self.loads, key=lambda each: max(each) * len(each) / sum(each), default=())

    def sample(self, now_s: float, alive: int, waiting: int, instances: int, ready: int) -> None:
        """How things stand."""
        self.samples.append((now_s, alive, waiting, instances, ready))
