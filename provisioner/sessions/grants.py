"""Who gives a tenant's quota to its shards: what a create does when its shard has too little.

A shard is given a little ahead of need by the book, and when the book has given all, it borrows from the other shards;
only when those together have too little is the create refused. `provisioner/quota.py` says what holds at all times.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from provisioner import keys, quota
from provisioner.context import Context, log
from provisioner.model import Tenant, load
from provisioner.quota import DIMENSIONS, Amounts, Limits
from provisioner.sessions.refusals import Refusals
from provisioner.sessions.settling import MANY, State, read_shards, refused, settle, sum_of
from provisioner.spread import SESSIONS_PER_SHARD, shards_of
from provisioner.store.port import (
    Add,
    ConditionFailed,
    Op,
    Update,
)
from provisioner.store.steady import SteadyStore
from shoal.contract.base import TenantId
from shoal.contract.errors import ErrorCode, ShoalError

#: Shards, and how many sessions take their quota of each.
Parts = list[tuple[int, int]]
#: For how many sessions like the one that asks a shard is given at the least. Half of `SESSIONS_PER_SHARD`, so that
#: opening shards does not by itself call for more shards.
_AHEAD = SESSIONS_PER_SHARD // 2
#: Seconds for which limits and the number of shards serve.
_KNOWN_S = 10.0
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
    limits: Limits
    held: Amounts


async def held_by(store: SteadyStore, tenant: TenantId) -> dict[str, int]:
    """What a tenant's sessions hold of its quota: the sum of its shards."""
    shards = await read_shards(store, tenant, await store.get(keys.book(tenant)))
    return sum_of(quota.held(shard) for shard in shards)


