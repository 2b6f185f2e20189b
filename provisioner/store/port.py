"""The store port: items under two-part keys, read consistently, written in conditional transactions.

It asks for no more than what SQLite and DynamoDB can both do in the same way, so that code written against it
cannot tell them apart. `tests/contract/test_store.py` is this page as tests.

    StoreError
    ├── ConditionFailed     a condition did not hold; nothing was written
    ├── Conflict            another transaction was at the same items; nothing was written, repeat it
    ├── Throttled           too fast or too busy; nothing was written, repeat it later
    ├── TooLarge            an item over MAX_ITEM_BYTES; nothing was written
    ├── TooManyOps          more than MAX_OPS in one transaction; nothing was written
    ├── TokenReused         a token was used with other operations; nothing was written
    └── StoreUnavailable    no answer, or the store is closed: whether it was written is not known
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

MAX_OPS = 100
MAX_ITEM_BYTES = 400_000
#: Seconds for which a repeated token is known (as DynamoDB's ClientRequestToken, read 2026-11).
TOKEN_LIFE_S = 600

#: What an attribute holds: JSON values, or a set of strings (at the top level only).
Value = Any
Item = Mapping[str, Value]


class StoreError(Exception):
    """Anything the store refuses or fails with."""


class ConditionFailed(StoreError):
    """A condition did not hold.

    Attributes:
        index: Which operation's condition, counted from 0; the first one that failed.
        current: The item as it is, None when there is none.
    """

    def __init__(self, index: int, current: Stored | None) -> None:
        super().__init__(f"the condition of operation {index} did not hold")
        self.index = index
        self.current = current


class Conflict(StoreError):
    """Another transaction was writing the same items; repeat it."""


class Throttled(StoreError):
    """The store is too busy; repeat it later."""


class TooLarge(StoreError):
    """An item is over `MAX_ITEM_BYTES`."""


class TooManyOps(StoreError):
    """A transaction has more than `MAX_OPS` operations."""


class TokenReused(StoreError):
    """The token was used for other operations."""


class StoreUnavailable(StoreError):
    """No answer: the write may have happened or not."""


@dataclass(frozen=True, kw_only=True, order=True)
class Key:
    """Where an item is: `pk` names its partition, `sk` its place in the order of the partition (by code point)."""

    pk: str
    sk: str


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An item as read. `version` changes with every write of it; `expires_at` says when it may be cleaned away."""

    key: Key
    item: Item
    version: int
    expires_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Absent:
    """There is no item of this key."""


@dataclass(frozen=True, kw_only=True)
class Exists:
    """There is an item of this key."""


@dataclass(frozen=True, kw_only=True)
class VersionIs:
    """The item is there with this version."""

    version: int


@dataclass(frozen=True, kw_only=True)
class AttributeIs:
    """The item is there and this attribute has this value; None also holds when the attribute is missing."""

    name: str
    value: str | int | bool | None


@dataclass(frozen=True, kw_only=True)
class AttributeIn:
    """The item is there and this attribute has one of these values."""

    name: str
    values: tuple[str | int | bool, ...]


Condition = Absent | Exists | VersionIs | AttributeIs | AttributeIn
Conditions = tuple[Condition, ...]


@dataclass(frozen=True, kw_only=True)
class Put:
    """Write a whole item. The version becomes 1 with `Absent`, n + 1 with `VersionIs(n)`, else some new number.

    `expires_at` only cleans: an expired item may still be read until it is gone.
    """

    key: Key
    item: Item
    conditions: Conditions = ()
    expires_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Add:
    """Add to a counter (missing counts as 0). The sum must lie in `minimum..maximum` (None: no bound), else the
    operation fails as a condition does."""

    delta: int
    minimum: int | None = None
    maximum: int | None = None


@dataclass(frozen=True, kw_only=True)
class Update:
    """Change attributes of an item, making the item when it is missing and no condition says otherwise.

    Attributes:
        set: Attributes to write whole.
        remove: Attributes to take away; a missing one is no failure.
        add: Counters to add to, with their bounds.
        insert, discard: Strings to put into or take out of a set attribute; an empty set is a missing attribute.
        expires_at: A new clean-up time; None leaves it.
    """

    key: Key
    set: Item = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    add: Mapping[str, Add] = field(default_factory=dict)
    insert: Mapping[str, frozenset[str]] = field(default_factory=dict)
    discard: Mapping[str, frozenset[str]] = field(default_factory=dict)
    conditions: Conditions = ()
    expires_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Take an item away; a missing one is no failure unless a condition says so."""

    key: Key
    conditions: Conditions = ()


@dataclass(frozen=True, kw_only=True)
class Check:
    """Write nothing; the conditions must hold at the moment of the transaction."""

    key: Key
    conditions: Conditions


Op = Put | Update | Delete | Check


@dataclass(frozen=True, kw_only=True)
class Page:
    """Part of a query's answer. `after` is the sort key to go on from, None when there is no more."""

    items: tuple[Stored, ...]
    after: str | None


