"""How large an item is, counted as DynamoDB counts it, for every adapter: what one refuses, all refuse.

An item is the sum of its attributes, each the UTF-8 length of its name plus its value; the key, the version and the
clean-up time are attributes as well. Rules: "DynamoDB item sizes and formats" of its developer guide, read 2026-11;
numbers take a byte for two significant digits and one more, which the guide calls approximate.
"""

from __future__ import annotations

import json
from typing import Any

#: 400 KB, as DynamoDB limits an item.
MAX_ITEM_BYTES = 400 * 1024
#: 4 MB, as DynamoDB limits all items of a transaction together.
MAX_TRANSACTION_BYTES = 4 * 1024 * 1024
MAX_PK_BYTES = 2048
MAX_SK_BYTES = 1024
#: Integers of more digits than DynamoDB's numbers have are kept as text.
MAX_INTEGER = 10**38
#: What the table needs an item's own attributes not to be called.
RESERVED = frozenset({"pk", "sk", "v", "expires"})

#: pk, sk, v and expires: names, a version of up to 15 digits, a time of 10.
_FIXED_BYTES = len("pk") + len("sk") + len("v") + 9
_EXPIRES_BYTES = len("expires") + 6


def attribute_name(name: str) -> str:
    """What an item's attribute is called on the table: `_` before the names that are taken, and before `_`."""
    return "_" + name if name in RESERVED or name.startswith("_") or not name else name


def is_native(value: Any) -> bool:
    """Whether the table keeps this value as it is (to be compared and added to) rather than as JSON text."""
    if value is None or isinstance(value, str | bool | set | frozenset):
        return True
    return isinstance(value, int) and -MAX_INTEGER < value < MAX_INTEGER


def json_text(value: Any) -> str:
    """A value that is not native, as it is kept."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=True)


def value_bytes(value: Any) -> int:
    """The size of an attribute's value.

    Raises:
        TypeError: It is no JSON value.
        UnicodeEncodeError: It has a lone surrogate.
    """
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, set | frozenset):
        return sum(len(each.encode()) for each in value)
    if is_native(value):
        return _number_bytes(value)
    # A list of one string: three bytes of the list and one of its element.
    return 4 + len(json_text(value).encode())


def item_bytes(pk: str, sk: str, item: Any, *, expires: bool = False) -> int:
    """The size of an item with its key; at most some bytes more than DynamoDB counts."""
    size = _FIXED_BYTES + len(pk.encode()) + len(sk.encode()) + (_EXPIRES_BYTES if expires else 0)
    for name, value in item.items():
        if isinstance(value, set | frozenset) and not value:
            continue  # an empty set is no attribute
        size += len(attribute_name(name).encode()) + value_bytes(value)
    return size


def _number_bytes(number: int) -> int:
    # Digits in pairs that are aligned on the decimal point, without the zeros at the end.
    digits = str(abs(number))
    stripped = digits.rstrip("0")
    if not stripped:
        return 1
    if (len(digits) - len(stripped)) % 2:
        stripped += "0"
    return 1 + (len(stripped) + 1) // 2 + (number < 0)
