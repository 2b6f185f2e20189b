"""Hosts in memory, scriptable: fail the n-th call, lose its answer, or let an instance die."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from provisioner.capacity.port import CapacityError, CapacityUnavailable, HostStart, Instance, NoMoreHosts
from provisioner.clock import Clock


class FakeCapacity:
    """The `Capacity` port in memory. `starts` is every host asked for, `limit` how many there may be at once."""

    def __init__(self, clock: Clock, *, limit: int | None = None) -> None:
        self._clock = clock
        self.limit = limit
        self.starts: list[HostStart] = []
        self.stopped: list[str] = []
        self.calls: list[str] = []
        self._instances: dict[str, Instance] = {}
        self._script: dict[int, tuple[CapacityError, bool]] = {}

    def fail_call(self, number: int, error: CapacityError | None = None, *, after: bool = False) -> None:
        """Let the call of this number (from now: 1 is the next) fail, before or after its effect."""
        self._script[len(self.calls) + number] = (error or CapacityUnavailable("scripted"), after)

    def kill(self, instance: str, detail: str = "killed") -> None:
        """Let an instance die."""
        self._instances[instance] = replace(self._instances[instance], alive=False, detail=detail)

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """As the port says."""
        lost = await self._begin("start")
        found: list[Instance] = []
        for start in starts:
            name = f"i-{start.host}"
            if name not in self._instances:
                if self.limit is not None and len(self._instances) >= self.limit:
                    raise NoMoreHosts("the limit is reached")
                self.starts.append(start)
                self._instances[name] = Instance(
                    id=name, host=start.host, pool=start.pool, alive=True, started_at=self._clock.now()
                )
            found.append(self._instances[name])
        self._end(lost)
        return found

    async def stop(self, instances: Sequence[str]) -> None:
        """As the port says."""
        lost = await self._begin("stop")
        for name in instances:
            if self._instances.pop(name, None) is not None:
                self.stopped.append(name)
        self._end(lost)

    async def instances(self) -> list[Instance]:
        """As the port says."""
        lost = await self._begin("instances")
        self._end(lost)
        return list(self._instances.values())

    async def close(self) -> None:
        """As the port says."""

    async def _begin(self, call: str) -> CapacityError | None:
        await asyncio.sleep(0)
        self.calls.append(call)
        error, after = self._script.get(len(self.calls), (None, False))
        if error is not None and not after:
            raise error
        return error

    @staticmethod
    def _end(lost: CapacityError | None) -> None:
        if lost is not None:
            raise lost
