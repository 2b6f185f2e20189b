"""What a call costs in DynamoDB's request units: pure functions of sizes, and a store that counts what it is asked.

One read unit reads 4 KB consistently; one write unit writes 1 KB. A transaction costs twice that for every operation,
a `Check` included; a failed one as much as one that succeeded. Sources: "Read and write operations" and "Transactions"
of DynamoDB's developer guide, read 2026-11; that a check is billed as a write and a repeat under a known token as a
read was measured by others against DynamoDB (martinhicks.dev, read 2026-11).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from provisioner.store.port import (
    Check,
    ConditionFailed,
    Delete,
    Key,
    Op,
    Page,
    Put,
    Store,
    Stored,
    Update,
)
from provisioner.store.rules import updated
from provisioner.store.sizes import item_bytes

READ_UNIT_BYTES = 4096
WRITE_UNIT_BYTES = 1024


def read_units(size_bytes: int, *, consistent: bool = True, transactional: bool = False) -> float:
    """Units of reading one item (0 bytes when it is missing: that costs as much as the smallest)."""
    units = max(1, -(-size_bytes // READ_UNIT_BYTES))
    if transactional:
        return 2.0 * units
    return float(units) if consistent else units / 2


def query_units(sizes_bytes: Iterable[int], *, consistent: bool = True) -> float:
    """Units of one page of a query: the items' sizes are summed before they are rounded up."""
    return read_units(sum(sizes_bytes), consistent=consistent)


def write_units(size_bytes: int, *, transactional: bool = True) -> float:
    """Units of one operation on an item: of its size before or after, whichever is larger."""
    units = max(1, -(-size_bytes // WRITE_UNIT_BYTES))
    return 2.0 * units if transactional else float(units)


def stored_bytes(stored: Stored | None) -> int:
    """The size of an item as it was read; 0 when there is none."""
    if stored is None:
        return 0
    return item_bytes(stored.key.pk, stored.key.sk, stored.item, expires=stored.expires_at is not None)


def op_units(op: Op, before: Stored | None, *, transactional: bool = True) -> float:
    """Units of one operation of a transaction, given the item before it."""
    size = stored_bytes(before)
    match op:
        case Put():
            after = item_bytes(op.key.pk, op.key.sk, op.item, expires=op.expires_at is not None)
            size = max(size, after)
        case Update():
            expires = op.expires_at is not None or (before is not None and before.expires_at is not None)
            size = max(size, item_bytes(op.key.pk, op.key.sk, updated(op, before), expires=expires))
        case Delete() | Check():
            pass
    return write_units(size, transactional=transactional)


@dataclass(kw_only=True)
class Consumed:
    """What was consumed.

    Attributes:
        read, write: Units.
        calls: API calls, by what they are called.
        writes_by_partition, reads_by_partition: Units by partition key: what one partition has to bear.
    """

    read: float = 0.0
    write: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    writes_by_partition: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reads_by_partition: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class MeteredStore:
    """The `Store` port over another one (of any kind), counting what the calls would cost on DynamoDB.

    For tests and simulations: it reads what is about to be written. `consumed` may be replaced at any time to begin
    anew.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.consumed = Consumed()

    async def get(self, key: Key) -> Stored | None:
        """As the port says."""
        stored = await self._store.get(key)
        self._read("get", key.pk, read_units(stored_bytes(stored)))
        return stored

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        """As the port says."""
        found = await self._store.get_many(keys)
        self.consumed.calls["get_many"] += -(-len(keys) // 100)
        for key, stored in dict(zip(keys, found, strict=True)).items():
            self._read("", key.pk, read_units(stored_bytes(stored)))
        return found

    async def query(
        self, pk: str, *, prefix: str = "", after: str | None = None, limit: int = 100, reverse: bool = False
    ) -> Page:
        """As the port says."""
        page = await self._store.query(pk, prefix=prefix, after=after, limit=limit, reverse=reverse)
        self._read("query", pk, query_units(stored_bytes(each) for each in page.items))
        return page

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        """As the port says."""
        before = await self._store.get_many([op.key for op in ops])
        try:
            await self._store.transact(ops, token=token)
        except ConditionFailed:
            self._write(ops, before)
            raise
        self._write(ops, before)

    async def close(self) -> None:
        """As the port says."""
        await self._store.close()

    def _read(self, call: str, pk: str, units: float) -> None:
        if call:
            self.consumed.calls[call] += 1
        self.consumed.read += units
        self.consumed.reads_by_partition[pk] += units

    def _write(self, ops: Sequence[Op], before: Sequence[Stored | None]) -> None:
        self.consumed.calls["transact"] += 1
        for op, stored in zip(ops, before, strict=True):
            units = op_units(op, stored)
            self.consumed.write += units
            self.consumed.writes_by_partition[op.key.pk] += units
