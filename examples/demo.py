"""`make demo`: a rollout group of 32 scripted agents on a real library, from nothing to nothing.

Starts a server of its own (temporary home, free port, so that it runs beside any other), plays
examples/rollout_group.py, shows what happens, and checks that nothing is left. Needs root and `make setup`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rollout_group
from rich.console import Console
from rich.live import Live
from rich.table import Table

from shoal import AsyncShoal
from shoal.contract.errors import ShoalError
from shoal.contract.sessions import Session

CACHE = Path(os.environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal")
COUNT = 32
console = Console()


@contextmanager
def server() -> Iterator[Path]:
    """A server of its own; ended, and its home removed, when the block is left."""
    home = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    ready, log = home / "ready.json", home / "server.log"
    environment = {**os.environ, "SHOAL_CREDENTIALS": str(home / "client.json")}
    command = [sys.executable, "-m", "api", "--home", str(home / "home"), "--port", "0", "--warm", "8"]
    command += ["--max-hosts", "1", "--ready-file", str(ready), "--log-format", "json"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        while not ready.exists():
            if process.poll() is not None:
                console.print(log.read_text(errors="replace")[-3000:])
                raise SystemExit("the server did not start; `shoal doctor` says what this machine lacks")
            time.sleep(0.05)
        os.environ["SHOAL_URL"] = json.loads(ready.read_text())["url"]
        os.environ["SHOAL_CREDENTIALS"] = environment["SHOAL_CREDENTIALS"]
        yield home
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
        shutil.rmtree(home, ignore_errors=True)


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


def leftovers(home: Path) -> list[str]:
    """What a demo may not leave: processes, mounts, loop devices, cgroups that name its home."""
    found = []
    for place in ("/proc/self/mountinfo", "/sys/fs/cgroup"):
        if place.endswith("mountinfo"):
            found += [
                f"mount {line.split()[4]}"
                for line in Path(place).read_text().splitlines()
                if str(home) in line
            ]
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if str(home) in device.read_text():
                found.append(f"loop device {device.parts[3]}")
        except OSError:
            continue
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(home).encode() in process.read_bytes():
                found.append(f"process {process.parts[2]}")
        except OSError:
            continue
    return found


def quantile(values: list[float], q: float) -> float:
    """The nearest-rank quantile; 0 of nothing."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def main() -> int:
    """0 when every agent that could solve its task did, and nothing is left."""
    if os.geteuid() != 0:
        console.print(
            "make demo needs root: sandboxes are made of namespaces, mounts and cgroups. Run: sudo make demo"
        )
        return 1
    begun = time.monotonic()
    with server() as home:
        asyncio.run(register_images())
        console.print(f"server and images ready after {time.monotonic() - begun:.1f} s")
        played = time.monotonic()
        rollouts, creates, counts = asyncio.run(watched())
        lasted = time.monotonic() - played
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
    console.print(f"create p50 {quantile(creates, 0.5):.2f} s, p95 {quantile(creates, 0.95):.2f} s")
    console.print(
        f"exec   p50 {quantile(execs, 0.5):.0f} ms, p95 {quantile(execs, 0.95):.0f} ms (the tests themselves)"
    )
    left = leftovers(home)
    console.print("[red]left behind: " + ", ".join(left) + "[/]" if left else "nothing is left behind")
    return 0 if all(rollout.solved for rollout in rollouts) and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