class Grants:
    """Gives quota to shards; one for all creates of a replica."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[TenantId, _Known] = {}
        self._locks: dict[TenantId, asyncio.Lock] = {}
        self._short: Counter[TenantId] = Counter()
        self._refusals: dict[TenantId, _Refusal] = {}
        self._gave: dict[TenantId, int] = {}
        self._moments = itertools.count()
        self._kept = Refusals(context)

    async def shards(self, tenant: TenantId) -> int:
        """Over how many shards a tenant's quota is spread, as far as this replica knows: never more than there are."""
        known = self._known.get(tenant)
        if known is not None and known.until > self._context.clock.monotonic():
            return known.shards
        state = await self._read(tenant, None)
        for _ in range(_TRIES):
            if state.settled:
                break
            try:
                await settle(self._context.store, state, None)
                break
            except ConditionFailed:
                state = await self._read(tenant, None)
        return self._known[tenant].shards

    async def shard(self, tenant: TenantId, id: str) -> int:
        """The shard that a session takes its quota of."""
        return keys.shard_of(id, await self.shards(tenant))

    async def parts(self, tenant: TenantId, id: str, count: int) -> Parts:
        """Of which shards a group of `count` sessions takes, and how many of each."""
        return _parts_of(id, count, await self.shards(tenant))

    async def hot(self, tenant: TenantId) -> None:
        """Spread a tenant over twice as many shards: its partitions refuse writes."""
        state = await self._read(tenant, None)
        if state.book is not None and state.settled and shards_of(state.book) < keys.QUOTA_SHARDS:
            ahead = shards_of(state.book) * 2 * SESSIONS_PER_SHARD
            log.info("tenant.spread", tenant=tenant, shards=2 * shards_of(state.book))
            await self._context.store.transact([state.book_op(given={}, ahead=ahead)])
            await self._read(tenant, None)

    async def room_for(self, tenant: TenantId, id: str, amounts: Amounts) -> int:
        """Have so much room in the shard of a session, and answer that; others may take it before the caller does.

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
                    raise refused(refusal.limits, refusal.held)
                if self._gave.get(tenant, -1) > came:
                    # Much was given while this call waited, most likely to its shard, too: others go on meanwhile.
                    return keys.shard_of(id, self._known[tenant].shards)
                for _ in range(_TRIES):
                    shard = await self._try(tenant, id, amounts)
                    if shard is not None:
                        return shard
        finally:
            self._short[tenant] -= 1
        raise ShoalError(
            ErrorCode.UNAVAILABLE, "The tenant's quota is much asked for; try again.", retry_after_s=0.5
        )

    async def room_for_group(self, tenant: TenantId, id: str, each: Sequence[Amounts]) -> Parts:
        """Have room for a group's sessions, and answer of which shards to take it. Errors as for `room_for`."""
        total = sum_of(each)
        state = await self._read(tenant, None)
        given = quota.held(state.book)
        left = state.limits.hold({name: given[name] + total[name] for name in DIMENSIONS})
        if state.settled and left:
            # Enough was not given to any shard yet: so many shards get their part that none has too much of it.
            parts = _parts_of(id, len(each), shards_of(state.book, len(each)))
            moves: list[Op] = []
            begin = 0
            for shard, count in parts:
                moves.append(_moved(tenant, shard, sum_of(each[begin : begin + count])))
                begin += count
            try:
                await self._context.store.transact([state.book_op(given=total, ahead=len(each)), *moves])
            except ConditionFailed:
                log.info("quota.contended", tenant=tenant)
            else:
                await self._read(tenant, None)
                return parts
        # All of it in one shard, which may borrow from all others.
        return [(await self.room_for(tenant, id, total), len(each))]

    async def _try(self, tenant: TenantId, id: str, amounts: Amounts) -> int | None:
        began, since = next(self._moments), self._context.clock.now()
        state = await self._read(tenant, id)
        try:
            if not state.settled:
                await self._settle(state, amounts, since)
                return None
            if quota.closed(state.shard):
                # Whoever closed it was late: the book was settled by another meanwhile.
                await self._context.store.transact(state.open_ops())
                return None
            ready = _covers(quota.room(state.shard), amounts)
            if ready or await self._give(state, amounts):
                return state.number
            await self._kept.check(state, amounts)
            if await self._borrow(state, amounts, began, since):
                return state.number
        except ConditionFailed:
            return None
        return None

    async def _settle(self, state: State, amounts: Amounts, since: datetime) -> None:
        await self._kept.check(state, amounts)
        try:
            await settle(self._context.store, state, amounts)
        except ShoalError as error:
            if error.code is ErrorCode.QUOTA_EXCEEDED:
                await self._kept.keep(state, amounts, error.details["held"], since)
            raise

    async def _read(self, tenant: TenantId, id: str | None) -> State:
        """How things are, with the shard of this id; this replica goes by it from now on."""
        record, book = await self._context.store.get_many([keys.tenant(tenant), keys.book(tenant)])
        number = keys.shard_of(id, shards_of(book)) if id is not None else 0
        shard = await self._context.store.get(keys.quota(tenant, number)) if id is not None else None
        limits = Limits.read(load(Tenant, record.item) if record else None)
        self._known[tenant] = _Known(
            limits=limits, shards=shards_of(book), until=self._context.clock.monotonic() + _KNOWN_S
        )
        return State(tenant=tenant, record=record, limits=limits, book=book, number=number, shard=shard)

    async def _give(self, state: State, amounts: Amounts) -> bool:
        """Give the shard some of what the book has left, ahead of need; whether there was enough."""
        given = quota.held(state.book)
        # More at a time the more there is, so that the book is written a few hundred times on the way to any size.
        ahead = max(_AHEAD, given["sessions"] // 64)
        # Others wait here, most of them for other shards; those get theirs at the same time, with some to spare.
        crowd = self._short[state.tenant] * 3 // 2
        shards = shards_of(state.book, max(ahead, crowd))
        each_sessions = max(ahead, crowd // shards)
        each = {name: amounts[name] * each_sessions // amounts["sessions"] for name in DIMENSIONS}
        left = {name: limit - given[name] for name, limit in state.limits.of.items()}
        gives: dict[str, int] = {}
        for name, lack in _lacks(quota.room(state.shard), amounts).items():
            gives[name] = max(lack, each[name])
            if name in left:
                gives[name] = min(gives[name], left[name])
                left[name] -= gives[name]
            if gives[name] < lack:
                return False
        moves = [_moved(state.tenant, state.number, gives)]
        total = dict(gives)
        others = min(MANY, shards - 1 if crowd > ahead else 0, *(left[name] // each[name] for name in left))
        for number in range(1, others + 1):
            moves.append(_moved(state.tenant, (state.number + number) % shards, each))
            total = {name: total.get(name, 0) + each[name] for name in DIMENSIONS}
        # No shard may have room that the book does not tell of.
        peak = max(total.get("sessions", 0), max(ahead, crowd) if others > 0 else 0)
        await self._context.store.transact([state.book_op(given=total, ahead=peak), *moves])
        self._known[state.tenant] = replace(self._known[state.tenant], shards=shards_of(state.book, peak))
        self._gave[state.tenant] = next(self._moments)
        return True

    async def _borrow(self, state: State, amounts: Amounts, began: int, since: datetime) -> bool:
        """Move what is left in the book and in other shards to this one; whether it was enough.

        Args:
            began, since: When this was asked, in order and in time.

        Raises:
            ShoalError: QUOTA_EXCEEDED.
        """
        store, shard = self._context.store, state.number
        shards = await read_shards(store, state.tenant, state.book)
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
                held = sum_of(quota.held(each) for each in shards)
                self._refusals[state.tenant] = _Refusal(
                    began=began, amounts=amounts, limits=state.limits, held=held
                )
                await self._kept.keep(state, amounts, held, since)
                raise refused(state.limits, held)
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
            if len(ops) == MANY:
                break
        await store.transact(
            [state.book_op(given=from_book), _moved(state.tenant, shard, got), *ops],
        )
        return all(lack <= 0 for lack in left.values())


def _moved(tenant: TenantId, shard: int, amounts: Amounts) -> Update:
    """So much more room for a shard, or less: never below none."""
    return Update(
        key=keys.quota(tenant, shard),
        add={
            f"room_{name}": Add(delta=amount, minimum=0 if amount < 0 else None)
            for name, amount in amounts.items()
        },
    )


def _parts_of(id: str, count: int, shards: int) -> Parts:
    """Shards for so many sessions, in equal parts."""
    some = min(shards, -(-count // _AHEAD), MANY)
    first = keys.shard_of(id, shards)
    each, more = divmod(count, some)
    return [((first + n) % shards, each + (n < more)) for n in range(some)]


def _lacks(room: Amounts, amounts: Amounts) -> dict[str, int]:
    return {name: amounts[name] - room[name] for name in DIMENSIONS if amounts[name] > room[name]}


def _covers(room: Amounts, amounts: Amounts) -> bool:
    return not _lacks(room, amounts)


def _worth(room: Amounts, lacks: Amounts) -> float:
    """How much of what is lacking a shard has."""
    return sum(min(1.0, room[name] / lack) for name, lack in lacks.items())
