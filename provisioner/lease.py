"""The reconciler's lease: of all that could reconcile, one does.

It is an item of the store that names its holder and a time; taking it is conditional on the version that was read, so
that of two one has it. The holder renews it while it works; `fence` lets its writes fail once another has taken over.
Clocks of holders may differ by far less than `LEASE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from provisioner import keys
from provisioner.clock import Clock
from provisioner.context import log
from provisioner.store.port import Absent, AttributeIs, Check, ConditionFailed, Put, Stored, VersionIs
from provisioner.store.steady import SteadyStore
from shoal.contract.errors import ShoalError

#: Seconds for which it holds without being renewed, and between renewals.
LEASE_S = 30.0
RENEW_S = 10.0


class Lease:
    """One holder's way to the lease, for one time of holding it.

    Attributes:
        owner: Another one for each holder and each time.
        lost: Whether it was ours, and could not be kept.
        fence: Operations for a transaction that must not be applied by whoever has lost the lease.
    """

    def __init__(self, store: SteadyStore, clock: Clock, owner: str) -> None:
        self._store = store
        self._clock = clock
        self.owner = owner
        self.lost = False
        self.fence = (Check(key=keys.LEASE, conditions=(AttributeIs(name="owner", value=owner),)),)

    async def take(self) -> bool:
        """Take it if nobody has it, or its holder let it run out; answers whether it is ours now.

        Raises:
            ShoalError: UNAVAILABLE.
        """
        stored = await self._store.get(keys.LEASE)
        if stored is not None and not self._is_ours(stored) and _until(stored) > self._clock.now():
            return False
        try:
            await self._put(stored)
        except ConditionFailed:
            return False
        return True

    async def release(self) -> None:
        """Give it up, if it is ours; the next one need not wait for its end.

        Raises:
            ShoalError: UNAVAILABLE.
        """
        stored = await self._store.get(keys.LEASE)
        if stored is None or not self._is_ours(stored):
            return
        try:
            await self._put(stored, owner="")
        except ConditionFailed:
            return

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Renew it while the block runs; `lost` says when that came to nothing. The block goes on then: what must not
        be done without the lease carries the fence."""
        keeper = asyncio.create_task(self._keep(), name="keep the lease")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _keep(self) -> None:
        renewed = self._clock.monotonic()
        while not self.lost:
            await self._clock.sleep(RENEW_S)
            try:
                stored = await self._store.get(keys.LEASE)
                self.lost = stored is None or not self._is_ours(stored)
                if not self.lost:
                    await self._put(stored)
                    renewed = self._clock.monotonic()
            except ShoalError:
                # It holds for another try or two; after them somebody else may have it.
                self.lost = self._clock.monotonic() - renewed + RENEW_S >= LEASE_S
            except ConditionFailed:
                self.lost = True
        log.warning("lease.lost", owner=self.owner)

    async def _put(self, stored: Stored | None, *, owner: str | None = None) -> None:
        owner = self.owner if owner is None else owner
        now = self._clock.now()
        until = now + timedelta(seconds=LEASE_S) if owner else now
        condition = VersionIs(version=stored.version) if stored else Absent()
        item = {"owner": owner, "until": until.isoformat()}
        await self._store.transact([Put(key=keys.LEASE, item=item, conditions=(condition,))])

    def _is_ours(self, stored: Stored) -> bool:
        return stored.item.get("owner") == self.owner


def _until(stored: Stored) -> datetime:
    return datetime.fromisoformat(str(stored.item["until"]))
