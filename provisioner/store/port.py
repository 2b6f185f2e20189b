"""The store port: items under two-part keys, read consistently, written in conditional transactions.

It asks for no more than what SQLite and DynamoDB can both do in the same way, so that code written against it
cannot tell them apart. `tests/contract/test_store.py` is this page as tests.

    StoreError
    ├── ConditionFailed     a condition did not hold; nothing was written
    ├── Conflict            another transaction was at the same items; nothing was written, repeat it
    ├── Throttled           too fast or too busy; nothing was written, repeat it later
    ├── TooLarge            an item over 400 KB, a transaction over 4 MB (sizes.py); nothing was written
    ├── TooManyOps          more than MAX_OPS in one transaction; nothing was written
    ├── TokenReused         a token was used with other operations; nothing was written
    └── StoreUnavailable    no answer, or the store is closed: whether it was written is not known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from provisioner.store.sizes import MAX_PK_BYTES, MAX_SK_BYTES

MAX_OPS = 100
#: Seconds for which a repeated token is known (as DynamoDB's ClientRequestToken, read 2026-11).
TOKEN_LIFE_S = 600

#: What an attribute holds: JSON values, or a set of strings (at the top level only; an empty one is no attribute).
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
    """An item is over `MAX_ITEM_BYTES`, or what a transaction writes over `MAX_TRANSACTION_BYTES`."""


class TooManyOps(StoreError):
    """A transaction has more than `MAX_OPS` operations."""


class TokenReused(StoreError):
    """The token was used for other operations."""


class StoreUnavailable(StoreError):
    """No answer: the write may have happened or not."""


def check_key_part(part: str, limit_bytes: int) -> None:
    """Refuse what cannot be (part of) a key.

    Raises:
        ValueError: It is empty, or longer than the limit in UTF-8.
    """
    if not part or (len(part) > limit_bytes // 4 and len(part.encode()) > limit_bytes):
        raise ValueError(f"a part of a key has 1 to {limit_bytes} bytes, not {len(part)} characters")


@dataclass(frozen=True, kw_only=True, order=True)
class Key:
    """Where an item is: `pk` names its partition, `sk` its place in the order of the partition (by code point).

    Raises:
        ValueError: One is empty, or longer than `MAX_PK_BYTES` or `MAX_SK_BYTES`.
    """

    pk: str
    sk: str

    def __post_init__(self) -> None:
        check_key_part(self.pk, MAX_PK_BYTES)
        check_key_part(self.sk, MAX_SK_BYTES)


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
    """The item is there and this attribute has this value, of the same type (True is not 1); None also holds when the
    attribute is missing."""

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

    `expires_at` only cleans: an expired item may still be read until it is gone. It is kept in whole seconds, rounded
    up.
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
    """Change attributes of an item, making the item when it is missing and no condition says otherwise. Each attribute
    is named once.

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


@runtime_checkable
class Counted(Protocol):
    """A store that counts what it asked and what its calls ran into since the start of the process, by kind."""

    @property
    def counts(self) -> Mapping[str, float]:
        """How much of each kind."""


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
            ValueError: No operations, two on one key, or an update that names an attribute twice.
        """

    async def close(self) -> None:
        """Finish what was accepted, then release everything; repeatable."""
