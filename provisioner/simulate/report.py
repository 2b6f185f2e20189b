"""Runs a scenario and says what came of it: plain data for JSON, and the same as text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from provisioner.placement import Room
from provisioner.simulate import loop
from provisioner.simulate.aws import summary
from provisioner.simulate.control import Control
from provisioner.simulate.lean import LeanWorld
from provisioner.simulate.measures import Measures, percentiles
from provisioner.simulate.optimum import host_seconds, needed
from provisioner.simulate.scenario import Scenario, arrivals

Results = dict[str, Any]


async def _run(scenario: Scenario, policy: str) -> LeanWorld:
    world = LeanWorld(scenario, policy)
    control = asyncio.create_task(Control(world).run())
    try:
        await world.run()
    finally:
        control.cancel()
        await asyncio.gather(control, return_exceptions=True)
    return world


def simulate(scenario: Scenario, *, policy: str = "shoal") -> tuple[Results, Measures]:
    """Run it in the lean model.

    Args:
        policy: Who chooses hosts: `shoal`, or for comparison `random` or `least` (loaded).
    """
    world = loop.run(_run(scenario, policy))
    measures = world.measures
    end_s = scenario.duration_s
    paid_s = sum(
        min(end_s, machine.ended_s if machine.ended_s is not None else end_s) - machine.launched_s
        for machine in world.aws.history
        if machine.launched_s < end_s
    )
    hosts = scenario.hosts
    start_s = hosts.launch_s + hosts.join_s + hosts.task_s
    capacity = Room.of(scenario.pool.host_capacity)
    asked = arrivals(scenario)
    steps = needed(
        ((scenario.load[each.load].room, each.at_s, each.at_s + each.hold_s) for each in asked), capacity
    )
    best_s = host_seconds(steps, start_s, end_s)
    worst = max(measures.spreads, key=lambda each: each[1] / each[2], default=None)
    results: Results = {
        "scenario": scenario.name,
        "policy": policy,
        "seed": scenario.seed,
        "sessions": len(asked),
        "ran": len(measures.first_s) + len(measures.later_s),
        "most_alive": measures.most_alive,
        "waiting_at_end": len(world.queue),
        "queue_s": {
            "first_wave": percentiles(measures.first_s),
            "later": percentiles(measures.later_s),
            "restored": percentiles(measures.restored_s),
        },
        "host_start_s": percentiles(measures.host_starts_s),
        "spread": {
            "max_over_mean": round(worst[1] / worst[2], 3) if worst else None,
            "hosts": worst[3] if worst else 0,
            "mean": round(worst[2], 1) if worst else 0.0,
        },
        "placements": {
            "asked": measures.asked,
            "refused": measures.refused,
            "refused_share": round(measures.refused / max(1, measures.asked), 4),
            "claimed_by_others_first": measures.collided,
            "most_per_s": max(measures.placed.values(), default=0),
            "creates_most_per_s": max(measures.creates.values(), default=0),
        },
        "hosts": {
            "started": len(measures.host_starts_s),
            "most": max((each[3] for each in measures.samples), default=0),
            "lost_to_spot": measures.spot_lost,
            "sessions_moved": measures.moved,
            "hours": round(paid_s / 3600, 2),
            "optimum_hours": round(best_s / 3600, 2),
            "over_optimum": round(paid_s / best_s, 3) if best_s else None,
        },
        "reconciler": {
            "ticks": measures.ticks,
            "failures": measures.tick_failures,
            "tick_s": percentiles(measures.tick_s),
            "warm_orders_written": measures.orders_written,
            "heartbeats_written": measures.beats_written,
        },
        "aws": summary(world.aws.uses),
    }
    return results, measures


def text(results: Mapping[str, Any], spreads: Mapping[str, float | None] | None = None) -> str:
    """The results as lines to read.

    Args:
        spreads: Largest over mean sessions on a host of other choices on the same trace, by their name.
    """
    queue, hosts, placed = results["queue_s"], results["hosts"], results["placements"]
    lines = [
        f"{results['scenario']} (seed {results['seed']}): {results['sessions']:,} sessions, "
        f"{results['most_alive']:,} alive at the most, {results['waiting_at_end']:,} still waiting at the end",
        "",
        "seconds until it runs      count        p50      p95      p99      max",
    ]
    for name, title in (("first_wave", "first wave"), ("later", "later"), ("restored", "host lost")):
        values = queue[name]
        if values["count"]:
            lines.append(
                f"  {title:<20} {values['count']:>9,.0f} {values['p50']:>10.2f} {values['p95']:>8.2f} "
                f"{values['p99']:>8.2f} {values['max']:>8.2f}"
            )
    start = results["host_start_s"]
    lines += [
        f"  {'a host to come up':<20} {start['count']:>9,.0f} {start['p50']:>10.2f} {start['p95']:>8.2f} "
        f"{start['p99']:>8.2f} {start['max']:>8.2f}",
        "",
    ]
    if results["spread"]["max_over_mean"] is not None:
        shown = {"shoal": results["spread"]["max_over_mean"], **(spreads or {})}
        told = ", ".join(f"{name} {value}" for name, value in shown.items())
        lines.append(
            f"fullest host over the mean: {told} "
            f"({results['spread']['hosts']} hosts, {results['spread']['mean']} sessions each)"
        )
    lines += [
        f"refused by hosts: {placed['refused']:,} of {placed['asked']:,}; "
        f"most placed in a second: {placed['most_per_s']:,}",
        f"host-hours: {hosts['hours']} against {hosts['optimum_hours']} at the least: "
        f"{hosts['over_optimum']} times; {hosts['most']} hosts at the most",
        f"reconciler: {results['reconciler']['ticks']:,} ticks, p95 {results['reconciler']['tick_s']['p95']} s, "
        f"{results['reconciler']['warm_orders_written']:,} warm orders written",
        "",
        "AWS limit              calls   most/s   limit/s   burst   used   over",
    ]
    for name, use in results["aws"].items():
        lines.append(
            f"  {name:<18} {use['calls']:>8,.0f} {use['most_per_s']:>8.0f} {use['limit_per_s']:>9.0f} "
            f"{use['burst']:>7.0f} {use['used']:>6.0%} {use['over']:>6.0f}"
        )
    return "\n".join(lines)
