"""Capacity put together: each pool its own driver, none at all, or frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from provisioner.capacity.port import (
    Capacity,
    CapacityError,
    CapacityUnavailable,
    HostStart,
    Instance,
    NoMoreHosts,
    Settles,
)
from shoal.contract.base import HostId


class ByPool:
    """The `Capacity` port over the drivers of the pools; several pools may share one. Drivers answer for what is
    theirs and ignore other names."""

    def __init__(self, drivers: Mapping[str, Capacity]) -> None:
        self._by_pool = dict(drivers)
        self._drivers = list({id(driver): driver for driver in drivers.values()}.values())

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """As the port says. Every driver is asked, whatever another one raises; the first error is raised then, of
        NoMoreHosts all hosts refused."""
        found: dict[HostId, Instance] = {}
        errors: list[CapacityError] = []
        refused: set[HostId] = set()
        for driver in self._drivers:
            theirs = [start for start in starts if self._by_pool.get(start.pool) is driver]
            if not theirs:
                continue
            try:
                found |= {instance.host: instance for instance in await driver.start(theirs)}
            except NoMoreHosts as error:
                errors.append(error)
                refused |= {start.host for start in theirs} if error.refused is None else error.refused
            except CapacityUnavailable as error:
                errors.append(error)
        strangers = [start for start in starts if start.pool not in self._by_pool]
        if strangers:
            errors.append(NoMoreHosts(f"Pool {strangers[0].pool} has no driver here."))
            refused |= {start.host for start in strangers}
        for each in errors:
            if isinstance(each, NoMoreHosts):
                raise NoMoreHosts(each.reason, refused=refused) from each
        for each in errors:
            raise each
        return [found[start.host] for start in starts if start.host in found]

    async def stop(self, instances: Sequence[str]) -> None:
        """As the port says."""
        await self._each(*(driver.stop(instances) for driver in self._drivers))

    async def instances(self) -> list[Instance]:
        """As the port says."""
        found = await asyncio.gather(*(driver.instances() for driver in self._drivers))
        return [instance for some in found for instance in some]

    async def settle(self, coming: Collection[HostId]) -> None:
        """As the port says."""
        await self._each(*(driver.settle(coming) for driver in self._drivers if isinstance(driver, Settles)))

    async def close(self) -> None:
        """As the port says."""
        await self._each(*(driver.close() for driver in self._drivers))

    async def _each(self, *work: object) -> None:
        """Do all, then raise the first error."""
        results = await asyncio.gather(*work, return_exceptions=True)  # type: ignore[call-overload]
        for result in results:
            if isinstance(result, BaseException):
                raise result


class NoCapacity:
    """The `Capacity` port of a process that starts no host (API, router): another one does."""

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """As the port says.

        Raises:
            NoMoreHosts: Always.
        """
        raise NoMoreHosts("This process starts no hosts.")

    async def stop(self, instances: Sequence[str]) -> None:
        """Does nothing."""

    async def instances(self) -> list[Instance]:
        """None."""
        return []

    async def close(self) -> None:
        """Does nothing."""


class FrozenCapacity:
    """Another driver that starts nothing any more: spending is switched off, what runs may end."""

    def __init__(self, inner: Capacity) -> None:
        self._inner = inner

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """Those that are there already.

        Raises:
            NoMoreHosts: There are others among them.
        """
        there = {instance.host: instance for instance in await self._inner.instances()}
        if any(start.host not in there for start in starts):
            raise NoMoreHosts("Execution is switched off for this deployment (execution_enabled).")
        return [there[start.host] for start in starts]

    async def stop(self, instances: Sequence[str]) -> None:
        """As the port says."""
        await self._inner.stop(instances)

    async def instances(self) -> list[Instance]:
        """As the port says."""
        return await self._inner.instances()

    async def settle(self, coming: Collection[HostId]) -> None:
        """As the port says; nothing is to come."""
        if isinstance(self._inner, Settles):
            await self._inner.settle(())

    async def close(self) -> None:
        """As the port says."""
        await self._inner.close()
