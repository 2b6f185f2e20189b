"""How a function call travels: files that go in, and the result file that comes out."""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import msgpack  # type: ignore[import-untyped]

from shoal.client.errors import PythonMismatch, RemoteError, ResultError
from shoal.contract.actions import File
from shoal.contract.execute import Executed

Form = Literal["json", "msgpack", "pickle"]
_PLACE = "/tmp/.shoal-call"
_RESULT = "/tmp/.shoal-result"
_STRIP = ("tests", "test", "__pycache__")
_pickling = threading.Lock()


def result_path() -> str:
    """Where the call leaves its result."""
    return _RESULT


def invocation_argv(form: Form) -> list[str]:
    """The program that makes the call. `-B`: nothing is compiled for a single use."""
    return ["python3", "-B", f"{_PLACE}/remote_call.py", _PLACE, _RESULT, form]


def _base64(path: str, content: bytes) -> File:
    return File(path=path, content=base64.b64encode(content).decode("ascii"), encoding="base64")


def call_files(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], form: Form
) -> list[File]:
    """The files of one call."""
    raw = pickled((function, args, kwargs), function)
    files = [
        File(path=f"{_PLACE}/python", content="{}.{}\n".format(*sys.version_info[:2])),
        File(path=f"{_PLACE}/remote_call.py", content=_wrapper()),
        _base64(f"{_PLACE}/call.pkl", raw),
    ]
    if b"cloudpickle" in raw or form != "json":
        files.append(_base64(f"{_PLACE}/lib.zip", _library(form == "msgpack")))
    return files


def pickled(value: Any, function: Callable[..., Any]) -> bytes:
    """By cloudpickle; the function's own package by value when it is not one that an image could have."""
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    with _pickling:  # the registry is one for the process
        if module is None or not _is_own(module):
            return bytes(cloudpickle.dumps(value))
        module = sys.modules.get(module.__name__.partition(".")[0], module)
        known = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not known:
            cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps(value))
        finally:
            if not known:
                cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: ModuleType) -> bool:
    """Whether a module is the user's: neither of Python nor installed, so that no image has it."""
    if module.__name__ == "__main__":
        return False  # cloudpickle takes it by value anyhow
    origin = getattr(module, "__file__", None)
    if origin is None:
        return False
    path = Path(origin).resolve()
    places = {
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    return not any(path.is_relative_to(place) for place in places)


@functools.cache
def _wrapper() -> str:
    spec = importlib.util.find_spec("shoal.client.remote_call")
    if spec is None or spec.origin is None:
        raise RuntimeError("shoal.client.remote_call is not installed")
    return Path(spec.origin).read_text(encoding="utf-8")


@functools.cache
def _library(with_msgpack: bool) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (cloudpickle, msgpack) if with_msgpack else (cloudpickle,):
            root = Path(str(package.__file__)).parent
            for path in sorted(root.rglob("*.py")):
                inside = path.relative_to(root.parent)
                if not set(inside.parts) & set(_STRIP):
                    archive.writestr(
                        zipfile.ZipInfo(inside.as_posix()), path.read_bytes(), zipfile.ZIP_DEFLATED
                    )
    return held.getvalue()


def value_of(executed: Executed, form: Form) -> Any:
    """The call's result.

    Raises:
        PythonMismatch: The image has another Python.
        RemoteError: The function raised, or its process ended without a result.
        ResultError: Its result is not data of the format, or is not what was asked for.
    """
    seen = executed.observation
    stdout, stderr = (seen.stdout, seen.stderr) if seen is not None else ("", "")
    told = next((file.content for file in executed.files if file.path == _RESULT), None)
    if told is None:
        raise RemoteError(_why_nothing(executed), stdout=stdout, stderr=stderr)
    line, _, body = base64.b64decode(told).partition(b"\n")
    try:
        head = json.loads(line)
        kind = head["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError("the result is not one of a call", stdout=stdout, stderr=stderr) from error
    if kind == "python_mismatch":
        raise PythonMismatch("{}.{}".format(*sys.version_info[:2]), str(head.get("there")))
    if kind == "error":
        raise RemoteError(
            f"{head.get('type')}: {head.get('message')}",
            kind=str(head.get("type")),
            remote_traceback=str(head.get("traceback", "")),
            stdout=stdout,
            stderr=stderr,
        )
    if kind != "value":
        raise ResultError(str(head.get("message", "no result")), stdout=stdout, stderr=stderr)
    # The format is what was asked for, not what the sandbox says that it is.
    try:
        if form == "json":
            return json.loads(body)
        if form == "msgpack":
            return msgpack.unpackb(body, raw=False, strict_map_key=False)
        return cloudpickle.loads(body)
    except Exception as error:
        raise ResultError(
            f"the result cannot be read as {form}: {error}", stdout=stdout, stderr=stderr
        ) from error


def _why_nothing(executed: Executed) -> str:
    seen = executed.observation
    if seen is None:
        return "the call ended without a result"
    if seen.error is not None:
        return f"the call did not start: {seen.error.message} (the image needs python3)"
    if seen.oom_killed:
        return "the call ran out of memory; give it more by resources={'memory_mib': ...}"
    if seen.timed_out:
        return "the call ran into its time-out; give it more by timeout_s=..."
    if seen.signal is not None:
        return f"the call's process ended by signal {seen.signal}"
    return f"the call's process exited with {seen.exit_code} and left no result: {seen.stderr[-1000:]}"
