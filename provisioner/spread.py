"""Lists that are spread over partitions: over how many, and how they are read as one.

An entry's shard follows from the id of what it names and from the number of shards when that was made, which its record
keeps; so it is written and taken away without a look. How many shards there are is written down and only grows, and it
is there before the first entry of a new shard is. So whoever reads the number, then the shards, misses nothing that
was there when he began.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from provisioner import keys
from provisioner.clock import Clock
from provisioner.store.port import Absent, ConditionFailed, Page, Stored, Update, VersionIs
from provisioner.store.steady import SteadyStore
from shoal.contract.base import TenantId

#: A tenant's items are spread over one shard, and over twice as many each time its shards were given so much more.
SESSIONS_PER_SHARD = 32
#: Seconds for which a number of shards serves a writer; an old one is smaller, and as good.
_KNOWN_S = 10.0
#: The fewest entries that one shard is asked for.
_LEAST = 10


def shards_of(book: Stored | None, more: int = 0) -> int:
    """Over how many shards a tenant's quota is spread: a power of two, from how many sessions' worth was ever given;
    `more`: once that is given, too."""
    peak = (int(book.item.get("peak") or 0) if book is not None else 0) + more
    shards = 1
    while shards < keys.QUOTA_SHARDS and peak >= 2 * shards * SESSIONS_PER_SHARD:
        shards *= 2
    return shards


def list_shards(shards: int) -> int:
    """Over how many shards the lists of a tenant are spread whose quota is over so many."""
    return min(shards, keys.LIST_SHARDS)


async def lists_of(store: SteadyStore, tenant: TenantId) -> int:
    """Over how many shards a tenant's lists are spread now."""
    return list_shards(shards_of(await store.get(keys.book(tenant))))


async def page(
    store: SteadyStore,
    pks: Sequence[str],
    *,
    after: str | None = None,
    limit: int = 100,
    reverse: bool = False,
) -> Page:
    """As `Store.query`, of several partitions whose sort keys are in one order and differ from each other."""
    if len(pks) == 1:
        return await store.query(pks[0], after=after, limit=limit, reverse=reverse)
    size = min(limit, max(_LEAST, 2 * limit // len(pks)))
    waiting: list[deque[Stored]] = [deque() for _ in pks]
    rest: list[str | None] = [after] * len(pks)
    empty = list(range(len(pks)))
    taken: list[Stored] = []
    while True:
        parts = await asyncio.gather(
            *(store.query(pks[shard], after=rest[shard], limit=size, reverse=reverse) for shard in empty)
        )
        for shard, part in zip(empty, parts, strict=True):
            waiting[shard].extend(part.items)
            rest[shard] = part.after
        empty = []
        while not empty:
            heads = [(shard[0].key.sk, number) for number, shard in enumerate(waiting) if shard]
            if not heads:
                return Page(items=tuple(taken), after=None)
            if len(taken) == limit:
                return Page(items=tuple(taken), after=taken[-1].key.sk)
            first = max(heads)[1] if reverse else min(heads)[1]
            taken.append(waiting[first].popleft())
            if not waiting[first] and rest[first] is not None:
                # What comes next of this shard may be before the others' heads.
                empty.append(first)


async def everything(store: SteadyStore, pks: Sequence[str]) -> list[Stored]:
    """All items of some partitions, in the order of their sort keys."""
    parts = await asyncio.gather(*(store.query_all(pk) for pk in pks))
    return sorted((item for part in parts for item in part), key=lambda item: item.key.sk)


async def queue(store: SteadyStore, pool: str) -> list[Stored]:
    """Who waits in a pool, the oldest first."""
    shards = _recorded(await store.get(keys.queue_spread(pool)))
    return await everything(store, keys.partitions(keys.queue_list(pool), shards))


class QueueSpread:
    """Over how many shards this replica spreads the queues' new entries."""

    def __init__(self, store: SteadyStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, tuple[float, int]] = {}

    async def at_least(self, pool: str, shards: int) -> int:
        """The number of shards of a pool's queue, made so many if there are fewer."""
        shards = min(shards, keys.LIST_SHARDS)
        now = self._clock.monotonic()
        until, known = self._known.get(pool, (now, 0))
        if known < shards or until <= now:
            known = await self._raise(pool, shards)
            self._known[pool] = (now + _KNOWN_S, known)
        return known

    async def _raise(self, pool: str, shards: int) -> int:
        key = keys.queue_spread(pool)
        stored = await self._store.get(key)
        while _recorded(stored) < shards:
            condition = VersionIs(version=stored.version) if stored else Absent()
            try:
                await self._store.transact([Update(key=key, set={"shards": shards}, conditions=(condition,))])
            except ConditionFailed:
                stored = await self._store.get(key)
            else:
                return shards
        return _recorded(stored)


def _recorded(stored: Stored | None) -> int:
    return int(stored.item["shards"]) if stored is not None else 1
