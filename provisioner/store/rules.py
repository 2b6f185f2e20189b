"""What every adapter of the store does alike: refuse, compare, change and write down an item. All of it is pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from provisioner.store.port import (
    MAX_OPS,
    Absent,
    AttributeIn,
    AttributeIs,
    Condition,
    Exists,
    Item,
    Key,
    Op,
    Put,
    Stored,
    TooLarge,
    TooManyOps,
    Update,
    Value,
    VersionIs,
    check_key_part,
)
from provisioner.store.sizes import (
    MAX_ITEM_BYTES,
    MAX_PK_BYTES,
    MAX_SK_BYTES,
    MAX_TRANSACTION_BYTES,
    item_bytes,
)

#: Key, version and clean-up time with their names, at the most.
_MAX_KEYS_BYTES = MAX_PK_BYTES + MAX_SK_BYTES + 64


def check_ops(ops: Sequence[Op]) -> None:
    """What every adapter refuses before it writes."""
    if not ops:
        raise ValueError("a transaction needs an operation")
    if len(ops) > MAX_OPS:
        raise TooManyOps(f"{len(ops)} operations; {MAX_OPS} are the limit")
    if len({op.key for op in ops}) != len(ops):
        raise ValueError("a transaction names each key once")
    for op in ops:
        if isinstance(op, Update):
            names = [*op.set, *op.remove, *op.add, *op.insert, *op.discard]
            if len(set(names)) != len(names):
                raise ValueError("an update names each attribute once")


def check_query(pk: str, after: str | None, limit: int) -> None:
    """What every adapter refuses before it reads a page.

    Raises:
        ValueError: A key that cannot be, or a limit out of 1 to 1,000.
    """
    check_key_part(pk, MAX_PK_BYTES)
    if after:
        check_key_part(after, MAX_SK_BYTES)
    if not 1 <= limit <= 1000:
        raise ValueError("limit is 1 to 1,000")


def whole_seconds(expires_at: datetime | None) -> datetime | None:
    """A clean-up time as it is kept."""
    return None if expires_at is None else datetime.fromtimestamp(math.ceil(expires_at.timestamp()), UTC)


def encode(item: Item) -> str:
    """An item as canonical JSON; sets become `{"$set": [...]}` in order, and what looks like one `{"$value": ...}`."""
    return json.dumps(
        {name: _plain(value) for name, value in item.items() if not _is_empty_set(value)},
        separators=(",", ":"),
        ensure_ascii=False,
        sort_keys=True,
    )


def decode(text: str) -> dict[str, Value]:
    """What `encode` wrote."""
    raw: dict[str, Value] = json.loads(text)
    for name, value in raw.items():
        if type(value) is dict and len(value) == 1:
            if "$set" in value:
                raw[name] = frozenset(value["$set"])
            elif "$value" in value:
                raw[name] = value["$value"]
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


def check_sizes(writes: Iterable[tuple[Key, Item, str, bool]]) -> None:
    """Refuse items that are too large, each or together.

    Args:
        writes: Of each item that a transaction leaves: key, item, its JSON text, and whether it has a clean-up time.

    Raises:
        TooLarge: One is over `MAX_ITEM_BYTES`, or all are over `MAX_TRANSACTION_BYTES`.
    """
    writes = list(writes)
    # A character has up to four bytes, and an item is never larger than its JSON and its keys: most need no counting.
    if sum(4 * len(text) + _MAX_KEYS_BYTES for _, _, text, _ in writes) <= MAX_ITEM_BYTES:
        return
    total = 0
    for key, item, _, expires in writes:
        size = item_bytes(key.pk, key.sk, item, expires=expires)
        if size > MAX_ITEM_BYTES:
            raise TooLarge(f"an item of {size} bytes; {MAX_ITEM_BYTES} are the limit")
        total += size
    if total > MAX_TRANSACTION_BYTES:
        raise TooLarge(f"a transaction of {total} bytes; {MAX_TRANSACTION_BYTES} are the limit")


def _is_empty_set(value: Value) -> bool:
    return isinstance(value, set | frozenset) and not value


def _plain(value: Value) -> Value:
    if isinstance(value, set | frozenset):
        return {"$set": sorted(value)}
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("$set", "$value"):
        return {"$value": value}
    return value


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
            return stored is not None and _same(stored.item.get(name), value)
        case AttributeIn(name=name, values=values):
            return stored is not None and any(_same(stored.item.get(name), value) for value in values)


def _same(left: Value, right: Value) -> bool:
    return _type(left) == _type(right) and bool(left == right)


def _type(value: Value) -> str:
    if isinstance(value, bool):
        return "bool"
    return "str" if isinstance(value, str) else "int" if isinstance(value, int) else type(value).__name__


def failed(op: Op, stored: Stored | None) -> bool:
    """Whether an operation's conditions or bounds refuse it."""
    if not all(holds(condition, stored) for condition in op.conditions):
        return True
    if isinstance(op, Update):
        for name, add in op.add.items():
            total = (stored.item.get(name, 0) if stored else 0) + add.delta
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
        item[name] = item.get(name, 0) + add.delta
    for name, values in op.insert.items():
        item[name] = frozenset(item.get(name, frozenset())) | values
        if not item[name]:
            del item[name]
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
