"""One epoch's journal: an append-only file, and an index of it in memory."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from runtime_image.agent.journal import records
from shoal.contract.states import ActionStatus

JOURNAL_FILE: Final = "journal"


@dataclass(slots=True)
class Entry:
    """One step in the index. `status` is `running` from the intent to the result."""

    id: str
    seq: int
    sha: str
    started_at: str
    status: ActionStatus
    intent: tuple[int, int]
    finished_at: str | None = None
    result: tuple[int, int] | None = None
    is_error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the journal holds of a step, as the JSON it is answered with; None where there is nothing yet."""

    action: bytes
    observation: bytes | None
    error: bytes | None


def stamp(at: datetime) -> str:
    """A time as the wire writes it: RFC 3339, UTC, microseconds."""
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def record_json(
    session: str,
    epoch: int,
    entry: Entry,
    recorded: Recorded,
    *,
    status: ActionStatus | None = None,
    replayed: bool = False,
    extra: str = "",
) -> bytes:
    """An `ActionRecord` as JSON, made of bytes that are JSON already. `extra` is put before its closing brace."""
    finished = f'"{entry.finished_at}"' if entry.finished_at else "null"
    parts = [
        f'{{"id":{json.dumps(entry.id)},"session":"{session}","seq":{entry.seq},"epoch":{epoch},'
        f'"status":"{(status or entry.status).value}","action":'.encode(),
        recorded.action,
        b',"observation":' + recorded.observation if recorded.observation is not None else b"",
        b',"error":' + recorded.error if recorded.error is not None else b"",
        f',"started_at":"{entry.started_at}","finished_at":{finished},'
        f'"replayed":{"true" if replayed else "false"}{extra}}}'.encode(),
    ]
    return b"".join(parts)


class Journal:
    """The journal of one epoch of a session. Not safe for threads; appends are single writes, never synced: what the
    page cache holds survives the agent, and a host that dies takes its sandboxes with it.

    Opening one that exists recovers it: a torn tail is cut, steps without a result stay `running` until
    `settle` says what became of them.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = directory / JOURNAL_FILE
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._by_id: dict[str, Entry] = {}
        self._by_seq: dict[int, Entry] = {}
        self.last_seq = 0
        try:
            self._recover()
        except BaseException:
            os.close(self._fd)
            raise

    def _recover(self) -> None:
        size = os.fstat(self._fd).st_size
        if size:
            with mmap.mmap(self._fd, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
                for offset, length, head, _ in records.frames(view):
                    self._index(json.loads(head), (offset, length))
                    self._size = offset + length
        if self._size != size:
            os.ftruncate(self._fd, self._size)

    def _index(self, head: dict[str, object], where: tuple[int, int]) -> None:
        seq = int(str(head["seq"]))
        if head["k"] == "i":
            entry = Entry(
                str(head["id"]), seq, str(head["sha"]), str(head["at"]), ActionStatus.RUNNING, intent=where
            )
            self._by_id[entry.id] = entry
            self._by_seq[seq] = entry
            self.last_seq = max(self.last_seq, seq)
        elif seq in self._by_seq:
            entry = self._by_seq[seq]
            entry.status = ActionStatus(str(head["status"]))
            entry.finished_at = str(head["at"])
            entry.result = where
            entry.is_error = bool(head.get("e"))

    def _append(self, head: bytes, body: bytes) -> tuple[int, int]:
        frame = records.encode(head, body)
        view = memoryview(frame)
        offset = self._size
        try:
            done = 0
            while done < len(frame):
                done += os.pwrite(self._fd, view[done:], offset + done)
        except OSError:
            os.ftruncate(self._fd, offset)
            raise
        self._size = offset + len(frame)
        return offset, len(frame)

    def intent(self, *, seq: int, id: str, sha: str, action: bytes, at: datetime) -> Entry:
        """Record that a step is about to start.

        Raises:
            OSError: It could not be written; nothing is recorded, and the step must not start.
        """
        started = stamp(at)
        head = f'{{"k":"i","seq":{seq},"id":{json.dumps(id)},"sha":"{sha}","at":"{started}"}}'.encode()
        entry = Entry(id, seq, sha, started, ActionStatus.RUNNING, intent=self._append(head, action))
        self._by_id[id] = entry
        self._by_seq[seq] = entry
        self.last_seq = max(self.last_seq, seq)
        return entry

    def result(
        self, entry: Entry, *, status: ActionStatus, body: bytes, at: datetime, is_error: bool = False
    ) -> None:
        """Record how a step ended: `body` is its observation, or its error's detail.

        Raises:
            OSError: It could not be written; the step stays without a known end in the journal.
        """
        finished = stamp(at)
        tail = ',"e":true' if is_error else ""
        head = f'{{"k":"r","seq":{entry.seq},"status":"{status.value}","at":"{finished}"{tail}}}'.encode()
        entry.result = self._append(head, body)
        entry.status, entry.finished_at, entry.is_error = status, finished, is_error

    def get(self, id: str) -> Entry | None:
        """The step of this id, or None."""
        return self._by_id.get(id)

    def read(self, entry: Entry) -> Recorded:
        """What is recorded of a step, from the disk.

        Raises:
            ValueError: The record is damaged.
        """
        # One that is closed is still read, such as that of a sandbox that has ended.
        fd = self._fd if self._fd >= 0 else os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, action = records.parse(os.pread(fd, entry.intent[1], entry.intent[0]))
            if entry.result is None:
                return Recorded(action=action, observation=None, error=None)
            _, body = records.parse(os.pread(fd, entry.result[1], entry.result[0]))
        finally:
            if fd != self._fd:
                os.close(fd)
        if entry.is_error:
            return Recorded(action=action, observation=None, error=body)
        return Recorded(action=action, observation=body, error=None)

    def entries(self, after_seq: int = 0) -> Iterator[Entry]:
        """The steps after `after_seq`, by seq."""
        for seq in sorted(self._by_seq):
            if seq > after_seq:
                yield self._by_seq[seq]

    def unsettled(self) -> list[Entry]:
        """Steps without a result, by seq."""
        return [entry for entry in self.entries() if entry.result is None]

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def size_bytes(self) -> int:
        """How long the file is."""
        return self._size

    def close(self) -> None:
        """Append no more, and give the descriptor back; what is recorded can still be read. Repeatable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
