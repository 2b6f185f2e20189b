"""`make demo`: a rollout group of 32 scripted agents on a real library, from nothing to nothing.

Starts a server of its own (temporary home, free port, so that it runs beside any other), plays
examples/rollout_group.py, shows what happens, and checks that nothing is left. Needs root and `make setup`.
"""

from __future__ import annotations

import asyncio
import os
import time

import rollout_group
from rich.console import Console
from rich.live import Live
from rich.table import Table

from bench.samples import quantile
from bench.service import CACHE, served
from shoal import AsyncShoal
from shoal.contract.errors import ShoalError
from shoal.contract.sessions import Session
from tests.e2e.leftovers import cgroup_names, leftovers

COUNT = 32
console = Console()


async def register_images() -> None:
    """The images that `make setup` built, and one of both: `code` with the library's source over it."""
    async with AsyncShoal() as shoal:
        await shoal.images.put("code:1.0.0", {"archive": str(CACHE / "images" / "code")})
        await shoal.images.put("toolz-source:1.2.0", {"archive": str(CACHE / "images" / "demo-workspace")})
        await shoal.images.put(
            "toolz:1.2.0", {"image": "code:1.0.0"}, workspace="toolz-source:1.2.0", workdir="/workspace"
        )


async def watched() -> tuple[list[rollout_group.Rollout], list[float], dict[str, float]]:
    """Play the group while a line tells how it is; then the rollouts, create times (s) and last counts."""
    playing = asyncio.create_task(rollout_group.main(count=COUNT))
    begun = time.monotonic()
    counts: dict[str, float] = {"hosts": 0, "busy": 0, "warm": 0, "pending": 0}
    seen: dict[str, Session] = {}
    async with AsyncShoal() as shoal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while not playing.done():
                try:
                    pool = await shoal.pools.get()
                    async for info in shoal.list_sessions(run="demo"):
                        seen[info.id] = info
                    counts = {
                        "hosts": sum(pool.hosts.values()),
                        "busy": pool.busy,
                        "warm": pool.warm,
                        "pending": pool.pending,
                    }
                except ShoalError as error:
                    live.console.print(f"[yellow]{error}[/]")
                told = "  ".join(f"[bold]{name}[/] {value:.0f}" for name, value in counts.items())
                live.update(f"{time.monotonic() - begun:5.1f} s  {told}")
                await asyncio.wait([playing], timeout=0.25)
        rollouts = await playing
    forks = [info for info in seen.values() if info.snapshot is not None]
    creates = [(info.ready_at - info.created_at).total_seconds() for info in forks if info.ready_at]
    counts = {
        "warm": sum(bool(info.warm) for info in forks),
        "cold": sum(info.warm is False for info in forks),
    }
    return rollouts, creates, counts


def main() -> int:
    """0 when every agent that could solve its task did, and nothing is left."""
    if os.geteuid() != 0:
        console.print(
            "make demo needs root: sandboxes are made of namespaces, mounts and cgroups. Run: sudo make demo"
        )
        return 1
    begun = time.monotonic()
    with served(warm=8) as server:
        os.environ |= {"SHOAL_URL": server.url, "SHOAL_API_KEY": server.api_key}
        asyncio.run(register_images())
        console.print(f"server and images ready after {time.monotonic() - begun:.1f} s")
        played = time.monotonic()
        rollouts, creates, counts = asyncio.run(watched())
        lasted = time.monotonic() - played
        cgroups = cgroup_names(server.home)
    table = Table("agent", "result", "steps", "cause")
    for rollout in rollouts:
        table.add_row(
            str(rollout.number),
            "[green]solved[/]" if rollout.solved else "[red]failed[/]",
            str(rollout.steps),
            "; ".join(rollout.causes),
        )
    console.print(table)
    execs = [1000 * duration for rollout in rollouts for duration in rollout.exec_s]
    steps = sum(rollout.steps for rollout in rollouts)
    console.print(f"sessions {COUNT}, warm starts {counts['warm']}, cold starts {counts['cold']}")
    console.print(f"steps {steps}, {steps / lasted:.1f} a second, {lasted:.1f} s in all")
    if creates:
        console.print(f"create p50 {quantile(creates, 0.5):.2f} s, p95 {quantile(creates, 0.95):.2f} s")
    console.print(
        f"exec   p50 {quantile(execs, 0.5):.0f} ms, p95 {quantile(execs, 0.95):.0f} ms (the tests themselves)"
    )
    left = leftovers(server.home, cgroups)
    console.print(f"[red]left behind: {left}[/]" if left else "nothing is left behind")
    return 0 if all(rollout.solved for rollout in rollouts) and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
