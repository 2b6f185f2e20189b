"""Plots of a run as SVG: the same bytes for the same run. Only this needs matplotlib (the extra `simulate`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from provisioner.simulate.measures import Measures

_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "shoal",
    "svg.fonttype": "none",
    "font.size": 9,
    "path.simplify": True,
}
_POINTS = 400


def pool_plot(results: Mapping[str, Any], measures: Measures, per_host: int, path: Path) -> None:
    """Sessions alive and waiting over the run, and the hosts under them."""
    plt = _matplotlib()
    samples = _thin(measures.samples)
    minutes = [each[0] / 60 for each in samples]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.5, 4.2), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    above.plot(minutes, [each[1] for each in samples], label="running", color="#1b6ca8")
    above.plot(minutes, [each[2] for each in samples], label="waiting", color="#d1495b")
    above.set_ylabel("sessions")
    above.set_title(f"{results['scenario']}: {results['sessions']:,} sessions")
    above.legend(loc="upper right", frameon=False)
    below.step(minutes, [each[3] for each in samples], label="instances paid for", color="#555555")
    below.step(minutes, [each[4] for each in samples], label="hosts ready", color="#2e8b57")
    below.plot(
        minutes, [each[1] / per_host for each in samples], label="filled", color="#1b6ca8", linewidth=0.8
    )
    below.set_ylabel("hosts")
    below.set_xlabel("minutes")
    below.legend(loc="upper right", frameon=False, ncols=3)
    _save(plt, figure, path)


def spread_plot(spreads: Mapping[str, Sequence[int]], title: str, path: Path) -> None:
    """Sessions on each host, fullest first, by each way to choose."""
    plt = _matplotlib()
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    colours = {"shoal": "#1b6ca8", "random": "#e0a030", "least": "#d1495b"}
    for name, loads in spreads.items():
        ordered = sorted(loads, reverse=True)
        axes.step(range(1, len(ordered) + 1), ordered, where="mid", label=name, color=colours.get(name))
    axes.set_xlabel("hosts, the fullest first")
    axes.set_ylabel("sessions on it")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend(frameon=False)
    _save(plt, figure, path)


def _matplotlib() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(_SETTINGS)
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _thin(samples: Sequence[tuple[float, int, int, int, int]]) -> list[tuple[float, int, int, int, int]]:
    """Few enough to draw; each stretch is told by its sample with most waiting."""
    step = max(1, len(samples) // _POINTS)
    return [
        max(samples[start : start + step], key=lambda each: each[2]) for start in range(0, len(samples), step)
    ]
