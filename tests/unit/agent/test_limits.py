"""Events of limits hit: told at once, told of every kind, and never a flood."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, cast

import pytest

from runtime_image.agent.fakes import MemoryStore
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.keeper import Keeper
from runtime_image.agent.life import Life
from runtime_image.agent.limits import WINDOW_S, LimitWatch, Told
from runtime_image.agent.sandboxes import LimitsHit
from shoal.contract.states import EndReason
from tests.unit.agent.conftest import SMALL, Host

KINDS = {
    "limit.memory": {"oom_kills": 2},
    "limit.pids": {"forks_refused": 2},
    "limit.disk": {"disk_full": True},
}


def _hits(oom_kills: int = 0, forks_refused: int = 0, *, disk_full: bool = False) -> LimitsHit:
    return LimitsHit(oom_kills=oom_kills, forks_refused=forks_refused, disk_full=disk_full)


def _life(host: Host) -> Life:
    return Life(
        service=host.service,
        ender=host.ender,
        incarnator=host.incarnator,
        warm=host.warm,
        layers=cast(Any, host.layers),
        disk_path=host.root,
        disk_floor_mib=0,
        usage_interval_s=60,
        clock=host.clock,
    )


def _told(host: Host) -> list[tuple[str, dict[str, object]]]:
    events = [one.event for one in host.events.head()]
    return [(event.kind, event.data) for event in events if event.kind.startswith("limit.")]


def _hit(host: Host, hosted: Hosted, hits: LimitsHit) -> None:
    host.runtime.hits[hosted.sandbox_id] = hits


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_is_told_at_the_next_tick(host: Host, kind: str) -> None:
    """With its session, its count and its limit; not before, and not again while nothing more happens."""
    hosted, life = await host.start(), _life(host)
    life.tick()
    assert _told(host) == []
    _hit(host, hosted, _hits(**cast(Any, KINDS[kind])))
    for _ in range(3):
        life.tick()
        host.clock.advance(WINDOW_S + 1)
    ((told, data),) = _told(host)
    facts: dict[str, dict[str, object]] = {
        "limit.memory": {"count": 2, "limit_mib": SMALL.memory_mib},
        "limit.pids": {"count": 2, "limit": SMALL.pids},
        "limit.disk": {"limit_mib": 256},
    }
    assert (told, data) == (kind, {"epoch": 1, **facts[kind]})


async def test_a_count_that_goes_on_rising_is_told_once_a_window(host: Host) -> None:
    """A fork bomb: ten minutes of refusals, 1,200 ticks, ten events, and no refusal untold."""
    hosted, life = await host.start(expires_at=host.clock.now().replace(year=2030)), _life(host)
    for n in range(1, 1201):
        _hit(host, hosted, _hits(forks_refused=1000 * n))
        life.tick()
        host.clock.advance(0.5)
    host.service.end(hosted, EndReason.DELETED)
    await host.ended(hosted)
    told = _told(host)
    # The last is told at the end, whatever the window.
    assert len(told) == 11
    assert sum(cast(int, data["count"]) for _, data in told) == 1_200_000


async def test_what_ends_a_sandbox_is_told_with_its_end(host: Host) -> None:
    """Killed for memory and gone before any tick looked: the limit is told before the end."""
    hosted = await host.start()
    _hit(host, hosted, _hits(oom_kills=1))
    host.service.end(hosted, EndReason.OOM)
    await host.ended(hosted)
    assert [one.event.kind for one in host.events.head()][-2:] == ["limit.memory", "sandbox.ended"]


def test_a_disk_is_told_again_when_it_was_emptied_and_filled() -> None:
    """Full, still full, emptied, full again: two events, and never two in one window."""
    watch = LimitWatch()

    def told(now: float, *, full: bool) -> int:
        return len(list(watch.look(_hits(disk_full=full), SMALL, 256, now)))

    assert [told(now, full=now % 2 == 0) for now in range(20)] == [1] + [0] * 19
    assert told(WINDOW_S + 1, full=False) == 0
    assert [told(WINDOW_S + 2 + now, full=True) for now in range(200)] == [1] + [0] * 199


async def test_what_was_told_is_known_to_the_next_agent(tmp_path: Path) -> None:
    """Kept where the sandbox is kept: a restart tells nothing twice and loses nothing that came meanwhile."""
    host = Host(tmp_path, store=MemoryStore())
    hosted = await host.start()
    ours, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host.store.put(hosted.sandbox_id, ours.fileno())
    _hit(host, hosted, _hits(oom_kills=3, forks_refused=5, disk_full=True))
    _life(host).tick()
    (kept,) = Keeper(host.store).load()
    assert kept.about.told == Told(memory=3, pids=5, disk=True)
    for sock in (kept.sock, ours, guest):
        sock.close()
    again = LimitWatch(told=kept.about.told)
    (hit,) = again.look(_hits(oom_kills=3, forks_refused=6, disk_full=True), SMALL, 256, 0.0)
    assert (hit.kind, hit.data["count"]) == ("limit.pids", 1)
    host.service.end(hosted, EndReason.DELETED)
    await host.ended(hosted)
