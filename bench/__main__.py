"""`python -m bench`: measure, print a table, write bench/results.json."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench import measures
from bench.cold_start import import_ms
from bench.floor_create import floor_create_ms
from bench.planning import planning
from bench.samples import summary
from bench.service import CACHE, Server, served
from runtime_image.layers import unpack
from shoal import AsyncShoal

HERE = Path(__file__).parent
console = Console()

#: What is wanted of each figure on 2 cores, as a person reads it; nothing here is asserted.
WANTED = {
    "exec_ms": "p50 within 5 ms of the floor, p95 within 20 ms",
    "exec_per_s_32": "400",
    "create_warm_ms": "p50 under 25 ms",
    "create_cold_ms": "p50 under 1.5 x the floor",
    "create_per_s": "15",
    "fork16_s": "under 1.5",
    "idle_pss_mib": "under 8",
    "file_put_mib_s": "over 200",
    "file_get_mib_s": "over 200",
    "lambda_import_ms": "under 700 ms",
}


def floor_exec(samples: int) -> dict[str, float]:
    """fork, exec of /bin/true and wait, in a process of its own."""
    command = [sys.executable, "-I", "-S", str(HERE / "floor_exec.py"), str(samples)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return summary([float(line) for line in lines])


def floor_create(samples: int) -> dict[str, float]:
    """`runc run` and `runc delete` of a bundle of ours."""
    (layer,) = (CACHE / "images" / "minimal").glob("*.tar.zst")
    with tempfile.TemporaryDirectory(prefix="shoal-bench-layer-") as root:
        tree = Path(root) / "tree"
        unpack(layer, tree, max_bytes=1 << 30)
        return summary(asyncio.run(floor_create_ms((tree,), samples)))


async def _register(server: Server) -> AsyncShoal:
    shoal = AsyncShoal(server.url, server.api_key)
    await shoal.images.put(measures.IMAGE, {"archive": str(CACHE / "images" / "minimal")})
    async with shoal.session(measures.IMAGE, resources=measures.SMALL) as box:
        await box.exec(measures.TRUE)  # a host runs, the layers are unpacked
    return shoal


async def _with_warm(server: Server, samples: int, scale: float) -> dict[str, Any]:
    async with await _register(server) as shoal:
        found: dict[str, Any] = {"exec_ms": await measures.exec_ms(shoal, samples)}
        found["exec_per_s_32"] = round(await measures.exec_per_s(shoal, 32, int(6000 * scale)), 1)
        put, get = await measures.file_mib_s(shoal, 100, 5)
        found["file_put_mib_s"], found["file_get_mib_s"] = round(put, 1), round(get, 1)
        found["fork16_s"] = round(await measures.fork_s(shoal, 16, 5), 3)
        await asyncio.sleep(5)
        warm, missed = await measures.create_ms(shoal, samples, pace_s=0.125)
        found["create_warm_ms"] = summary(warm) if warm else None
        found["warm_hit_rate"] = round(len(warm) / (len(warm) + len(missed)), 3)
        found["warm_pool"] = 16
        return found


async def _without_warm(server: Server, samples: int, scale: float) -> dict[str, Any]:
    async with await _register(server) as shoal:
        _, cold = await measures.create_ms(shoal, samples, pace_s=0.0)
        found: dict[str, Any] = {"create_cold_ms": summary(cold)}
        found["create_per_s"] = round(await measures.create_per_s(shoal, 30 * scale, 8), 2)
        found["idle_pss_mib"] = round(await measures.idle_pss_mib(shoal, server.home, int(100 * scale)), 2)
        return found


def _table(results: dict[str, Any]) -> Table:
    table = Table("figure", "p50", "p95", "floor p50", "wanted", title="Shoal's speed on this machine")
    floors = {
        "exec_ms": "floor_exec_ms",
        "create_cold_ms": "floor_create_ms",
        "create_warm_ms": "floor_create_ms",
    }
    for name, value in results.items():
        floor = results.get(floors.get(name, ""), {}).get("p50", "")
        if isinstance(value, dict) and "p50" in value:
            p95 = f"{value['p95']:.2f}" if "p95" in value else ""
            table.add_row(name, f"{value['p50']:.2f}", p95, f"{floor}", WANTED.get(name, ""))
        elif isinstance(value, int | float):
            table.add_row(name, str(value), "", "", WANTED.get(name, ""))
    return table


def main() -> None:
    """Measure everything; `--quick` takes a twentieth of the samples, for a look and not for a claim."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples: a look, not a claim")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    samples, scale = (50, 0.1) if options.quick else (1000, 1.0)
    results: dict[str, Any] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"kernel": platform.release(), "cores": len(os.sched_getaffinity(0))},
        "quick": options.quick,
        "floor_exec_ms": floor_exec(samples),
        "floor_create_ms": floor_create(samples),
        **import_ms(),
        **planning(),
    }
    with served(warm=16) as server:
        results |= uvloop.run(_with_warm(server, samples, scale))
    with served(warm=0) as server:
        results |= uvloop.run(_without_warm(server, samples, scale))
    results["floor_exec_ms_after"] = floor_exec(samples)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    console.print(_table(results))
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