class Store(Protocol):
    """Where state lives. All methods may be called from any task; every one may raise `Throttled` or
    `StoreUnavailable` besides what it names."""

    async def get(self, key: Key) -> Stored | None:
        """The item as of now (a write that was answered is seen), or None."""

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        """Items in the order asked, any number; each is consistent, together they are not one moment."""

    async def query(
        self,
        pk: str,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        reverse: bool = False,
    ) -> Page:
        """Items of a partition whose sort key starts with `prefix`, in order of `sk`, at most `limit` (1 to 1,000).

        `after` leaves out all up to and including that sort key (from it downwards with `reverse`).
        """

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        """Apply all operations, or none.

        Args:
            ops: 1 to `MAX_OPS`, each on another key.
            token: Makes a repeat harmless for `TOKEN_LIFE_S`: the same token with the same operations writes once.

        Raises:
            ConditionFailed, Conflict, TooLarge, TooManyOps, TokenReused: Nothing was written.
            StoreUnavailable: It is not known; repeat it with the same token.
            ValueError: No operations, or two on one key.
        """

    async def close(self) -> None:
        """Finish what was accepted, then release everything; repeatable."""


def check_ops(ops: Sequence[Op]) -> None:
    """What every adapter refuses before it writes."""
    if not ops:
        raise ValueError("a transaction needs an operation")
    if len(ops) > MAX_OPS:
        raise TooManyOps(f"{len(ops)} operations; {MAX_OPS} are the limit")
    if len({op.key for op in ops}) != len(ops):
        raise ValueError("a transaction names each key once")


def encode(item: Item) -> str:
    """An item as canonical JSON; sets become `{"$set": [...]}` in order."""
    return json.dumps(
        {name: _plain(value) for name, value in item.items()},
        separators=(",", ":"),
        ensure_ascii=False,
        sort_keys=True,
    )


def decode(text: str) -> dict[str, Value]:
    """What `encode` wrote."""
    raw: dict[str, Value] = json.loads(text)
    for name, value in raw.items():
        if type(value) is dict and "$set" in value:
            raw[name] = frozenset(value["$set"])
    return raw


def fingerprint(ops: Sequence[Op]) -> str:
    """The same for the same operations, in any process: what a repeated token is compared by."""
    text = "".join(repr(_parts(op)) for op in ops)
    return hashlib.sha256(text.encode()).hexdigest()


def _parts(op: Op) -> list[Value]:
    parts: list[Value] = [type(op).__name__, op.key, op.conditions]
    match op:
        case Put():
            parts += [encode(op.item), op.expires_at]
        case Update():
            parts += [encode(op.set), sorted(op.remove), sorted(op.add.items(), key=lambda pair: pair[0])]
            parts += [encode(op.insert), encode(op.discard), op.expires_at]
    return parts


def check_size(text: str) -> None:
    """Refuse an encoded item that is too large."""
    if len(text) > MAX_ITEM_BYTES // 4 and len(text.encode()) > MAX_ITEM_BYTES:
        raise TooLarge(f"an item of over {MAX_ITEM_BYTES} bytes")


def _plain(value: Value) -> Value:
    return {"$set": sorted(value)} if isinstance(value, set | frozenset) else value


def holds(condition: Condition, stored: Stored | None) -> bool:
    """Whether a condition holds for what is stored."""
    match condition:
        case Absent():
            return stored is None
        case Exists():
            return stored is not None
        case VersionIs(version=version):
            return stored is not None and stored.version == version
        case AttributeIs(name=name, value=value):
            return stored is not None and stored.item.get(name) == value
        case AttributeIn(name=name, values=values):
            return stored is not None and stored.item.get(name) in values


def failed(op: Op, stored: Stored | None) -> bool:
    """Whether an operation's conditions or bounds refuse it."""
    if not all(holds(condition, stored) for condition in op.conditions):
        return True
    if isinstance(op, Update):
        for name, add in op.add.items():
            total = (stored.item.get(name) or 0 if stored else 0) + add.delta
            if add.minimum is not None and total < add.minimum:
                return True
            if add.maximum is not None and total > add.maximum:
                return True
    return False


def updated(op: Update, stored: Stored | None) -> dict[str, Value]:
    """The item that an update leaves."""
    item: dict[str, Value] = dict(stored.item) if stored else {}
    item.update(op.set)
    for name in op.remove:
        item.pop(name, None)
    for name, add in op.add.items():
        item[name] = (item.get(name) or 0) + add.delta
    for name, values in op.insert.items():
        item[name] = frozenset(item.get(name, frozenset())) | values
    for name, values in op.discard.items():
        left = frozenset(item.get(name, frozenset())) - values
        if left:
            item[name] = left
        else:
            item.pop(name, None)
    return item


def next_version(op: Put | Update, stored: Stored | None, fresh: int) -> int:
    """The version a write leaves; `fresh` is a number not used before for a put that knows nothing of the old."""
    if isinstance(op, Update):
        return stored.version + 1 if stored else 1
    for condition in op.conditions:
        if isinstance(condition, VersionIs):
            return condition.version + 1
        if isinstance(condition, Absent):
            return 1
    return fresh
