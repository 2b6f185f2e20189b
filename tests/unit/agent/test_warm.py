"""The warm pool: levels kept, one use each, never in the way of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime_image.agent.warm import WARM_MEMORY_MIB
from shoal.contract.host import WarmKey, WarmOrder
from shoal.contract.sessions import Resources
from shoal.contract.states import EndReason, Substrate
from tests.unit.agent.conftest import SMALL, SOURCE, Host

KEY = WarmKey(digest=SOURCE.digest, substrate=Substrate.CONTAINER, disk_mib=256)


def _order(count: int) -> list[WarmOrder]:
    return [WarmOrder(key=KEY, source=SOURCE, count=count)]


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():
            await asyncio.sleep(0)


def _ready(host: Host) -> int:
    return sum(report.ready for report in host.warm.report())


async def test_claims_take_each_once_and_the_level_comes_back(host: Host) -> None:
    """The claimed sandbox is the very one that was warm, with the session's limits on it."""
    host.warm.set_orders(_order(2))
    await _until(lambda: _ready(host) == 2)
    warm = set(host.runtime.living)
    first = await host.start("ses_1")
    assert first.sandbox_id in warm
    await _until(lambda: _ready(host) == 2)
    second = await host.start("ses_2")
    assert second.sandbox_id != first.sandbox_id
    assert first.status().warm
    assert host.runtime.limits[first.sandbox_id].memory_mib == SMALL.memory_mib
    await _until(lambda: _ready(host) == 2)
    assert host.runtime.started == 4
    assert (host.warm.hits, host.warm.misses) == (2, 0)


async def test_a_dead_one_is_never_handed_over(host: Host) -> None:
    """Closed or silent: counted, removed, and the next is taken, or a cold start made."""
    host.warm.set_orders(_order(2))
    await _until(lambda: _ready(host) == 2)
    dead = set(host.runtime.living)
    host.links[0].close()
    host.links[1].deaf = True
    hosted = await host.start()
    assert hosted.state == "running"
    assert hosted.sandbox_id not in dead
    assert host.warm.dead == 2
    await _until(lambda: not dead & set(host.runtime.living))


async def test_levels_fall(host: Host) -> None:
    """A key that is not named any more is drained; pinned layers are let go."""
    host.warm.set_orders(_order(2))
    await _until(lambda: _ready(host) == 2)
    host.warm.set_orders([])
    await _until(lambda: not host.runtime.living)
    assert host.warm.report() == []
    assert host.layers.held == 0


async def test_sessions_come_first(host: Host) -> None:
    """Full of warm ones, the host still takes sessions that cannot use them; the pool takes what is left, no more."""
    host.warm.set_orders(_order(4))
    await _until(lambda: _ready(host) == 4)
    other = Resources(cpu_millis=100, memory_mib=64, disk_mib=256, pids=32, shm_mib=16)
    boxes = [await host.start(f"ses_{n}", resources=other) for n in range(3)]
    assert all(box.state == "running" and not box.warm for box in boxes)
    await _until(lambda: len(host.runtime.living) == 4)
    host.clock.advance(100)
    host.warm.tend()
    assert host.service.reserved().sandboxes == 4
    assert host.warm.evicted == 3
    host.service.end(boxes[0], EndReason.DELETED)
    await host.ended(boxes[0])
    await _until(lambda: _ready(host) == 2)


async def test_a_refill_waits_for_claims(host: Host) -> None:
    """While a session starts cold nothing warm is begun."""
    host.runtime.gate = asyncio.Event()
    hosted = await host.service.start(host.spec())
    await asyncio.sleep(0)
    host.warm.set_orders(_order(1))
    await asyncio.sleep(0)
    assert host.warm.report()[0].starting == 0
    host.runtime.gate.set()
    await _until(lambda: hosted.state == "running")
    host.warm.tend()
    await _until(lambda: _ready(host) == 1)


async def test_starts_that_fail_are_told_and_tried_again_later(host: Host) -> None:
    """With growing pauses; the error stands in the report until one works."""
    host.runtime.fail_starts = 2
    host.warm.set_orders(_order(1))
    await _until(lambda: host.warm.report()[0].error is not None)
    host.warm.tend()
    assert host.warm.report()[0].starting == 0
    for _ in range(2):
        host.clock.advance(10)
        host.warm.tend()
        await _until(lambda: host.warm.report()[0].starting == 0)
    assert (_ready(host), host.warm.report()[0].error) == (1, None)


async def test_warm_ones_are_reserved(host: Host) -> None:
    """They count with what they hold."""
    host.warm.set_orders(_order(2))
    await _until(lambda: _ready(host) == 2)
    reserved = host.service.reserved()
    assert (reserved.sandboxes, reserved.memory_mib, reserved.disk_mib) == (2, 2 * WARM_MEMORY_MIB, 512)
