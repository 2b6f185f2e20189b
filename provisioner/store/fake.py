"""The store in memory, scriptable: fail the n-th call, or lose its response after it was applied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType

from provisioner.scripted import Scripted
from provisioner.store.port import (
    Check,
    ConditionFailed,
    Delete,
    Item,
    Key,
    Op,
    Page,
    Put,
    Stored,
    StoreError,
    StoreUnavailable,
    TokenReused,
    Update,
    Value,
)
from provisioner.store.rules import (
    check_ops,
    check_query,
    check_sizes,
    decode,
    encode,
    failed,
    fingerprint,
    next_version,
    updated,
    whole_seconds,
)


class FakeStore(Scripted[StoreError]):
    """The `Store` port in memory.

    `clock` is only used for how long tokens are known.
    """

    def __init__(self, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        super().__init__()
        self._clock = clock
        self._items: dict[str, dict[str, tuple[int, str, datetime | None]]] = {}
        self._tokens: dict[str, tuple[str, datetime]] = {}
        self._fresh = itertools.count(1 << 40)
        self._closed = False

    async def __aenter__(self) -> FakeStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _usual_error(self, *, after: bool) -> StoreError:
        return StoreUnavailable("scripted")

    async def get(self, key: Key) -> Stored | None:
        """As the port says."""
        lost = await self._begin(f"get {key.pk} {key.sk}")
        self._end(lost)
        return self._read(key)

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        """As the port says."""
        lost = await self._begin(f"get_many {len(keys)}")
        self._end(lost)
        return [self._read(key) for key in keys]

    async def query(
        self, pk: str, *, prefix: str = "", after: str | None = None, limit: int = 100, reverse: bool = False
    ) -> Page:
        """As the port says."""
        check_query(pk, after, limit)
        lost = await self._begin(f"query {pk} {prefix}")
        self._end(lost)
        found = sorted((sk for sk in self._items.get(pk, {}) if sk.startswith(prefix)), reverse=reverse)
        if after is not None:
            found = [sk for sk in found if (sk < after if reverse else sk > after)]
        items = [self._read(Key(pk=pk, sk=sk)) for sk in found[:limit]]
        return Page(
            items=tuple(item for item in items if item is not None),
            after=found[limit - 1] if len(found) > limit else None,
        )

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        """As the port says."""
        check_ops(ops)
        lost = await self._begin("transact " + " ".join(f"{type(op).__name__}:{op.key.pk}" for op in ops))
        if token is not None:
            known = self._tokens.get(token)
            if known is not None:
                if known[0] != fingerprint(ops):
                    raise TokenReused(token)
                self._end(lost)
                return
        stored = [self._read(op.key) for op in ops]
        for index, (op, old) in enumerate(zip(ops, stored, strict=True)):
            if self._refuses(op, old):
                raise ConditionFailed(index, old)
        writes: list[tuple[Key, tuple[int, str, datetime | None] | None]] = []
        sized: list[tuple[Key, Item, str, bool]] = []
        for op, old in zip(ops, stored, strict=True):
            match op:
                case Put():
                    body, expires_at = encode(op.item), whole_seconds(op.expires_at)
                    sized.append((op.key, op.item, body, expires_at is not None))
                    writes.append((op.key, (next_version(op, old, next(self._fresh)), body, expires_at)))
                case Update():
                    item = updated(op, old)
                    body = encode(item)
                    expires_at = whole_seconds(op.expires_at) or (old.expires_at if old else None)
                    sized.append((op.key, item, body, expires_at is not None))
                    writes.append((op.key, (next_version(op, old, 0), body, expires_at)))
                case Delete():
                    writes.append((op.key, None))
                case Check():
                    pass
        check_sizes(sized)
        for key, write in writes:
            if write is None:
                self._items.get(key.pk, {}).pop(key.sk, None)
            else:
                self._items.setdefault(key.pk, {})[key.sk] = write
        if token is not None:
            self._tokens[token] = (fingerprint(ops), self._clock())
        self._end(lost)

    async def clean(self, now: datetime, *, limit: int = 1000) -> int:
        """Take away what expired before `now`; answers how many."""
        gone = [
            (pk, sk)
            for pk, items in self._items.items()
            for sk, (_, _, expires_at) in items.items()
            if expires_at is not None and expires_at < now
        ][:limit]
        for pk, sk in gone:
            del self._items[pk][sk]
        return len(gone)

    async def close(self) -> None:
        """As the port says."""
        self._closed = True

    def dump(self) -> dict[Key, dict[str, Value]]:
        """Everything there is, for a test to look at."""
        return {
            Key(pk=pk, sk=sk): decode(body)
            for pk, items in self._items.items()
            for sk, (_, body, _) in items.items()
        }

    def _refuses(self, op: Op, stored: Stored | None) -> bool:
        return failed(op, stored)

    def _read(self, key: Key) -> Stored | None:
        found = self._items.get(key.pk, {}).get(key.sk)
        if found is None:
            return None
        version, body, expires_at = found
        return Stored(key=key, item=decode(body), version=version, expires_at=expires_at)

    async def _begin(self, call: str) -> StoreError | None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        return await super()._begin(call)
