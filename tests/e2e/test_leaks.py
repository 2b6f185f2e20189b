"""What sandboxes take from a machine they give back: counted before, and after a great many of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from provisioner.settings import PoolSettings
from shoal.client import AsyncShoal
from tests.e2e.census import agent_pids, census
from tests.e2e.conftest import Server, a_server, register

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = {"memory_mib": 64, "disk_mib": 256, "pids": 32}
CYCLES = 1000
KILLS = 20
SETTLE_S = 90
#: What demand alone keeps warm at the most; reached before the first count.
WARM = PoolSettings().warm_max


async def _cycles(shoal: AsyncShoal, count: int, at_once: int = 4) -> None:
    left = iter(range(count))

    async def loop() -> None:
        for _ in left:
            async with shoal.session("minimal:1", resources=SMALL) as box:
                assert (await box.exec(["/bin/true"])).exit_code == 0

    await asyncio.gather(*(loop() for _ in range(at_once)))


async def _settled(shoal: AsyncShoal, home: Path, wanted: dict[str, int] | None = None) -> dict[str, int]:
    """The census once no session is left and it stays the same, or is what is wanted."""
    deadline = time.monotonic() + SETTLE_S
    before: dict[str, int] = {}
    while True:
        now = census(home)
        pool = await shoal.pools.get()
        quiet = pool.busy == 0 and pool.pending == 0 and pool.warm == WARM
        if quiet and (now == wanted if wanted is not None else now == before):
            return now
        if time.monotonic() > deadline:
            return now
        before = now
        await asyncio.sleep(1)


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    kinds = before.keys() | after.keys()
    return {
        kind: (before.get(kind, 0), after.get(kind, 0))
        for kind in kinds
        if before.get(kind, 0) != after.get(kind, 0)
    }


@pytest.fixture(scope="module")
def own_server():
    """A server for these tests alone, so that nothing else moves the counts."""
    with a_server("--warm", "2", "--idle-to-zero-s", "3600") as server:
        register(server, "minimal")
        yield server


async def test_a_thousand_sessions_leave_nothing(own_server: Server) -> None:
    """Processes, mounts, loop devices, cgroups, namespaces, descriptors, keys and files are as many as before."""
    async with own_server.async_shoal() as shoal:
        await _cycles(shoal, 200)
        before = await _settled(shoal, own_server.home)
        await _cycles(shoal, CYCLES)
        after = await _settled(shoal, own_server.home, before)
        assert _difference(before, after) == {}


async def test_an_agent_killed_again_and_again_leaves_nothing(own_server: Server) -> None:
    """Each new agent adopts what lives and cleans what nobody owns: the counts come back."""
    async with own_server.async_shoal() as shoal:
        await _cycles(shoal, 100)
        before = await _settled(shoal, own_server.home)
        for _ in range(KILLS):
            async with shoal.session("minimal:1", resources=SMALL) as box:
                assert (await box.exec("echo on")).stdout == "on\n"
                (pid,) = agent_pids(own_server.home)
                os.kill(pid, signal.SIGKILL)
                assert (await box.exec("echo still")).stdout == "still\n"
        after = await _settled(shoal, own_server.home, before)
        assert _difference(before, after) == {}
