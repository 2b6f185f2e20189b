"""Hosts in memory, scriptable: fail the n-th call, lose its answer, or let an instance die."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from provisioner.capacity.port import CapacityError, CapacityUnavailable, HostStart, Instance, NoMoreHosts
from provisioner.clock import Clock
from provisioner.scripted import Scripted
from shoal.contract.base import HostId


class FakeCapacity(Scripted[CapacityError]):
    """The `Capacity` port in memory.

    Attributes:
        starts: Every host that came.
        limit: How many there may be at once; None is no limit.
        at_once: How many come of one `start`, the rest being on order; None is all.
        settled: What `settle` was told last.
    """

    def __init__(self, clock: Clock, *, limit: int | None = None, at_once: int | None = None) -> None:
        super().__init__()
        self._clock = clock
        self.limit = limit
        self.at_once = at_once
        self.settled: frozenset[HostId] | None = None
        self.starts: list[HostStart] = []
        self.stopped: list[str] = []
        self._instances: dict[str, Instance] = {}

    def _usual_error(self, *, after: bool) -> CapacityError:
        return CapacityUnavailable("scripted")

    def kill(self, instance: str, detail: str = "killed") -> None:
        """Let an instance die."""
        self._instances[instance] = replace(self._instances[instance], alive=False, detail=detail)

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """As the port says."""
        lost = await self._begin("start")
        found: list[Instance] = []
        came = 0
        for start in starts:
            name = f"i-{start.host}"
            if name not in self._instances:
                if came == self.at_once:
                    continue
                came += 1
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

    async def settle(self, coming: Collection[HostId]) -> None:
        """As the port says; there is nothing to give back here."""
        lost = await self._begin("settle")
        self.settled = frozenset(coming)
        self._end(lost)

    async def close(self) -> None:
        """As the port says."""
