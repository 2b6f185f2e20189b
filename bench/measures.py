"""What is measured through HTTP: control plane, agent and sandbox as a trainer meets them."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from bench.samples import quantile, summary
from shoal import AsyncShoal
from shoal.client import AsyncSession

IMAGE = "minimal:1.0.0"
TRUE = ["/bin/true"]
SMALL = {"cpu_millis": 1000, "memory_mib": 128, "disk_mib": 256, "pids": 64}


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """How long it took, in milliseconds."""
    begun = time.perf_counter()
    await work()
    return (time.perf_counter() - begun) * 1000


async def until_busy(shoal: AsyncShoal, count: int) -> None:
    """Wait until no more than `count` sessions hold a sandbox: what ended is torn down."""
    while (await shoal.pools.get()).busy > count:  # noqa: ASYNC110 - another process's state: there is no event
        await asyncio.sleep(0.05)


async def exec_ms(shoal: AsyncShoal, samples: int) -> dict[str, float]:
    """One session, one `true` after another."""
    async with shoal.session(IMAGE, resources=SMALL) as box:
        for _ in range(20):
            await box.exec(TRUE)
        return summary([await timed(lambda: box.exec(TRUE)) for _ in range(samples)])


async def exec_per_s(shoal: AsyncShoal, in_flight: int, total: int) -> float:
    """`in_flight` sessions, each with one exec in flight, until `total` are done."""
    async with await shoal.sessions(IMAGE, count=in_flight, resources=SMALL) as group:
        await group.exec(TRUE)
        left = iter(range(total))

        async def loop(box: AsyncSession) -> None:
            for _ in left:
                await box.exec(TRUE)

        begun = time.perf_counter()
        await asyncio.gather(*(loop(box) for box in group))
        return total / (time.perf_counter() - begun)


async def create_ms(shoal: AsyncShoal, samples: int, *, pace_s: float) -> tuple[list[float], list[float]]:
    """Create to first result, at most one every `pace_s`; warm ones and cold ones apart."""
    warm: list[float] = []
    cold: list[float] = []
    enders: list[asyncio.Task[None]] = []
    for _ in range(samples):
        begun = time.perf_counter()
        box = await shoal.session(IMAGE, resources=SMALL)
        await box.exec(TRUE)
        lasted = time.perf_counter() - begun
        (warm if box.info.warm else cold).append(lasted * 1000)
        enders.append(asyncio.create_task(box.delete()))
        await asyncio.sleep(max(0.0, pace_s - lasted))
    await asyncio.gather(*enders)
    return warm, cold


async def create_per_s(shoal: AsyncShoal, seconds: float, at_once: int) -> float:
    """Sessions created, used once and ended per second, teardown included."""
    until = time.perf_counter() + seconds
    made = 0

    async def loop() -> None:
        nonlocal made
        while time.perf_counter() < until:
            async with shoal.session(IMAGE, resources=SMALL) as box:
                await box.exec(TRUE)
            made += 1

    begun = time.perf_counter()
    await asyncio.gather(*(loop() for _ in range(at_once)))
    await until_busy(shoal, 0)
    return made / (time.perf_counter() - begun)


async def fork_s(shoal: AsyncShoal, count: int, rounds: int) -> float:
    """From a local snapshot to a result of each of `count` forks; the median of some rounds."""
    async with shoal.session(IMAGE, resources=SMALL) as box:
        await box.exec("mkdir -p /workspace && seq 1 100000 > /workspace/numbers")
        snapshot = await box.snapshot()
        durations = []
        for _ in range(rounds):
            begun = time.perf_counter()
            async with await shoal.sessions(snapshot=snapshot, count=count, resources=SMALL) as group:
                await group.exec(["/bin/true"])
                durations.append(time.perf_counter() - begun)
            await until_busy(shoal, 1)
    return quantile(durations, 0.5)


def _pss_kib(pid: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _pss_of(home: Path) -> int:
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        of_agent = str(home).encode() in command and b"runtime_image.agent" in command
        if of_agent or b"/.shoal/" in command:
            total += _pss_kib(process.name)
    return total


async def idle_pss_mib(shoal: AsyncShoal, home: Path, count: int) -> float:
    """Proportional memory of `count` idle sandboxes, the agent's and its holder's included, for each."""
    async with await shoal.sessions(IMAGE, count=count, resources=SMALL) as group:
        await group.exec(TRUE)
        await asyncio.sleep(2)
        return await asyncio.to_thread(_pss_of, home) / 1024 / count


async def file_mib_s(shoal: AsyncShoal, size_mib: int, rounds: int) -> tuple[float, float]:
    """One file in and out again, MiB a second; the median of some rounds."""
    data = os.urandom(1 << 20) * size_mib
    put, get = [], []
    resources = {**SMALL, "memory_mib": 512, "disk_mib": 1024}
    async with shoal.session(IMAGE, resources=resources) as box:
        for _ in range(rounds):
            put.append(size_mib * 1000 / await timed(lambda: box.upload(data, "/workspace/file")))
            sink = io.BytesIO()
            get.append(size_mib * 1000 / await timed(partial(box.download, "/workspace/file", sink)))
            assert sink.getbuffer() == data, "the file came back changed"
    return quantile(put, 0.5), quantile(get, 0.5)
