"""`python -m provisioner.simulate`, or `shoal simulate`: run a scenario and print what came of it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import structlog
from pydantic import ValidationError

from provisioner.simulate.report import simulate, text
from provisioner.simulate.scenario import names, read

_BY = ("random", "least")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal simulate",
        description="Run a pool under a made-up load in virtual time: the real planner, placement and capacity driver.",
    )
    parser.add_argument("scenario", nargs="?", help="a name (--list), or a TOML file")
    parser.add_argument("--list", action="store_true", help="show the scenarios that come with it")
    parser.add_argument("--seed", type=int, help="another draw of everything that is drawn")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--compare", action="store_true", help="run the trace with random and least-loaded choices as well"
    )
    parser.add_argument(
        "--real", action="store_true", help="the use cases themselves, for small scenarios; prints JSON"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write SVG plots there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run it; answers the exit code."""
    # What the parts would log of their work is of no use here, and a run is millions of steps.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    parser = _arguments()
    given = parser.parse_args(argv)
    if given.list or given.scenario is None:
        for name in names():
            print(f"{name:<10} {read(name).about}")
        return 0
    try:
        scenario = read(given.scenario)
    except (OSError, ValidationError, ValueError) as error:
        print(f"{given.scenario} is no scenario: {error}", file=sys.stderr)
        return 2
    if given.seed is not None:
        scenario = scenario.model_copy(update={"seed": given.seed})
    if given.real:
        from provisioner.simulate.real import real_results

        print(json.dumps(real_results(scenario), indent=2))
        return 0
    began = time.monotonic()
    results, measures = simulate(scenario)
    spreads: dict[str, float | None] = {}
    loads = {"shoal": measures.worst_loads()}
    if given.compare:
        for policy in _BY:
            other, gathered = simulate(scenario, policy=policy)
            spreads[policy] = other["spread"]["max_over_mean"]
            loads[policy] = gathered.worst_loads()
    took_s = round(time.monotonic() - began, 1)
    if given.json:
        print(json.dumps({**results, "compared_spread": spreads, "took_s": took_s}, indent=2))
    else:
        print(text(results, spreads))
        print(f"\nsimulated {scenario.duration_s:,.0f} s in {took_s} s")
    if given.plots is not None:
        from provisioner.simulate.plots import pool_plot, spread_plot

        given.plots.mkdir(parents=True, exist_ok=True)
        assert scenario.pool.host_capacity is not None
        per_host = scenario.pool.host_capacity.sandboxes
        pool_plot(results, measures, per_host, given.plots / f"{scenario.name}-pool.svg")
        if any(loads.values()):
            title = f"{scenario.name}: sessions on each host after the burst"
            spread_plot(loads, title, given.plots / f"{scenario.name}-spread.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
