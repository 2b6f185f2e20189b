"""MessagePack, the part that frames use: None, bool, int, float, str, bytes, list, map.

Written out because the guest has the standard library only and `json` brings `re` with it (and
cannot carry bytes). The agent reads guests' frames by the msgpack library with limits; the guest
reads only what its agent sends. Text that is not UTF-8 travels as surrogate escapes.
"""

from __future__ import annotations

from struct import Struct, error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_U8, _U16, _U32, _U64 = Struct(">BB"), Struct(">BH"), Struct(">BI"), Struct(">BQ")
_I64, _F64 = Struct(">Bq"), Struct(">Bd")
_DEPTH = 16


def dumps(value: object) -> bytes:
    """`value` in MessagePack.

    Raises:
        TypeError: a kind of value frames do not carry.
    """
    out: list[bytes] = []
    _write(value, out.append, 0)
    return b"".join(out)


def _write(value: object, emit: Callable[[bytes], None], depth: int) -> None:
    if depth > _DEPTH:
        raise TypeError("nested too deep")
    if value is None:
        emit(b"\xc0")
    elif value is True:
        emit(b"\xc3")
    elif value is False:
        emit(b"\xc2")
    elif isinstance(value, int):
        if 0 <= value < 128:
            emit(value.to_bytes(1, "big"))
        elif value >= 0:
            emit(_U64.pack(0xCF, value))
        else:
            emit(_I64.pack(0xD3, value))
    elif isinstance(value, float):
        emit(_F64.pack(0xCB, value))
    elif isinstance(value, str):
        raw = value.encode("utf-8", "surrogateescape")
        size = len(raw)
        emit(bytes((0xA0 | size,)) if size < 32 else _U32.pack(0xDB, size))
        emit(raw)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        emit(_U32.pack(0xC6, len(value)))
        emit(bytes(value))
    elif isinstance(value, (list, tuple)):
        size = len(value)
        emit(bytes((0x90 | size,)) if size < 16 else _U32.pack(0xDD, size))
        for item in value:
            _write(item, emit, depth + 1)
    elif isinstance(value, dict):
        size = len(value)
        emit(bytes((0x80 | size,)) if size < 16 else _U32.pack(0xDF, size))
        for key, item in value.items():
            _write(key, emit, depth + 1)
            _write(item, emit, depth + 1)
    else:
        raise TypeError(f"cannot send {type(value)}")


def loads(data: bytes | bytearray | memoryview) -> object:
    """The value `data` holds, all of it.

    Raises:
        ValueError: not MessagePack, truncated, trailing bytes, nested too deep.
    """
    view = memoryview(data)
    try:
        value, end = _read(view, 0, 0)
    except (error, IndexError, TypeError, UnicodeDecodeError) as err:
        raise ValueError(f"not a packed value: {err}") from None
    if end != len(view):
        raise ValueError("bytes after the packed value")
    return value


# Of the variable-length kinds: code -> (kind, bytes of the length).
_SIZED = {
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
    0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4),
    0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
_UNSIGNED = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_SIGNED = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def _read(view: memoryview, at: int, depth: int) -> tuple[object, int]:
    if depth > _DEPTH:
        raise ValueError("nested too deep")
    code = view[at]
    at += 1
    if code < 0x80:
        return code, at
    if code >= 0xE0:
        return code - 256, at
    if code < 0x90:
        return _read_map(view, at, code & 15, depth)
    if code < 0xA0:
        return _read_list(view, at, code & 15, depth)
    if code < 0xC0:
        return str(_take(view, at, code & 31), "utf-8", "surrogateescape"), at + (code & 31)
    if code in _SIZED:
        kind, width = _SIZED[code]
        size = int.from_bytes(_take(view, at, width), "big")
        at += width
        if kind == "str":
            return str(_take(view, at, size), "utf-8", "surrogateescape"), at + size
        if kind == "bin":
            return bytes(_take(view, at, size)), at + size
        return (_read_list if kind == "list" else _read_map)(view, at, size, depth)
    if code in _UNSIGNED:
        width = _UNSIGNED[code]
        return int.from_bytes(_take(view, at, width), "big"), at + width
    if code in _SIGNED:
        width = _SIGNED[code]
        return int.from_bytes(_take(view, at, width), "big", signed=True), at + width
    if code == 0xCB:
        return _F64.unpack(_take(view, at - 1, 9))[1], at + 8
    if code == 0xC0:
        return None, at
    if code in (0xC2, 0xC3):
        return code == 0xC3, at
    raise ValueError(f"unknown code {code:#x}")


def _take(view: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(view):
        raise ValueError("truncated")
    return view[at : at + size]


def _read_list(view: memoryview, at: int, size: int, depth: int) -> tuple[object, int]:
    if size > len(view) - at:
        raise ValueError("truncated")
    items = []
    for _ in range(size):
        item, at = _read(view, at, depth + 1)
        items.append(item)
    return items, at


def _read_map(view: memoryview, at: int, size: int, depth: int) -> tuple[object, int]:
    if size * 2 > len(view) - at:
        raise ValueError("truncated")
    result = {}
    for _ in range(size):
        key, at = _read(view, at, depth + 1)
        result[key], at = _read(view, at, depth + 1)
    return result, at
