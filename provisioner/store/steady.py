"""A store that is asked again: what use cases hold instead of the bare adapter.

What passes by itself (`Conflict`, `Throttled`, `StoreUnavailable`) is repeated a few times; a transaction under one
token, so that one whose answer was lost is not applied twice. What is left then is UNAVAILABLE to the caller.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from provisioner.clock import Clock
from provisioner.store.port import (
    Conflict,
    Counted,
    Key,
    Op,
    Page,
    Store,
    Stored,
    StoreUnavailable,
    Throttled,
    TooLarge,
)
from provisioner.store.sizes import MAX_ITEM_BYTES
from shoal.contract.base import new_id
from shoal.contract.errors import ErrorCode, ShoalError

T = TypeVar("T")
_PASSING = (Conflict, Throttled, StoreUnavailable)
#: Seconds before each repetition, times a draw between a half and one.
_PAUSES_S = (0.01, 0.05, 0.2, 0.5)


class SteadyStore:
    """The `Store` port over another one; also raises `ShoalError` UNAVAILABLE and PAYLOAD_TOO_LARGE."""

    def __init__(self, store: Store, clock: Clock, chance: random.Random) -> None:
        self._store = store
        self._clock = clock
        self._chance = chance
        self._repeated = 0

    @property
    def counts(self) -> Mapping[str, float]:
        """Calls that were repeated here, and what the store below counts."""
        below = self._store.counts if isinstance(self._store, Counted) else {}
        return {**below, "repeated": below.get("repeated", 0) + self._repeated}

    async def get(self, key: Key) -> Stored | None:
        """As the port says."""
        return await self._steadily(lambda: self._store.get(key))

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        """As the port says."""
        return await self._steadily(lambda: self._store.get_many(keys))

    async def query(
        self, pk: str, *, prefix: str = "", after: str | None = None, limit: int = 100, reverse: bool = False
    ) -> Page:
        """As the port says."""
        return await self._steadily(
            lambda: self._store.query(pk, prefix=prefix, after=after, limit=limit, reverse=reverse)
        )

    async def query_all(self, pk: str, *, prefix: str = "") -> list[Stored]:
        """All items of a partition, page by page: for partitions that are small by nature."""
        found: list[Stored] = []
        after: str | None = None
        while True:
            page = await self.query(pk, prefix=prefix, after=after, limit=1000)
            found += page.items
            if page.after is None:
                return found
            after = page.after

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        """As the port says."""
        token = token or new_id("tx")
        try:
            await self._steadily(lambda: self._store.transact(ops, token=token))
        except TooLarge as error:
            raise ShoalError(
                ErrorCode.PAYLOAD_TOO_LARGE,
                "The request is too large to keep; send large content as files.",
                details={"limit_bytes": MAX_ITEM_BYTES},
            ) from error

    async def close(self) -> None:
        """As the port says."""
        await self._store.close()

    async def _steadily(self, call: Callable[[], Awaitable[T]]) -> T:
        for pause in _PAUSES_S:
            try:
                return await call()
            except _PASSING:
                self._repeated += 1
                await self._clock.sleep(pause * (0.5 + self._chance.random() / 2))
        try:
            return await call()
        except _PASSING as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, "The state store does not answer; try again.", retry_after_s=1.0
            ) from error
