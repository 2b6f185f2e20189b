"""Records to items and back, in one place.

A record's item carries `v`, the version of its shape. `load` brings older shapes up to date; a newer one than this
program knows is refused rather than half understood.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from provisioner.store.port import Item

#: The shape that this program writes.
RECORD_VERSION = 1
R = TypeVar("R")


class RecordTooNew(Exception):
    """A record was written by a newer version of the program."""


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter


def dump(record: Any) -> dict[str, Any]:
    """A record as an item of JSON values."""
    item = _adapter(type(record)).dump_python(record, mode="json", by_alias=True)
    item["v"] = RECORD_VERSION
    return cast("dict[str, Any]", item)


def load(kind: type[R], item: Item) -> R:
    """An item as a record.

    Raises:
        RecordTooNew: Its shape is newer than this program knows.
    """
    version = item.get("v", RECORD_VERSION)
    if version > RECORD_VERSION:
        raise RecordTooNew(f"{kind.__name__} of shape {version}; this version knows {RECORD_VERSION}")
    fields = {name: value for name, value in item.items() if name != "v"}
    return cast("R", _adapter(kind).validate_python(fields))
