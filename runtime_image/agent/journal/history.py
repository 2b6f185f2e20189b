"""The earlier epochs of a session: their recorded steps, and which of them this disk still holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import zstandard

from runtime_image.agent.journal.flush import Lineage
from shoal.contract.states import ActionStatus

#: How many ids of lost steps a status names.
MAX_LOST = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """A step of an earlier epoch. `line` is its record as JSON."""

    id: str
    seq: int
    epoch: int
    sha: str
    status: ActionStatus
    line: bytes


class Epoch:
    """One epoch's flushed journal, kept compressed in memory-sized pieces on the disk and read on demand."""

    def __init__(self, number: int, path: Path | None) -> None:
        """`path` is a file of JSON lines; None is an epoch without steps."""
        self.number = number
        self.lineage: Lineage | None = None
        self._path = path
        self._index: dict[str, tuple[int, int, int]] = {}
        if path is None:
            return
        offset = 0
        with path.open("rb") as file:
            for line in file:
                head = json.loads(line)
                if self.lineage is None and head.get("lineage"):
                    self.lineage = Lineage(**head["lineage"])
                self._index[head["id"]] = (int(head["seq"]), offset, len(line))
                offset += len(line)

    @classmethod
    def unpack(cls, number: int, blob: Path, into: Path) -> Epoch:
        """From the flushed form. Blocking: for a thread."""
        with blob.open("rb") as source, into.open("wb") as out:
            zstandard.ZstdDecompressor().copy_stream(source, out)
        return cls(number, into)

    def seqs(self) -> Iterator[tuple[str, int]]:
        """(id, seq) of its steps, by seq."""
        for id, (seq, _, _) in self._index.items():
            yield id, seq

    def get(self, id: str) -> Past | None:
        """The step of this id, read from the disk."""
        at = self._index.get(id)
        if at is None or self._path is None:
            return None
        with self._path.open("rb") as file:
            file.seek(at[1])
            line = file.read(at[2]).rstrip(b"\n")
        head = json.loads(line)
        return Past(
            id=id,
            seq=at[0],
            epoch=self.number,
            sha=head.get("sha", ""),
            status=ActionStatus(head["status"]),
            line=line,
        )


class History:
    """Earlier epochs, newest first in effect: the last record of an id counts."""

    def __init__(self, epochs: Mapping[int, Epoch], *, restored_seq: int | None) -> None:
        """`restored_seq` is that of the present epoch, None when it did not begin with a rewind."""
        self._epochs = [epochs[number] for number in sorted(epochs)]
        self._floors: dict[int, int | None] = {}
        floor = restored_seq
        for epoch in reversed(self._epochs):
            self._floors[epoch.number] = floor
            own = epoch.lineage.restored_seq if epoch.lineage else None
            if own is not None:
                floor = own if floor is None else min(floor, own)

    def held(self, epoch: int, seq: int) -> bool:
        """Whether the present disk holds the effects of that step."""
        floor = self._floors.get(epoch)
        return floor is None or seq <= floor

    def get(self, id: str) -> Past | None:
        """The newest record of `id`; its status is `rolled_back` when this disk does not hold it."""
        for epoch in reversed(self._epochs):
            past = epoch.get(id)
            if past is None:
                continue
            if self.held(past.epoch, past.seq):
                return past
            return Past(
                id=id,
                seq=past.seq,
                epoch=past.epoch,
                sha=past.sha,
                status=ActionStatus.ROLLED_BACK,
                line=with_fields(past.line, status=ActionStatus.ROLLED_BACK.value),
            )
        return None

    def lost(self) -> list[str]:
        """Ids of the recorded steps that this disk does not hold, oldest first, `MAX_LOST` at the most."""
        found: dict[str, None] = {}
        for epoch in self._epochs:
            for id, seq in epoch.seqs():
                if not self.held(epoch.number, seq):
                    found[id] = None
        return list(found)[:MAX_LOST]

    def lines(self, after_seq: int) -> Iterator[bytes]:
        """Records after `after_seq` by epoch and seq, each with its newline."""
        for epoch in self._epochs:
            for id, seq in epoch.seqs():
                past = epoch.get(id) if seq > after_seq else None
                if past is not None:
                    held = self.held(past.epoch, past.seq)
                    line = (
                        past.line if held else with_fields(past.line, status=ActionStatus.ROLLED_BACK.value)
                    )
                    yield with_fields(line) + b"\n"


def with_fields(line: bytes, **fields: object) -> bytes:
    """A record's JSON with fields changed, and without those that only the flushed form has."""
    record = json.loads(line)
    record.pop("sha", None)
    record.pop("lineage", None)
    record.update(fields)
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
