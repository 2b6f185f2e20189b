"""A store that is asked again: what use cases hold instead of the bare adapter.

What passes by itself (`Conflict`, `Throttled`, `StoreUnavailable`) is repeated a few times; a transaction under one
token, so that one whose answer was lost is not applied twice. What is left then is UNAVAILABLE to the caller.

A conflict is repeated more often and at more scattered moments than the rest: it wrote nothing, is over in
milliseconds, and many that meet at one item have to find a moment each.
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
#: Seconds before each repetition after a conflict, times a draw between 0 and 1: about two seconds in all.
_CONFLICT_PAUSES_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8)


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

    @property
    def bare(self) -> Store:
        """The store below, for what is better not done than done late: one try, and the port's own errors."""
        return self._store

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
        pauses, conflict_pauses = iter(_PAUSES_S), iter(_CONFLICT_PAUSES_S)
        while True:
            try:
                return await call()
            except _PASSING as error:
                if isinstance(error, Conflict):
                    pause = next(conflict_pauses, None)
                    least = 0.0
                else:
                    pause = next(pauses, None)
                    least = 0.5
                if pause is None:
                    raise ShoalError(
                        ErrorCode.UNAVAILABLE,
                        "The state store does not answer; try again.",
                        retry_after_s=1.0,
                    ) from error
            self._repeated += 1
            await self._clock.sleep(pause * (least + self._chance.random() * (1 - least)))
