"""Who gives a tenant's quota to its shards: what a create does when its shard has too little.

A shard is given a little ahead of need by the book, and when the book has given all, it borrows from the other shards;
only when those together have too little is the create refused. `provisioner/quota.py` says what holds at all times.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from provisioner import keys, quota
from provisioner.context import Context, log
from provisioner.model import Tenant, load
from provisioner.quota import DIMENSIONS, Amounts, Limits
from provisioner.spread import SESSIONS_PER_SHARD, shards_of
from provisioner.store.port import Absent, Add, AttributeIs, ConditionFailed, Op, Stored, Update
from provisioner.store.steady import SteadyStore
from shoal.contract.base import TenantId
from shoal.contract.errors import ErrorCode, ShoalError

T = TypeVar("T")
#: For how many sessions like the one that asks a shard is given at the least. Half of `SESSIONS_PER_SHARD`, so that
#: opening shards does not by itself call for more shards.
_AHEAD = SESSIONS_PER_SHARD // 2
#: Seconds for which limits and the number of shards serve.
_KNOWN_S = 10.0
#: Shards that one transaction writes at the most, besides the book and the one that gets.
_MANY = 80
#: How often it is tried again when others were quicker.
_TRIES = 50


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What this replica knows of a tenant, and until when (monotonic) it goes by that."""

    limits: Limits
    shards: int
    until: float


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """A count of all shards that found too little: when it began, what was asked, what was held."""

    began: int
    amounts: Amounts
    held: Amounts


@dataclass(frozen=True, kw_only=True)
class _State:
    """A tenant's limits and items as they are."""

    tenant: TenantId
    limits: Limits
    book: Stored | None
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


async def held_by(store: SteadyStore, tenant: TenantId) -> dict[str, int]:
    """What a tenant's sessions hold of its quota: the sum of its shards."""
    shards = await _shards(store, tenant, await store.get(keys.book(tenant)))
    return _sum(quota.held(shard) for shard in shards)


