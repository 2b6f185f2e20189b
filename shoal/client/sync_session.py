"""A session's handle for threads. Its twin is shoal.client.async_session; a test holds them alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, Unpack

from shoal.client import building, transfer
from shoal.client.effects import Op
from shoal.client.options import CodeOptions, CreateOptions, ExecOptions, NetworkLike, StepOptions
from shoal.client.results import (
    CodeResult,
    DiffResult,
    EditResult,
    ExecResult,
    ListResult,
    ReadResult,
    SearchResult,
    WriteResult,
)
from shoal.client.session_core import SessionCore
from shoal.client.steps import StepCounter
from shoal.client.sync_running import Python, Running, Shell
from shoal.contract import actions
from shoal.contract.actions import ActionList, ActionRecord, Tty
from shoal.contract.base import Wire
from shoal.contract.errors import ShoalError
from shoal.contract.sessions import Event
from shoal.contract.sessions import Session as SessionInfo
from shoal.contract.snapshots import Snapshot

if TYPE_CHECKING:
    from shoal.client.sync_client import Shoal
    from shoal.client.sync_group import SessionGroup

T = TypeVar("T")

#: Seconds that leaving a block by an exception may take to end its session; the TTL ends what stays.
EXIT_S = 15.0


class Session:
    """A session: a stateful environment that outlives its hosts and this process.

    As a context manager it ends the session when the block is left normally. Left by an exception or a signal, a named
    session is kept, so that the script can be run again and fast-forwards; an unnamed one is ended. `keep` True or
    False overrides both.
    """

    def __init__(self, shoal: Shoal, core: SessionCore, keep: bool | None = None) -> None:
        self._shoal = shoal
        self._core = core
        self._keep = keep
        self._entered_in: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Session, (self._shoal, self._core, self._keep))

    def __repr__(self) -> str:
        name = f" {self.info.name!r}" if self.info.name else ""
        return f"<Session {self.id}{name} {self.info.state} epoch {self.info.epoch}>"

    def _run(self, op: Op[T]) -> T:
        return self._shoal._run(op)

    @property
    def id(self) -> str:
        """The session's id."""
        return self._core.info.id

    @property
    def info(self) -> SessionInfo:
        """The session as last heard of; `refresh()` asks."""
        return self._core.info

    @property
    def counter(self) -> StepCounter:
        """Where this handle's step ids come from."""
        return self._core.steps

    def steps(self, prefix: str) -> Session:
        """A handle of the same session whose steps are `<prefix>-1`, `<prefix>-2`, ...: one for each thread, task or
        process that acts on its own. It does not end the session."""
        return Session(self._shoal, self._core.with_steps(prefix), keep=True)

    def __enter__(self) -> Session:
        self._entered_in = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered_in != os.getpid():
            return  # a forked child leaves the block: the session is its parent's
        kept = self._keep if self._keep is not None else (kind is not None and self.info.name is not None)
        if kept:
            return
        if kind is None:
            self.delete()
            return
        try:
            self._run(self._core.delete(EXIT_S))
        except (ShoalError, OSError):
            pass  # the block's own exception matters more; the session's TTL ends it

    # Commands and code

    def exec(self, command: str | Sequence[str], **options: Unpack[ExecOptions]) -> ExecResult:
        """Runs a command to its end: a string by bash (sh where there is none), a list as it is.

        A non-zero exit, a time-out and out-of-memory are results, not exceptions; `.check()` raises on them.
        """
        return self._run(self._core.exec(command, options))

    def start(
        self,
        command: str | Sequence[str],
        *,
        stdin_open: bool = False,
        tty: tuple[int, int] | None = None,
        **options: Unpack[ExecOptions],
    ) -> Running:
        """Starts a command in the background, without a default time-out. `tty` (rows, columns) gives it a terminal."""
        values: dict[str, Any] = {**options, "stdin_open": stdin_open or None}
        if tty is not None:
            values["tty"] = Tty(rows=tty[0], cols=tty[1])
        return Running(self, self._run(self._core.start(command, values)))

    def running(self, record: ActionRecord) -> Running:
        """A handle of an action by its record, such as one of the trajectory."""
        return Running(self, record)

    def run_code(self, code: str, **options: Unpack[CodeOptions]) -> CodeResult:
        """Runs a program given as text, in `language` (python unless said otherwise)."""
        return self._run(self._core.run_code(code, options))

    def shell(self, name: str = "main") -> Shell:
        """A persistent shell."""
        return Shell(self, name)

    def python(self, name: str = "main") -> Python:
        """A persistent Python interpreter (the image needs python3)."""
        return Python(self, name)

    def sequence(
        self, listed: Sequence[Wire], *, keep_going: bool = False, **options: Unpack[StepOptions]
    ) -> ActionList:
        """Runs a list of contract actions (`shoal.contract.actions`) in order by one call; stops at the first failure
        unless `keep_going`."""
        return self._run(self._core.sequence(listed, options, keep_going=keep_going))

    # Files, as steps of the trajectory

    def read_file(
        self,
        path: str,
        *,
        offset: int | None = None,
        limit: int | None = None,
        lines: tuple[int, int] | None = None,
        encoding: actions.Encoding | None = None,
        **options: Unpack[StepOptions],
    ) -> ReadResult:
        """Reads a file, or a part: bytes from `offset`, or `lines` (first, last) from 1, -1 being the end."""
        fields = building.given(
            {"path": path, "offset": offset, "limit": limit, "lines": lines, "encoding": encoding}
        )
        action = building.model(actions.ReadFile, {"type": "read_file", **fields})
        return self._run(self._core.do(action, options, ReadResult))

    def write_file(
        self,
        path: str,
        content: str | bytes,
        *,
        mode: int | None = None,
        create_parents: bool | None = None,
        **options: Unpack[StepOptions],
    ) -> WriteResult:
        """Writes a whole file: aside, then renamed."""
        text, encoding = building.text(content)
        fields = building.given(
            {
                "path": path,
                "content": text,
                "mode": mode,
                "create_parents": create_parents,
                "encoding": encoding,
            }
        )
        action = building.model(actions.WriteFile, {"type": "write_file", **fields})
        return self._run(self._core.do(action, options, WriteResult))

    def edit(
        self, path: str, *, old: str, new: str, occurrences: int | None = None, **options: Unpack[StepOptions]
    ) -> EditResult:
        """Replaces `old` by `new` where it occurs exactly `occurrences` times (once); else nothing is written and the
        result tells the count and near lines."""
        fields = building.given({"path": path, "old": old, "new": new, "occurrences": occurrences})
        action = building.model(actions.EditFile, {"type": "edit_file", **fields})
        return self._run(self._core.do(action, options, EditResult))

    def list_files(
        self,
        path: str = ".",
        *,
        depth: int | None = None,
        glob: str | None = None,
        max_entries: int | None = None,
        **options: Unpack[StepOptions],
    ) -> ListResult:
        """Lists a directory, sorted by path."""
        fields = building.given({"path": path, "depth": depth, "glob": glob, "max_entries": max_entries})
        action = building.model(actions.ListFiles, {"type": "list_files", **fields})
        return self._run(self._core.do(action, options, ListResult))

    def search(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        max_results: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[StepOptions],
    ) -> SearchResult:
        """Searches files for a regular expression, line by line."""
        fields = building.given(
            {
                "path": path,
                "pattern": pattern,
                "glob": glob,
                "max_results": max_results,
                "timeout_s": timeout_s,
            }
        )
        action = building.model(actions.Search, {"type": "search", **fields})
        return self._run(self._core.do(action, options, SearchResult))

    def diff(self, since: str | Snapshot = "start", **options: Unpack[StepOptions]) -> DiffResult:
        """Paths added, changed and removed since the start or since a snapshot."""
        action = building.model(actions.Diff, {"type": "diff", "since": building.snapshot_id(since)})
        return self._run(self._core.do(action, options, DiffResult))

    # Files, raw: any size, not steps

    def upload(
        self,
        source: str | os.PathLike[str] | bytes | BinaryIO,
        path: str,
        *,
        mode: int | None = None,
        owner: str | None = None,
        create_parents: bool | None = None,
    ) -> None:
        """Writes a local file, bytes or an open file to `path`; a local directory is unpacked into it."""
        options = {"mode": mode, "owner": owner, "create_parents": create_parents}
        making = transfer.upload_of(source)
        upload = making.__enter__()
        try:
            self._run(transfer.put(self._core, upload, path, options))
        finally:
            making.__exit__(None, None, None)

    def download(self, path: str, target: str | os.PathLike[str] | BinaryIO) -> None:
        """Reads a file to a local path, in one step, or to an open file; a directory is unpacked into a local path."""
        if isinstance(target, str | os.PathLike):
            with transfer.download_to(target) as (sink, place):
                self._run(transfer.get(self._core, path, sink))
                place()
        else:
            self._run(transfer.get(self._core, path, transfer.StreamSink(target)))

    def read_bytes(self, path: str) -> bytes:
        """A file's bytes, whole.

        Raises:
            FileNotFoundError: There is none.
        """
        sink = transfer.MemorySink(path)
        return self._run(sink.fetch(self._core))

    # The session itself

    def refresh(self) -> SessionInfo:
        """The session as it is now."""
        return self._run(self._core.refresh())

    def ready(self, timeout_s: float | None = None) -> SessionInfo:
        """Waits until it runs. Not needed before acting: actions wait by themselves.

        Raises:
            SessionEnded: It ended instead.
            WaitTimeout: `timeout_s` passed.
        """
        return self._run(self._core.ready(timeout_s))

    def snapshot(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        step: str | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Snapshot:
        """A durable copy of the disk. A script that runs again gets the one it made before.

        Raises:
            SnapshotFailed: It failed and left nothing.
        """
        return self._run(self._core.snapshot(labels, step, wait=wait, timeout_s=timeout_s))

    def fork(self, count: int = 1, **options: Unpack[CreateOptions]) -> SessionGroup:
        """`count` new sessions that start from this one's disk as it is now; in its run, unless said otherwise."""
        snapshot = self.snapshot()
        if self.info.run is not None:
            options.setdefault("run", self.info.run)
        return self._shoal.sessions(snapshot=snapshot, count=count, **options)

    def replace(
        self, origin: Literal["image", "last_snapshot"] = "image", *, timeout_s: float | None = None
    ) -> SessionInfo:
        """Throws the sandbox away; the same session goes on in a new one, from its image or its last snapshot. Then
        `ack()` says that the loss of later steps' effects was seen."""
        return self._run(self._core.replace(origin, timeout_s))

    def ack(self, epoch: int | None = None) -> SessionInfo:
        """Acknowledges the rewind into `epoch` (None: the present one)."""
        return self._run(self._core.ack(epoch))

    def pause(self) -> SessionInfo:
        """Freezes processes and gives memory back; any later request resumes."""
        return self._run(self._core.command("pause", None, timeout_s=None, wait=False))

    def resume(self) -> SessionInfo:
        """Resumes ahead of the next request."""
        return self._run(self._core.command("resume", None, timeout_s=None))

    def extend(self, ttl_s: int) -> SessionInfo:
        """Lets it live `ttl_s` seconds from now."""
        return self._run(self._core.patch({"ttl_s": ttl_s}))

    def update(
        self,
        *,
        ttl_s: int | None = None,
        idle_pause_s: int | None = None,
        idle_timeout_s: int | None = None,
        labels: Mapping[str, str] | None = None,
        network: NetworkLike | None = None,
    ) -> SessionInfo:
        """Changes what is given; None leaves it as it is."""
        values = {"ttl_s": ttl_s, "idle_pause_s": idle_pause_s, "idle_timeout_s": idle_timeout_s}
        changed = building.given({**values, "labels": building.plain(labels), "network": network})
        return self._run(self._core.patch(changed))

    def events(self) -> list[Event]:
        """What happened to it, oldest first: waits, placements, restores, limits, the end."""
        return self._run(self._core.events())

    def trajectory(self, after_seq: int = 0) -> list[ActionRecord]:
        """Its recorded steps, oldest first, also after it ended."""
        return self._run(self._core.trajectory(after_seq))

    def delete(self) -> None:
        """Ends it, from any state; may be repeated."""
        self._run(self._core.delete())
