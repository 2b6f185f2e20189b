"""What this machine has, and how busy it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from runtime_image.agent.clock import Clock
from runtime_image.agent.settings import AgentSettings
from shoal.contract.host import Capacity, Load

_CPU_FIELDS_IDLE = (3, 4)


def memory_mib() -> tuple[int, int]:
    """(all, available), MiB."""
    found: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(rest.split()[0]) >> 10
    return found["MemTotal"], found["MemAvailable"]


def capacity(settings: AgentSettings) -> Capacity:
    """What may be reserved on this host: what there is or was set, the reserve off, times the overcommit."""
    cpu = settings.cpu_millis or len(os.sched_getaffinity(0)) * 1000
    memory = settings.memory_mib or max(256, memory_mib()[0] - settings.memory_reserve_mib)
    disk = settings.disk_mib or int(shutil.disk_usage(settings.home).free * 0.9) >> 20
    return Capacity(
        cpu_millis=int(cpu * settings.cpu_overcommit),
        memory_mib=int(memory * settings.memory_overcommit),
        disk_mib=int(disk * settings.disk_overcommit),
        sandboxes=settings.max_sandboxes,
    )


class LoadMeter:
    """How busy the machine was since it was last asked."""

    def __init__(self, disk_path: Path, clock: Clock) -> None:
        self._disk_path = disk_path
        self._clock = clock
        self._last = (_busy_ticks(), clock.monotonic())
        self._ticks_a_s = os.sysconf("SC_CLK_TCK")

    def read(self) -> Load:
        """The load now."""
        busy, at = _busy_ticks(), self._clock.monotonic()
        seconds = at - self._last[1]
        used = 0.0 if seconds <= 0 else (busy - self._last[0]) / self._ticks_a_s / seconds
        self._last = (busy, at)
        return Load(
            cpu_used_millis=max(0, round(used * 1000)),
            memory_available_mib=memory_mib()[1],
            disk_free_mib=shutil.disk_usage(self._disk_path).free >> 20,
        )


def _busy_ticks() -> int:
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    return sum(fields) - sum(fields[n] for n in _CPU_FIELDS_IDLE)
