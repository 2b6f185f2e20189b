"""Runs one pickled call inside an image and writes its result; standard library only, started as a script.

It is sent along as text: the image needs python3 and nothing else. argv: directory, result path, format of the result.
Beside it in the directory lie `call.pkl`, `lib.zip` (cloudpickle, and msgpack's pure Python, as source) and
`python` (the caller's major.minor).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def write(path: str, head: dict[str, str], body: bytes = b"") -> None:
    """One line of JSON, then the body; aside, then renamed."""
    with open(path + ".part", "wb") as out:
        out.write(json.dumps(head).encode("ascii") + b"\n" + body)
    os.replace(path + ".part", path)


def encode(value: Any, form: str) -> bytes:
    """The result in the chosen format."""
    if form == "json":
        return json.dumps(value, allow_nan=True).encode("utf-8")
    if form == "msgpack":
        os.environ["MSGPACK_PUREPYTHON"] = "1"
        import msgpack  # type: ignore[import-untyped]

        return bytes(msgpack.packb(value, use_bin_type=True))
    import cloudpickle  # type: ignore[import-untyped]

    return bytes(cloudpickle.dumps(value))


def main(place: str, result: str, form: str) -> None:
    """Checks the Python first: a pickle of another one may crash the interpreter."""
    with open(os.path.join(place, "python"), encoding="ascii") as told:
        there = told.read().strip()
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if here != there:
        write(result, {"kind": "python_mismatch", "there": here})
        return
    sys.path.insert(0, os.path.join(place, "lib.zip"))
    try:
        import pickle

        with open(os.path.join(place, "call.pkl"), "rb") as call:
            function, args, kwargs = pickle.load(call)
        value = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        kind = type(error)
        head = {
            "kind": "error",
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
        write(result, head)
        return
    try:
        body = encode(value, form)
    except Exception as error:  # noqa: BLE001 - encoders raise anything
        text = f"a result of type {type(value).__name__} cannot be sent as {form}: {error}"
        write(result, {"kind": "unsendable", "message": text})
        return
    write(result, {"kind": "value", "form": form}, body)


if __name__ == "__main__":
    main(*sys.argv[1:4])
