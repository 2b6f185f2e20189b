"""Records to items and back, in one place.

A record's item carries `v`, the version of its shape. `load` brings older shapes up to date; a newer one than this
program knows is refused rather than half understood.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from provisioner.store.port import Item

#: The shape that this program writes.
RECORD_VERSION = 1
R = TypeVar("R")


class RecordTooNew(Exception):
    """A record was written by a newer version of the program."""


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
_SILENT: dict[type[Any], frozenset[str]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter


def _silent(kind: type[Any]) -> frozenset[str]:
    """The fields of a record that are None by themselves."""
    found = _SILENT.get(kind)
    if found is None:
        found = _SILENT[kind] = frozenset(field.name for field in fields(kind) if field.default is None)
    return found


def dump(record: Any) -> dict[str, Any]:
    """A record as an item of JSON values. Fields that are None, as they are where nothing is said, take no room."""
    item = _adapter(type(record)).dump_python(record, mode="json", by_alias=True)
    item = {
        name: value for name, value in item.items() if value is not None or name not in _silent(type(record))
    }
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
    told = {name: value for name, value in item.items() if name != "v"}
    return cast("R", _adapter(kind).validate_python(told))
