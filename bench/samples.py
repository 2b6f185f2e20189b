"""What is done with samples: quantiles, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(samples: Sequence[float], q: float) -> float:
    """The nearest-rank quantile: the smallest sample with at least `q` of all at or below it."""
    if not samples:
        raise ValueError("no samples")
    ranked = sorted(samples)
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """p50, p95 and how many there were; milliseconds in, milliseconds out."""
    return {
        "p50": round(quantile(samples, 0.5), 3),
        "p95": round(quantile(samples, 0.95), 3),
        "n": len(samples),
    }
