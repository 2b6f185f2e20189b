"""The agent's side of the link to one guest."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from typing import Any

from .connection import Connection
from .errors import LinkClosedError, LinkError, OperationError, SpawnError
from .files import RESULT_LIMIT_BYTES, FileReader, FileWriter, file_op
from .process import GuestProcess
from .records import MAX_OUTPUT_LIMIT_BYTES, CodeSpec, ProcessSpec

# Bytes of stdin that ride on the spawn request itself.
_INLINE_STDIN = 32 << 10
_ID_BYTES = 256
# What a guest may claim to have kept for an agent that takes over: processes, and bytes of output.
_KEPT_PROCESSES = 4096
_KEPT_BYTES = 256 << 20
# Ended processes that may wait to be forgotten: how many, how long, and how much one may keep meanwhile.
_FORGET_BATCH = 32
_FORGET_DELAY_S = 1.0
_FORGET_AT_ONCE_BYTES = 64 << 10


class GuestLink(Connection):
    """A live link: processes and files of one sandbox. Made by `GuestLink.connect`.

    One at a time may exist for a guest; a new one takes over from the last.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._by_id: dict[str, GuestProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_forget: list[str] = []
        self._forget_timer: asyncio.TimerHandle | None = None

    # Processes.

    async def spawn(self, spec: ProcessSpec, *, procs_fd: int | None = None) -> GuestProcess:
        """Start a process.

        Args:
            spec: what to run.
            procs_fd: an open `cgroup.procs` of the kill group it shall be in before it execs; stays
                the caller's.

        Returns:
            The process, once it has become the program.

        Raises:
            SpawnError: nothing was started.
            LinkClosedError: the guest is gone; whether it was started is unknown.
        """
        if (spec.argv is None) == (spec.command is None):
            raise SpawnError(22, "give argv or command", "request")
        request: dict[str, Any] = {
            "op": "spawn",
            "cwd": spec.cwd,
            "env": dict(spec.env),
            "user": spec.user,
            "stdin": spec.stdin if isinstance(spec.stdin, str) else "bytes",
            "login": spec.login,
            "tty": None if spec.tty is None else list(spec.tty),
            "shell": spec.shell,
            "shell_kind": spec.shell_kind,
            "open_files": spec.open_files,
        }
        if spec.argv is not None:
            request["argv"] = list(spec.argv)
        else:
            request["command"] = spec.command
        return await self._start(spec.process_id, spec.output_limit_bytes, request, spec.stdin, procs_fd)

    async def run_code_context(self, spec: CodeSpec, *, procs_fd: int | None = None) -> GuestProcess:
        """Run code in the context `spec.context`: the image's own python3, whose state lives on.

        The process ends when the code has run; an exception is a traceback on stderr and exit code 1.
        `GuestProcess.result_value` is the value of the last expression. The interpreter joins the
        kill group of `procs_fd` for each code it runs; killed, it starts anew at the next, whose exit
        says `context_restarted`.

        Raises:
            SpawnError: ENOENT at stage "command": the image has no python3; EBUSY at stage
                "context": it is running other code.
            LinkClosedError: the guest is gone.
        """
        request: dict[str, Any] = {
            "op": "spawn",
            "context": spec.context,
            "code": spec.code,
            "python": spec.python,
            "cwd": spec.cwd,
            "env": dict(spec.env),
            "user": spec.user,
            "stdin": spec.stdin if isinstance(spec.stdin, str) else "bytes",
        }
        return await self._start(spec.process_id, spec.output_limit_bytes, request, spec.stdin, procs_fd)

    async def _start(
        self, process_id: str, limit: int, request: dict[str, Any], stdin: bytes | str, procs_fd: int | None
    ) -> GuestProcess:
        if process_id in self._by_id:
            raise SpawnError(17, f"process {process_id} exists", "request")
        if not 0 < len(process_id.encode()) <= _ID_BYTES or not 0 <= limit <= MAX_OUTPUT_LIMIT_BYTES:
            raise SpawnError(22, "process_id or output_limit_bytes out of range", "request")
        feed: bytes | None = None
        if isinstance(stdin, bytes):
            if len(stdin) <= _INLINE_STDIN:
                request["stdin_data"] = stdin
            else:
                feed = stdin
        handle = next(self._ids)
        process = GuestProcess(self, process_id, handle, limit)
        # From here on frames about it may come, also when the caller is cancelled while it starts.
        self._processes[handle] = process
        self._by_id[process_id] = process
        request |= {"id": process_id, "handle": handle, "limit": limit, "forget": self._take_forgets()}
        try:
            answer = await self.request(request, {} if procs_fd is None else {"procs": procs_fd})
            process.pid = _pid(answer, self)
        except OperationError as err:
            self._drop(process)
            raise SpawnError(err.errno, err.message, err.stage) from None
        process.begin(stdin_open=stdin == "open" or feed is not None or request.get("tty") is not None)
        if feed is not None:
            self._background(self._feed(process, feed))
        return process

    async def _feed(self, process: GuestProcess, data: bytes) -> None:
        try:
            await process.write_stdin(data)
            await process.close_stdin()
        except LinkError:
            # The process or the guest ended first; its exit tells.
            pass

    def _drop(self, process: GuestProcess) -> None:
        self._processes.pop(process.handle, None)
        if self._by_id.get(process.process_id) is process:
            del self._by_id[process.process_id]

    async def processes(self) -> list[GuestProcess]:
        """Everything the guest still keeps, for an agent that took over.

        Each runs, or has ended and was not forgotten. The guest sends what it kept of their output
        from the start, then goes on, so that no byte within the cap and no exit is lost.
        """
        found: list[GuestProcess] = []
        kept = 0
        after = ""
        while True:
            answer = await self.request({"op": "list", "after": after})
            page = answer.get("processes")
            if not isinstance(page, list):
                raise self.violation("a list without processes")
            if not page:
                return found
            for item in page:
                process_id = item.get("process_id") if isinstance(item, dict) else None
                if not isinstance(process_id, str) or process_id <= after:
                    raise self.violation("a list out of order")
                after = process_id
                process = self._by_id.get(process_id) or await self._attach(process_id, item)
                found.append(process)
                kept += process.limit_bytes
                if len(found) > _KEPT_PROCESSES or kept > _KEPT_BYTES:
                    raise self.violation("more processes than an agent would have left")

    async def _attach(self, process_id: str, item: dict[str, Any]) -> GuestProcess:
        limit, age_us, received = (item.get(key) for key in ("limit", "age_us", "stdin_received"))
        if not isinstance(limit, int) or not 0 <= limit <= MAX_OUTPUT_LIMIT_BYTES:
            raise self.violation("a process with an odd limit")
        handle = next(self._ids)
        process = GuestProcess(self, process_id, handle, limit)
        if isinstance(age_us, int) and 0 <= age_us < 1 << 53:
            process.started_monotonic -= age_us / 1e6
        process.pid = _pid(item, self)
        received = received if isinstance(received, int) and 0 <= received < 1 << 62 else 0
        process.begin(stdin_open=item.get("stdin_open") is True, stdin_received=received)
        self._processes[handle] = process
        try:
            await self.request({"op": "attach", "id": process_id, "handle": handle})
        except OperationError:
            del self._processes[handle]
            raise
        self._by_id[process_id] = process
        return process

    async def forget(self, process_id: str) -> None:
        """Free what the guest keeps of a process; call once its result is safe. Repeatable.

        A process that still runs goes on, but nothing is heard of it any more.
        """
        await self.request({"op": "forget", "ids": [process_id]})
        process = self._by_id.get(process_id)
        if process is not None:
            self._drop(process)
            process.on_closed(LinkClosedError("the process was forgotten"))

    def forget_later(self, process: GuestProcess) -> None:
        """As `forget`, for a process that has ended: told to the guest with the next `spawn`, or soon.

        It costs no frame of its own while actions follow each other. What kept much is told at once.
        """
        self._drop(process)
        if self.closed.is_set():
            return
        self._to_forget.append(process.process_id)
        kept = process.stdout.kept_bytes + process.stderr.kept_bytes
        if kept > _FORGET_AT_ONCE_BYTES or len(self._to_forget) >= _FORGET_BATCH:
            self._send_forgets()
        elif self._forget_timer is None:
            self._forget_timer = asyncio.get_running_loop().call_later(_FORGET_DELAY_S, self._send_forgets)

    def _take_forgets(self) -> list[str]:
        forgets, self._to_forget = self._to_forget, []
        return forgets

    def _send_forgets(self) -> None:
        self._forget_timer = None
        forgets = self._take_forgets()
        if forgets and not self.closed.is_set():
            ident, _ = self.begin_request({"op": "forget", "ids": forgets}, {})
            self.abandon_request(ident, cancel=False)

    # Files. Each operation is a helper process of the guest, in the kill group of `procs_fd` if that
    # is given, and acts as `user` (as in ProcessSpec; None: root) from directory `cwd` (None: /).

    async def file_op(
        self, op: Mapping[str, Any], *, procs_fd: int | None = None, limit_bytes: int = RESULT_LIMIT_BYTES
    ) -> dict[str, Any]:
        """Do one operation on the sandbox's files.

        `op["op"]` says which; `path` is text (surrogate escapes for odd bytes) or bytes; all take
        `user` and `cwd`. What comes back from the sandbox as names or content is bytes.

            read    offset, limit, lines: count lines instead of bytes (0-based) -> content, eof,
                    truncated (more than 16 MiB were asked for), and the file's kind, size_bytes,
                    mode, mtime_ns, uid, gid (as below: "stat fields")
            write   content (bytes), mode, owner, create_parents -> created, stat fields
            edit    old, new (text or bytes), occurrences (1; None: all) -> replacements, matches,
                    diff (bytes), diff_truncated, stat fields; or, nothing written, replacements 0,
                    matches, near [{line, text}]
            list    depth (1; None is 1), glob, max_entries (10,000) -> entries [{path, link_target,
                    stat fields}], truncated, skipped (unreadable directories)
            search  pattern, glob, max_results (1,000), ignore_case, literal -> matches [{path, line,
                    text, cut: the line is longer}], truncated, files, skipped
            stat    follow (True) -> link_target, stat fields
            mkdir   mode, owner, parents -> created, stat fields
            remove  recursive, missing_ok -> removed

        Returns:
            The result; what the user sees as a file error is `{"error": {"errno": "ENOENT",
            "message": ...}}`. Sizes are bounded by `limit_bytes`, which shows as `truncated`.

        Raises:
            WorkerKilledError: killed before it was done (kill group, out of memory).
            LinkClosedError: the guest is gone.
        """
        return await file_op(self, op, procs_fd=procs_fd, limit_bytes=limit_bytes)

    async def open_read(
        self,
        path: str | bytes,
        *,
        user: str | None = None,
        cwd: str | None = None,
        procs_fd: int | None = None,
    ) -> FileReader:
        """Stream a file of any size, or a directory as a tar (PAX).

        Raises:
            FileError: it cannot be read.
        """
        return await FileReader.open(self, {"path": path, "user": user, "cwd": cwd}, procs_fd)

    async def open_write(
        self,
        path: str | bytes,
        *,
        mode: int | None = None,
        owner: str | None = None,
        create_parents: bool = False,
        user: str | None = None,
        cwd: str | None = None,
        procs_fd: int | None = None,
    ) -> FileWriter:
        """Write a file of any size; in place at `commit`, at once.

        Args:
            path: a symlink is kept, its target written.
            mode: None: of the file that is there, else 0644.
            owner: `user`, `user:group`, `:group`, numbers too; None: as it is, else `user`.
            create_parents: make missing directories, 0755.
            user, cwd, procs_fd: as for all file operations.

        Raises:
            FileError: it cannot be written.
        """
        body = {"do": "write", "path": path, "mode": mode, "owner": owner, "user": user, "cwd": cwd}
        return await FileWriter.open(self, {**body, "create_parents": create_parents}, procs_fd)

    async def open_write_tar(
        self,
        path: str | bytes,
        *,
        create_parents: bool = False,
        user: str | None = None,
        cwd: str | None = None,
        procs_fd: int | None = None,
    ) -> FileWriter:
        """Unpack a tar (plain or gzip) below `path`, which is made if absent.

        Raises:
            FileError: it cannot be written.
        """
        body = {"do": "extract", "path": path, "user": user, "cwd": cwd}
        return await FileWriter.open(self, {**body, "create_parents": create_parents}, procs_fd)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _pid(answer: dict[str, Any], link: Connection) -> int:
    pid = answer.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 1 << 32:
        raise link.violation("a process without pid")
    return pid
