"""A tenant's book and shards as read, and how they come under limits that have changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from provisioner import keys, quota
from provisioner.context import log
from provisioner.quota import DIMENSIONS, Amounts, Limits
from provisioner.spread import shards_of
from provisioner.store.port import (
    Absent,
    Add,
    AttributeIs,
    Check,
    Condition,
    Op,
    Stored,
    Update,
    VersionIs,
)
from provisioner.store.steady import SteadyStore
from shoal.contract.base import TenantId
from shoal.contract.errors import ErrorCode, ShoalError

T = TypeVar("T")
#: Shards that one transaction writes at the most, besides the book and the one that gets.
MANY = 80
#: Seconds that who is refused is told to wait.
RETRY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class State:
    """A tenant's limits and items as they are, with the shard of this number."""

    tenant: TenantId
    record: Stored | None
    limits: Limits
    book: Stored | None
    number: int
    shard: Stored | None

    @property
    def settled(self) -> bool:
        """Whether the book is kept under these limits."""
        return self.book is None or self.book.item["limits"] == self.limits.text

    def book_op(self, *, given: Amounts, ahead: int = 0) -> Update:
        """The book gives so much more (or takes it back, below zero); fails over the limits, or under other ones."""
        add = {
            name: Add(delta=amount, maximum=self.limits.of.get(name) if amount > 0 else None)
            for name, amount in given.items()
        }
        # Always some change, so that whoever counts the shards meanwhile sees that something was moved.
        add |= {"peak": Add(delta=ahead), "moves": Add(delta=1)}
        key = keys.book(self.tenant)
        if self.book is None:
            return Update(key=key, set={"limits": self.limits.text}, add=add, conditions=(Absent(),))
        same = AttributeIs(name="limits", value=self.book.item["limits"])
        return Update(key=key, add=add, conditions=(same,))

    def open_ops(self) -> list[Op]:
        """The shard is open again, as the book is settled."""
        assert self.book is not None
        same = AttributeIs(name="limits", value=self.book.item["limits"])
        return [
            Update(
                key=keys.quota(self.tenant, self.number),
                remove=("closed",),
                conditions=(AttributeIs(name="closed", value=True),),
            ),
            Check(key=keys.book(self.tenant), conditions=(same,)),
        ]

    def label_ops(self, condition: Condition, label: str) -> list[Op]:
        """The book is kept under these limits from now on, if they still are the tenant's."""
        unchanged = VersionIs(version=self.record.version) if self.record else Absent()
        final = not label.startswith("!")
        within = {name: Add(delta=0, maximum=limit) for name, limit in self.limits.of.items() if final}
        return [
            Update(
                key=keys.book(self.tenant),
                set={"limits": label},
                add={"moves": Add(delta=1)} | within,
                conditions=(condition,),
            ),
            Check(key=keys.tenant(self.tenant), conditions=(unchanged,)),
        ]


async def settle(store: SteadyStore, state: State, amounts: Amounts | None) -> None:
    """Bring the book under limits that have changed.

    Where more was given than the limits now are, all shards are closed first, so that nothing is taken while it is
    counted; they stay closed for as long as more is held than there may be.

    Raises:
        ConditionFailed: Another is at it; look again.
        ShoalError: QUOTA_EXCEEDED when `amounts` (None: nothing) do not fit in the new limits.
    """
    tenant, limits = state.tenant, state.limits
    assert state.book is not None
    before = str(state.book.item["limits"])
    pending = "!" + limits.text
    same = AttributeIs(name="limits", value=pending)
    if not before.startswith("!") and limits.hold(quota.held(state.book)):
        # As it was read: nothing was given since.
        await store.transact(state.label_ops(VersionIs(version=state.book.version), limits.text))
        return
    if before != pending:
        await store.transact(state.label_ops(AttributeIs(name="limits", value=before), pending))
    # Nothing is given from here on, so there are no more shards than the book says now.
    book = await store.get(keys.book(tenant))
    shards = await read_shards(store, tenant, book)
    still_open = [number for number, shard in enumerate(shards) if not quota.closed(shard)]
    if still_open:
        closing = [Update(key=keys.quota(tenant, number), set={"closed": True}) for number in still_open]
        still = Check(key=keys.book(tenant), conditions=(same,))
        for some in _parts(closing):
            await store.transact([*some, still])
        shards = await read_shards(store, tenant, book)
    held = sum_of(quota.held(shard) for shard in shards)
    wanted = {name: held[name] + (amounts[name] if amounts else 0) for name in DIMENSIONS}
    if not limits.hold(wanted):
        if amounts is None:
            return
        raise refused(limits, held)
    for numbers in _parts(list(range(len(shards)))):
        rooms = {number: quota.room(shards[number]) for number in numbers}
        back = sum_of(rooms.values())
        ops: list[Op] = [
            Update(
                key=keys.book(tenant),
                add={name: Add(delta=-amount) for name, amount in back.items()} | {"moves": Add(delta=1)},
                conditions=(same,),
            )
        ]
        for number, each in rooms.items():
            ops.append(
                Update(
                    key=keys.quota(tenant, number),
                    remove=("closed",),
                    add={f"room_{name}": Add(delta=-amount, minimum=0) for name, amount in each.items()},
                    conditions=(AttributeIs(name="closed", value=True),),
                )
            )
        await store.transact(ops)
    await store.transact(state.label_ops(same, limits.text))
    log.info("quota.settled", tenant=tenant, limits=limits.text)


def refused(limits: Limits, held: Amounts) -> ShoalError:
    """The quota is used up."""
    return ShoalError(
        ErrorCode.QUOTA_EXCEEDED,
        "The tenant is at its quota; end some sessions or wait for them to end.",
        retry_after_s=RETRY_S,
        details={"held": dict(held), "limit": {name: limits.of.get(name) for name in DIMENSIONS}},
    )


async def read_shards(store: SteadyStore, tenant: TenantId, book: Stored | None) -> list[Stored | None]:
    """All shards of a tenant; one that was given nothing yet is None."""
    return await store.get_many([keys.quota(tenant, shard) for shard in range(shards_of(book))])


def sum_of(amounts: Iterable[Amounts]) -> dict[str, int]:
    """All of them together."""
    total = dict.fromkeys(DIMENSIONS, 0)
    for each in amounts:
        for name in DIMENSIONS:
            total[name] += each[name]
    return total


def _parts(all_of_them: list[T]) -> list[list[T]]:
    return [all_of_them[start : start + MANY] for start in range(0, len(all_of_them), MANY)]
