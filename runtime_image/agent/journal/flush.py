"""A journal's form in the blob store: one zstd stream of JSON lines, a line an `ActionRecord`, ordered by seq.

Each line carries two more fields, which readers of `ActionRecord` ignore: `sha` (of the action, so that a later epoch
can tell the same step from another one of the same id) and `lineage` (`first_seq`, and `restored_seq` when this epoch
began with a rewind, so that a later epoch can tell which earlier steps the disk still holds). An epoch without steps
has no object: a reader takes a missing one as empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from runtime_image.agent.journal.file import Journal, record_json


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where an epoch's disk came from: `restored_seq` is the last step it held at its start, None without a rewind."""

    first_seq: int
    restored_seq: int | None = None


def lines(journal: Journal, session: str, epoch: int, lineage: Lineage) -> Iterator[bytes]:
    """The flushed lines of a journal, each with its newline."""
    tail = json.dumps({"first_seq": lineage.first_seq, "restored_seq": lineage.restored_seq})
    for entry in journal.entries():
        extra = f',"sha":"{entry.sha}","lineage":{tail}'
        yield record_json(session, epoch, entry, journal.read(entry), extra=extra) + b"\n"


def pack(journal: Journal, session: str, epoch: int, lineage: Lineage, out: Path) -> int:
    """Write the flushed form to `out`; gives its size in bytes. Blocking: for a thread."""
    with out.open("wb") as raw, zstandard.ZstdCompressor(level=3).stream_writer(raw) as writer:
        for line in lines(journal, session, epoch, lineage):
            writer.write(line)
    return out.stat().st_size
