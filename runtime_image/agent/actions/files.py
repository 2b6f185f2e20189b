"""File actions: done by a helper of the guest, inside the sandbox, as the session's user. The sandbox's own programs
are not used; what its system refuses is an observation."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.processes import group_name
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.link import OperationError
from shoal.contract.actions import (
    EditFile,
    EditFileObservation,
    FileEntry,
    FileError,
    ListFiles,
    ListFilesObservation,
    Match,
    NearLine,
    ReadFile,
    ReadFileObservation,
    Search,
    SearchObservation,
    WriteFile,
    WriteFileObservation,
)
from shoal.contract.text import to_bytes, to_text

Kind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
_KINDS: Final[dict[str, Kind]] = {
    "file": "file",
    "directory": "directory",
    "symlink": "symlink",
    "fifo": "fifo",
    "socket": "socket",
}
_MATCH_CHARS: Final = 1000


async def operate(bench: Bench, run: ActionRun, op: Mapping[str, Any]) -> dict[str, Any]:
    """One operation in the step's kill group; what went wrong in the sandbox is under `error`."""
    assert run.entry is not None
    if run.kill_reason is not None:
        return _killed(run)
    if run.group is None:
        run.group = bench.group(group_name(run.entry.seq))
    request = {"user": bench.user, "cwd": bench.workdir, **op}
    try:
        return await bench.link.file_op(request, procs_fd=run.group.procs_fd)
    except OperationError as error:
        killed: str | None = run.kill_reason
        if killed is not None:
            return _killed(run)
        if error.errno_name:
            return {"error": {"errno": error.errno_name, "message": error.message}}
        return {"error": {"errno": "ENOMEM", "message": "the operation was killed, likely out of memory"}}


def _killed(run: ActionRun) -> dict[str, Any]:
    why = "took too long" if run.kill_reason == "timeout" else "was killed"
    return {"error": {"errno": "EINTR", "message": f"the operation {why}"}}


def _error(result: Mapping[str, Any]) -> FileError | None:
    error = result.get("error")
    if error is None:
        return None
    return FileError(errno=str(error["errno"]), message=str(error["message"]))


def _time(nanoseconds: int) -> datetime:
    # What a sandbox may set as a file's time goes beyond what a date can say.
    seconds = min(max(nanoseconds / 1e9, -62135596800), 253402300799)
    return datetime.fromtimestamp(seconds, UTC)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


async def read_file(bench: Bench, run: ActionRun, action: ReadFile) -> ReadFileObservation:
    """Perform a `read_file`."""
    op: dict[str, Any] = {"op": "read", "path": action.path}
    if action.lines is None:
        op |= {"offset": action.offset, "limit": action.limit}
    else:
        first, last = action.lines
        if first < 1 or (last != -1 and last < first):
            problem = FileError(errno="EINVAL", message="`lines` is [first, last], from 1; -1 is the end")
            return ReadFileObservation(error=problem, encoding=action.encoding)
        op |= {"lines": True, "offset": first - 1, "limit": None if last == -1 else last - first + 1}
    result = await operate(bench, run, op)
    error = _error(result)
    if error is not None:
        return ReadFileObservation(error=error, encoding=action.encoding)
    data: bytes = result["content"]
    content, lossy = to_text(data, action.encoding)
    total_lines: int | None = None
    if result.get("eof") and (action.lines is not None or action.offset == 0):
        count = data.count(b"\n") + (not data.endswith(b"\n") if data else 0)
        # Lines before those asked for are known to be there only when some of those are.
        if action.lines is None or action.lines[0] == 1 or count:
            total_lines = (action.lines[0] - 1 if action.lines else 0) + count
    return ReadFileObservation(
        content=content,
        content_lossy=lossy,
        encoding=action.encoding,
        size_bytes=result["size_bytes"],
        truncated=not result.get("eof", True),
        total_lines=total_lines,
        mode=result["mode"],
        mtime=_time(result["mtime_ns"]),
    )


async def write_file(bench: Bench, run: ActionRun, action: WriteFile) -> WriteFileObservation:
    """Perform a `write_file`."""
    try:
        content = to_bytes(action.content, action.encoding)
    except ValueError:
        return WriteFileObservation(error=FileError(errno="EINVAL", message="`content` is not base64"))
    op = {
        "op": "write",
        "path": action.path,
        "content": content,
        "mode": action.mode,
        "create_parents": action.create_parents,
    }
    result = await operate(bench, run, op)
    error = _error(result)
    if error is not None:
        return WriteFileObservation(error=error)
    return WriteFileObservation(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


async def edit_file(bench: Bench, run: ActionRun, action: EditFile) -> EditFileObservation:
    """Perform an `edit_file`."""
    op = {
        "op": "edit",
        "path": action.path,
        "old": action.old.encode("utf-8", "surrogatepass"),
        "new": action.new.encode("utf-8", "surrogatepass"),
        "occurrences": action.occurrences,
    }
    result = await operate(bench, run, op)
    error = _error(result)
    if error is not None:
        return EditFileObservation(error=error)
    return EditFileObservation(
        replacements=result["replacements"],
        diff=_text(result.get("diff") or b""),
        found=result.get("matches") or 0,
        near=[NearLine(line=near["line"], text=_text(near["text"])) for near in result.get("near") or ()],
    )


async def list_files(bench: Bench, run: ActionRun, action: ListFiles) -> ListFilesObservation:
    """Perform a `list_files`."""
    op = {
        "op": "list",
        "path": action.path,
        "depth": action.depth,
        "glob": action.glob,
        "max_entries": action.max_entries,
    }
    result = await operate(bench, run, op)
    error = _error(result)
    if error is not None:
        return ListFilesObservation(error=error)
    base = os.fsencode(action.path).rstrip(b"/") + b"/"
    entries = [
        FileEntry(
            path=_text(entry["path"].removeprefix(base)),
            kind=_KINDS.get(entry["kind"], "device"),
            size_bytes=entry["size_bytes"],
            mode=entry["mode"],
            mtime=_time(entry["mtime_ns"]),
            link_target=None if entry.get("link_target") is None else _text(entry["link_target"]),
        )
        for entry in result["entries"]
    ]
    return ListFilesObservation(
        entries=sorted(entries, key=lambda entry: entry.path), truncated=bool(result.get("truncated"))
    )


async def search(bench: Bench, run: ActionRun, action: Search) -> SearchObservation:
    """Perform a `search`; one that takes longer than its time-out is killed, with what pattern it ever ran."""
    op = {
        "op": "search",
        "path": action.path,
        "pattern": action.pattern,
        "glob": action.glob,
        "max_results": action.max_results,
    }
    run.killer = asyncio.get_running_loop().call_later(action.timeout_s, run.kill, "timeout")
    try:
        result = await operate(bench, run, op)
    finally:
        run.killer.cancel()
    error = _error(result)
    if error is not None and run.kill_reason == "timeout":
        return SearchObservation(timed_out=True, truncated=True)
    if error is not None:
        return SearchObservation(error=error)
    matches = [
        Match(path=_text(match["path"]), line=match["line"], text=_text(match["text"])[:_MATCH_CHARS])
        for match in result["matches"]
    ]
    return SearchObservation(matches=matches, truncated=bool(result.get("truncated")))
