"""Items and operations as DynamoDB's API takes them. Pure, and the same bytes for the same operations.

On the table an item is: `pk`, `sk`; `v`, its version; `expires`, its clean-up time in epoch seconds, when it has one;
and its own attributes. Texts, booleans, None, integers and sets are kept as they are, so that conditions and counters
work on them; every other value (lists, objects, floats, integers over 38 digits) as a list with one string, its JSON
text: it comes back exactly, and takes no more room. An attribute with a name of ours, or one that begins with `_`, gets
a `_` before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from provisioner.store.port import (
    Absent,
    Add,
    AttributeIn,
    AttributeIs,
    Check,
    Condition,
    Delete,
    Exists,
    Item,
    Key,
    Op,
    Put,
    Stored,
    Update,
    Value,
    VersionIs,
)
from provisioner.store.rules import next_version, whole_seconds
from provisioner.store.sizes import attribute_name, is_native, json_text

#: An attribute value of the API, as {type: value}.
Wire = dict[str, Any]

#: Longest `ClientRequestToken`, and most operands of `IN` (API reference and limits, read 2026-11).
_MAX_TOKEN = 36
_MAX_OPERANDS = 100


def encode_value(value: Value) -> Wire:
    """A value for the API; never an empty set."""
    if value is None:
        return {"NULL": True}
    if isinstance(value, bool):
        return {"BOOL": bool(value)}
    if isinstance(value, str):
        # A str of a subclass (an enumeration) as its plain text.
        return {"S": str.__str__(value)}
    if isinstance(value, set | frozenset):
        return {"SS": sorted(value)}
    if is_native(value):
        return {"N": int.__repr__(value)}
    return {"L": [{"S": json_text(value)}]}


def decode_value(wire: Mapping[str, Any]) -> Value:
    """What `encode_value` was given.

    Raises:
        ValueError: It was not written by this program.
    """
    ((kind, value),) = wire.items()
    match kind:
        case "S" | "BOOL":
            return value
        case "N":
            return int(value) if value.lstrip("-").isdigit() else int(Decimal(value))
        case "NULL":
            return None
        case "SS":
            return frozenset(value)
        case "L":
            return json.loads(value[0]["S"])
        case _:
            raise ValueError(f"an attribute of type {kind}, which this program does not write")


def encode_key(key: Key) -> dict[str, Wire]:
    """A key for the API."""
    return {"pk": {"S": key.pk}, "sk": {"S": key.sk}}


def decode_item(wire: Mapping[str, Wire]) -> Stored:
    """An item that the API answered."""
    item: dict[str, Value] = {}
    expires_at: datetime | None = None
    version = 0
    pk = sk = ""
    for name, value in wire.items():
        if name == "pk":
            pk = value["S"]
        elif name == "sk":
            sk = value["S"]
        elif name == "v":
            version = int(Decimal(value["N"]))
        elif name == "expires":
            expires_at = datetime.fromtimestamp(float(value["N"]), UTC)
        else:
            item[name[1:] if name.startswith("_") else name] = decode_value(value)
    return Stored(key=Key(pk=pk, sk=sk), item=item, version=version, expires_at=expires_at)


def client_token(token: str) -> str:
    """A token of any length as `ClientRequestToken`."""
    if len(token) <= _MAX_TOKEN and token.isascii() and token.isprintable() and token:
        return token
    return hashlib.sha256(token.encode()).hexdigest()[:_MAX_TOKEN]


def fresh_version(token: str, index: int) -> int:
    """A version not used before, which a repeat under the same token finds again (else it would be another request)."""
    digest = hashlib.sha256(f"{token}\0{index}".encode()).digest()
    return (1 << 40) + int.from_bytes(digest[:6], "big")


def transact_item(table: str, op: Op, *, fresh: int) -> dict[str, Any]:
    """An operation as a member of `TransactItems`."""
    expression = _Expression()
    request: dict[str, Any] = {"TableName": table, "ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
    conditions = [expression.condition(condition) for condition in op.conditions]
    match op:
        case Put():
            kind = "Put"
            request["Item"] = _put_item(op, next_version(op, None, fresh))
        case Update():
            kind = "Update"
            request["Key"] = encode_key(op.key)
            request["UpdateExpression"] = expression.update(op)
            conditions += [
                each for name, add in sorted(op.add.items()) for each in expression.bounds(name, add)
            ]
        case Delete():
            kind = "Delete"
            request["Key"] = encode_key(op.key)
        case Check():
            kind = "ConditionCheck"
            request["Key"] = encode_key(op.key)
            conditions = conditions or ["(attribute_exists(pk) OR attribute_not_exists(pk))"]
    if conditions:
        request["ConditionExpression"] = " AND ".join(conditions)
    if expression.names:
        request["ExpressionAttributeNames"] = expression.names
    if expression.values:
        request["ExpressionAttributeValues"] = expression.values
    return {kind: request}


def _put_item(op: Put, version: int) -> dict[str, Wire]:
    wire = {**encode_key(op.key), "v": encode_value(version)}
    expires_at = whole_seconds(op.expires_at)
    if expires_at is not None:
        wire["expires"] = encode_value(int(expires_at.timestamp()))
    wire |= _attributes(op.item)
    return wire


def _attributes(item: Item) -> dict[str, Wire]:
    return {
        attribute_name(name): encode_value(value)
        for name, value in sorted(item.items())
        if not _is_empty_set(value)
    }


def _is_empty_set(value: Value) -> bool:
    return isinstance(value, set | frozenset) and not value


class _Expression:
    """The expressions of one operation, with the names and values they stand for."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.values: dict[str, Wire] = {}

    def _name(self, attribute: str) -> str:
        name = attribute_name(attribute)
        for short, known in self.names.items():
            if known == name:
                return short
        short = f"#{len(self.names)}"
        self.names[short] = name
        return short

    def _value(self, value: Value) -> str:
        short = f":{len(self.values)}"
        self.values[short] = encode_value(value)
        return short

    def condition(self, condition: Condition) -> str:
        """A condition, closed by itself."""
        match condition:
            case Absent():
                return "attribute_not_exists(pk)"
            case Exists():
                return "attribute_exists(pk)"
            case VersionIs(version=version):
                return f"v = {self._value(version)}"
            case AttributeIs(name=name, value=None):
                short = self._name(name)
                missing = f"attribute_not_exists({short}) OR {short} = {self._value(None)}"
                return f"attribute_exists(pk) AND ({missing})"
            case AttributeIs(name=name, value=value):
                return f"{self._name(name)} = {self._value(value)}"
            case AttributeIn(name=name, values=values):
                return self._is_in(name, list(values))

    def _is_in(self, name: str, values: list[Value]) -> str:
        if not values:
            return "(attribute_exists(pk) AND attribute_not_exists(pk))"
        short = self._name(name)
        parts = [values[at : at + _MAX_OPERANDS] for at in range(0, len(values), _MAX_OPERANDS)]
        lists = [f"{short} IN ({', '.join(self._value(value) for value in part)})" for part in parts]
        return f"({' OR '.join(lists)})" if len(lists) > 1 else lists[0]

    def bounds(self, name: str, add: Add) -> list[str]:
        """That a counter's sum will lie in its bounds."""
        low = None if add.minimum is None else add.minimum - add.delta
        high = None if add.maximum is None else add.maximum - add.delta
        if low is None and high is None:
            return []
        short = self._name(name)
        within = []
        if low is not None:
            within.append(f"{short} >= {self._value(low)}")
        if high is not None:
            within.append(f"{short} <= {self._value(high)}")
        text = " AND ".join(within)
        # A missing counter is 0; a comparison with a missing attribute never holds.
        if (low is None or low <= 0) and (high is None or high >= 0):
            return [f"(attribute_not_exists({short}) OR ({text}))"]
        return [f"({text})"]

    def update(self, op: Update) -> str:
        """What an update changes; the version always."""
        sets = [
            f"{self._name(name)} = {self._value(value)}"
            for name, value in sorted(op.set.items())
            if not _is_empty_set(value)
        ]
        expires_at = whole_seconds(op.expires_at)
        if expires_at is not None:
            sets.append(f"expires = {self._value(int(expires_at.timestamp()))}")
        removes = [self._name(name) for name, value in sorted(op.set.items()) if _is_empty_set(value)]
        removes += [self._name(name) for name in sorted(op.remove)]
        adds = [f"v {self._value(1)}"]
        adds += [f"{self._name(name)} {self._value(add.delta)}" for name, add in sorted(op.add.items())]
        adds += [
            f"{self._name(name)} {self._value(each)}" for name, each in sorted(op.insert.items()) if each
        ]
        deletes = [
            f"{self._name(name)} {self._value(each)}" for name, each in sorted(op.discard.items()) if each
        ]
        clauses = {"SET": sets, "REMOVE": removes, "ADD": adds, "DELETE": deletes}
        return " ".join(f"{verb} {', '.join(parts)}" for verb, parts in clauses.items() if parts)