class Grants:
    """Gives quota to shards; one for all creates of a replica."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[TenantId, _Known] = {}
        self._locks: dict[TenantId, asyncio.Lock] = {}
        self._short: Counter[TenantId] = Counter()
        self._refusals: dict[TenantId, _Refusal] = {}
        self._moments = itertools.count()

    async def shards(self, tenant: TenantId) -> int:
        """Over how many shards a tenant's quota is spread, as far as this replica knows: never more than there are."""
        known = self._known.get(tenant)
        if known is None or known.until <= self._context.clock.monotonic():
            state = await self._read(tenant, None)
            if not state.settled:
                await self._settle(state, None)
            known = self._known[tenant]
        return known.shards

    async def shard(self, tenant: TenantId, id: str) -> int:
        """The shard that a session takes its quota of."""
        return keys.shard_of(id, await self.shards(tenant))

    async def parts(self, tenant: TenantId, id: str, count: int) -> list[tuple[int, int]]:
        """Shards for a group of `count` sessions, and how many take of each."""
        shards = await self.shards(tenant)
        some = min(shards, -(-count // _AHEAD), _MANY)
        first = keys.shard_of(id, shards)
        each, more = divmod(count, some)
        return [((first + n) % shards, each + (n < more)) for n in range(some)]

    async def hot(self, tenant: TenantId) -> None:
        """Spread a tenant over twice as many shards: its partitions refuse writes."""
        state = await self._read(tenant, None)
        if state.book is not None and state.settled and shards_of(state.book) < keys.QUOTA_SHARDS:
            ahead = shards_of(state.book) * 2 * SESSIONS_PER_SHARD
            log.info("tenant.spread", tenant=tenant, shards=2 * shards_of(state.book))
            await self._context.store.transact([state.book_op(given={}, ahead=ahead)])
            await self._read(tenant, None)

    async def make_room(self, tenant: TenantId, shard: int, amounts: Amounts) -> None:
        """Give a shard so much room; it may be taken by others before the caller does.

        Raises:
            ShoalError: QUOTA_EXCEEDED when all shards together have too little; UNAVAILABLE when others were quicker
                again and again.
        """
        came = next(self._moments)
        self._short[tenant] += 1
        try:
            async with self._locks.setdefault(tenant, asyncio.Lock()):
                refusal = self._refusals.get(tenant)
                if refusal is not None and refusal.began > came and _covers(amounts, refusal.amounts):
                    # Counted since this call came: counting again would find the same.
                    raise self._refused(tenant, refusal.held)
                for _ in range(_TRIES):
                    if await self._try(tenant, shard, amounts):
                        return
        finally:
            self._short[tenant] -= 1
        raise ShoalError(
            ErrorCode.UNAVAILABLE, "The tenant's quota is much asked for; try again.", retry_after_s=0.5
        )

    async def _try(self, tenant: TenantId, shard: int, amounts: Amounts) -> bool:
        began = next(self._moments)
        state = await self._read(tenant, shard)
        try:
            if not state.settled:
                await self._settle(state, amounts)
                return False
            if not quota.closed(state.shard) and _covers(quota.room(state.shard), amounts):
                return True
            if await self._give(state, shard, amounts):
                return True
            return await self._borrow(state, shard, amounts, began)
        except ConditionFailed:
            return False

    async def _read(self, tenant: TenantId, shard: int | None) -> _State:
        """How things are; this replica goes by it from now on."""
        wanted = [keys.tenant(tenant), keys.book(tenant)]
        if shard is not None:
            wanted.append(keys.quota(tenant, shard))
        record, book, *found = await self._context.store.get_many(wanted)
        limits = Limits.read(load(Tenant, record.item) if record else None)
        self._known[tenant] = _Known(
            limits=limits, shards=shards_of(book), until=self._context.clock.monotonic() + _KNOWN_S
        )
        return _State(tenant=tenant, limits=limits, book=book, shard=found[0] if found else None)

    async def _give(self, state: _State, shard: int, amounts: Amounts) -> bool:
        """Give the shard some of what the book has left, ahead of need; whether there was enough."""
        given = quota.held(state.book)
        # More at a time the more there is, so that the book is written a few hundred times on the way to any size;
        # and enough for all that wait here.
        ahead = max(_AHEAD, given["sessions"] // 64, self._short[state.tenant])
        gives: dict[str, int] = {}
        for name, lack in _lacks(quota.room(state.shard), amounts).items():
            gives[name] = max(lack, amounts[name] * ahead // amounts["sessions"])
            limit = state.limits.of.get(name)
            if limit is not None:
                gives[name] = min(gives[name], limit - given[name])
            if gives[name] < lack:
                return False
        await self._context.store.transact(
            [
                state.book_op(given=gives, ahead=gives.get("sessions", 0)),
                _moved(state.tenant, shard, gives),
            ]
        )
        return True

    async def _borrow(self, state: _State, shard: int, amounts: Amounts, began: int) -> bool:
        """Move what is left in the book and in other shards to this one; whether it was enough.

        Raises:
            ShoalError: QUOTA_EXCEEDED.
        """
        store = self._context.store
        shards = await _shards(store, state.tenant, state.book)
        lacks = _lacks(quota.room(shards[shard] if shard < len(shards) else None), amounts)
        if not lacks:
            return True
        given = quota.held(state.book)
        spare = {
            name: state.limits.of[name] - given[name] if name in state.limits.of else lacks[name]
            for name in lacks
        }
        rooms = {number: quota.room(each) for number, each in enumerate(shards) if number != shard}
        for name, lack in lacks.items():
            if spare[name] + sum(each[name] for each in rooms.values()) < lack:
                again = await store.get(keys.book(state.tenant))
                if again is None or state.book is None or again.version != state.book.version:
                    # Something was moved from a shard not yet read to one that was.
                    return False
                held = _sum(quota.held(each) for each in shards)
                self._refusals[state.tenant] = _Refusal(began=began, amounts=amounts, held=held)
                raise self._refused(state.tenant, held)
        left = dict(lacks)
        from_book = {name: min(spare[name], lack) for name, lack in left.items()}
        left = {name: lack - from_book[name] for name, lack in left.items()}
        got = dict(from_book)
        ops: list[Op] = []
        chance = self._context.chance
        order = sorted(
            rooms, key=lambda number: (0.5 + chance.random()) * _worth(rooms[number], lacks), reverse=True
        )
        for number in order:
            # Half of what a rich shard has, so that the next create here need not borrow again.
            part = {
                name: min(rooms[number][name], max(lack, rooms[number][name] // 2))
                for name, lack in left.items()
                if lack > 0
            }
            part = {name: amount for name, amount in part.items() if amount > 0}
            if not part:
                continue
            ops.append(_moved(state.tenant, number, {name: -amount for name, amount in part.items()}))
            for name, amount in part.items():
                left[name] -= amount
                got[name] += amount
            if len(ops) == _MANY:
                break
        await store.transact(
            [state.book_op(given=from_book), _moved(state.tenant, shard, got), *ops],
        )
        return all(lack <= 0 for lack in left.values())

    async def _settle(self, state: _State, amounts: Amounts | None) -> None:
        """Bring the book under limits that have changed.

        Where more was given than the limits now are, all shards are closed first, so that nothing is taken while it is
        counted; they stay closed for as long as more is held than there may be.

        Raises:
            ConditionFailed: Another is at it; look again.
            ShoalError: QUOTA_EXCEEDED when `amounts` (None: nothing) do not fit in the new limits.
        """
        store, tenant, limits = self._context.store, state.tenant, state.limits
        assert state.book is not None
        before = str(state.book.item["limits"])
        pending = "!" + limits.text
        if not before.startswith("!") and limits.hold(quota.held(state.book)):
            await store.transact([_under(tenant, before, limits.text)])
            return
        if before != pending:
            await store.transact([_under(tenant, before, pending)])
        shards = await _shards(store, tenant, state.book)
        still_open = [number for number, shard in enumerate(shards) if not quota.closed(shard)]
        if still_open:
            closing = [Update(key=keys.quota(tenant, number), set={"closed": True}) for number in still_open]
            for some in _parts(closing):
                await store.transact(some)
            shards = await _shards(store, tenant, state.book)
        held = _sum(quota.held(shard) for shard in shards)
        wanted = {name: held[name] + (amounts[name] if amounts else 0) for name in DIMENSIONS}
        if not limits.hold(wanted):
            if amounts is None:
                return
            raise self._refused(tenant, held)
        same = AttributeIs(name="limits", value=pending)
        for numbers in _parts(list(range(len(shards)))):
            rooms = {number: quota.room(shards[number]) for number in numbers}
            back = _sum(rooms.values())
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
        await store.transact([_under(tenant, pending, limits.text)])
        log.info("quota.settled", tenant=tenant, limits=limits.text)

    def _refused(self, tenant: TenantId, held: Amounts) -> ShoalError:
        limits = self._known[tenant].limits
        return ShoalError(
            ErrorCode.QUOTA_EXCEEDED,
            "The tenant is at its quota; end some sessions or wait for them to end.",
            retry_after_s=2.0,
            details={"held": dict(held), "limit": {name: limits.of.get(name) for name in DIMENSIONS}},
        )


async def _shards(store: SteadyStore, tenant: TenantId, book: Stored | None) -> list[Stored | None]:
    return await store.get_many([keys.quota(tenant, shard) for shard in range(shards_of(book))])


def _moved(tenant: TenantId, shard: int, amounts: Amounts) -> Update:
    """So much more room for a shard, or less: never below none."""
    return Update(
        key=keys.quota(tenant, shard),
        add={
            f"room_{name}": Add(delta=amount, minimum=0 if amount < 0 else None)
            for name, amount in amounts.items()
        },
    )


def _under(tenant: TenantId, before: str, limits: str) -> Update:
    """The book is kept under other limits."""
    same = AttributeIs(name="limits", value=before)
    return Update(
        key=keys.book(tenant), set={"limits": limits}, add={"moves": Add(delta=1)}, conditions=(same,)
    )


def _lacks(room: Amounts, amounts: Amounts) -> dict[str, int]:
    return {name: amounts[name] - room[name] for name in DIMENSIONS if amounts[name] > room[name]}


def _covers(room: Amounts, amounts: Amounts) -> bool:
    return not _lacks(room, amounts)


def _worth(room: Amounts, lacks: Amounts) -> float:
    """How much of what is lacking a shard has."""
    return sum(min(1.0, room[name] / lack) for name, lack in lacks.items())


def _sum(amounts: Iterable[Amounts]) -> dict[str, int]:
    total = dict.fromkeys(DIMENSIONS, 0)
    for each in amounts:
        for name in DIMENSIONS:
            total[name] += each[name]
    return total


def _parts(all_of_them: list[T]) -> list[list[T]]:
    return [all_of_them[start : start + _MANY] for start in range(0, len(all_of_them), _MANY)]
