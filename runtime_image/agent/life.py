"""What time does to sandboxes: they expire, idle out, are metered; the host keeps its disk free."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import structlog

from runtime_image.agent.clock import Clock
from runtime_image.agent.ending import Ender
from runtime_image.agent.incarnate import Incarnator
from runtime_image.agent.layer_store import LayerStore
from runtime_image.agent.service import SandboxService
from runtime_image.agent.warm import WarmPool
from shoal.contract.states import EndReason

_log = structlog.get_logger()

TICK_S = 0.5


class Life:
    """Looks at everything every half second."""

    def __init__(
        self,
        *,
        service: SandboxService,
        ender: Ender,
        incarnator: Incarnator,
        warm: WarmPool,
        layers: LayerStore,
        disk_path: Path,
        disk_floor_mib: int,
        usage_interval_s: float,
        clock: Clock,
    ) -> None:
        self._service = service
        self._ender = ender
        self._incarnator = incarnator
        self._warm = warm
        self._layers = layers
        self._disk_path = disk_path
        self._disk_floor_mib = disk_floor_mib
        self._usage_interval_s = usage_interval_s
        self._clock = clock

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
                await self._free_disk()
            except Exception:  # noqa: BLE001 - a loop's top: logged, and tried again at the next tick
                _log.exception("life.tick_failed")

    def tick(self) -> None:
        """End what is due, meter what is due, start what is missing."""
        now = self._clock.now()
        for hosted in self._service.live():
            if hosted.state not in ("running", "paused"):
                continue
            if hosted.spec.expires_at <= now:
                self._service.end(hosted, EndReason.TTL, None)
                continue
            idle_limit = hosted.spec.idle_timeout_s
            if idle_limit is not None and hosted.idle_s >= idle_limit and not hosted.frozen_by:
                self._service.end(hosted, EndReason.IDLE, f"nothing was done for {idle_limit} s")
                continue
            if (now - hosted.meter.start).total_seconds() >= self._usage_interval_s:
                self._ender.cut(hosted)
                self._incarnator.keep(hosted)
            kills = self._ender.oom_kills(hosted)
            if kills != hosted.oom_kills:
                hosted.oom_kills = kills
            self._service.tell_limits(hosted)
            if hosted.actions is not None:
                hosted.actions.sweep_groups()
        self._warm.tend()

    async def _free_disk(self) -> None:
        """Evict layers that nobody uses while the disk is short."""
        usage = shutil.disk_usage(self._disk_path)
        if usage.free >> 20 >= 2 * self._disk_floor_mib:
            return
        cache = self._layers.cache
        held = sum(layer.bytes for layer in cache.contents())
        wanted = max(0, held - ((2 * self._disk_floor_mib << 20) - usage.free))
        gone = await asyncio.to_thread(cache.evict, wanted)
        if gone:
            self._layers.changed()
            _log.info("layers.evicted", count=len(gone))
