"""Which digest an image is for a run: the one that the run first resolved, whatever becomes of the tag."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta

from provisioner import keys
from provisioner.clock import Clock
from provisioner.manifests import Resolved, Sources
from provisioner.model import Source
from provisioner.store.port import Absent, ConditionFailed, Item, Key, Put
from provisioner.store.steady import SteadyStore
from shoal.contract.base import SnapshotId, TenantId
from shoal.contract.sessions import ResourcesAsked

#: Much longer than sessions live (at most 14 days): a run that goes on over it resolves its images anew.
_KEEP = timedelta(days=90)
_CACHE_SIZE = 4096


class Pins:
    """Resolves what sessions start from, for their run. Pins never change, so they are remembered."""

    def __init__(self, store: SteadyStore, sources: Sources, clock: Clock) -> None:
        self._store = store
        self._sources = sources
        self._clock = clock
        self._known: OrderedDict[Key, Resolved] = OrderedDict()

    async def resolve(
        self, tenant: TenantId, run: str | None, image: str | None, snapshot: SnapshotId | None
    ) -> Resolved:
        """What `name:tag` or a snapshot's id stands for in this run (None: in no run, as it is now).

        Raises:
            ShoalError: As `Sources.resolve`.
        """
        if run is None or image is None:
            return await self._sources.resolve(tenant, image, snapshot)
        key = keys.pin(tenant, run, image)
        known = self._known.get(key)
        if known is None:
            stored = await self._store.get(key)
            known = _pinned(image, stored.item) if stored else await self._pin(key, tenant, image)
            self._known[key] = known
            if len(self._known) > _CACHE_SIZE:
                self._known.popitem(last=False)
        return known

    async def _pin(self, key: Key, tenant: TenantId, image: str) -> Resolved:
        found = await self._sources.resolve(tenant, image, None)
        item: Item = {
            "digest": found.source.digest,
            "resources": found.resources.model_dump(mode="json", exclude_none=True),
        }
        put = Put(key=key, item=item, conditions=(Absent(),), expires_at=self._clock.now() + _KEEP)
        try:
            await self._store.transact([put])
        except ConditionFailed as error:
            # Another session of the run was first.
            if error.current is not None:
                return _pinned(image, error.current.item)
        return found


def _pinned(image: str, item: Item) -> Resolved:
    digest = item["digest"]
    return Resolved(
        source=Source(digest=digest, image_digest=digest, image=image),
        resources=ResourcesAsked.model_validate(item["resources"]),
    )
