"""Flushed journals are read back whole, across epochs."""

from __future__ import annotations

import json
from typing import Any

import zstandard

from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.journals import Journals
from shoal.contract.actions import ActionRecord
from shoal.contract.base import SessionId
from shoal.contract.states import ActionStatus

SESSION = SessionId("ses_1")


def line(epoch: int, seq: int, id: str, *, restored_seq: int | None = None, stdout: str = "") -> bytes:
    """A line as an agent flushes it: a record, and two fields that only journals have."""
    record: dict[str, Any] = {
        "id": id,
        "session": SESSION,
        "seq": seq,
        "epoch": epoch,
        "status": "done",
        "action": {"type": "exec", "command": "true"},
        "observation": {"type": "exec", "exit_code": 0, "stdout": stdout},
        "started_at": "2026-01-01T00:00:00.000000Z",
        "finished_at": "2026-01-01T00:00:01.000000Z",
        "replayed": False,
        "sha": "00",
        "lineage": {"first_seq": 1, "restored_seq": restored_seq},
    }
    return json.dumps(record).encode() + b"\n"


async def journals(*epochs: list[bytes]) -> Journals:
    blobs = FakeBlobs()
    for number, lines in enumerate(epochs, 1):
        if lines:
            packed = zstandard.ZstdCompressor().compress(b"".join(lines))
            await blobs.put(names.journal(SESSION, number), packed)
    return Journals(blobs)


async def read(found: Journals, epochs: list[int], after_seq: int = 0) -> list[ActionRecord]:
    lines = found.lines(SESSION, epochs, after_seq=after_seq)
    return [ActionRecord.model_validate_json(one) async for one in lines]


async def test_a_trajectory_is_told_in_order_and_from_a_seq_on() -> None:
    """By epoch and seq; the journal's own fields are not in it."""
    found = await journals([line(1, 1, "a"), line(1, 2, "b")], [], [line(3, 5, "c")])
    assert [one.id for one in await read(found, [1, 2, 3])] == ["a", "b", "c"]
    assert [one.id for one in await read(found, [1, 2, 3], after_seq=1)] == ["b", "c"]
    async for one in found.lines(SESSION, [1]):
        assert "lineage" not in json.loads(one)


async def test_steps_that_a_rewind_undid_are_rolled_back() -> None:
    """Epoch 2 began at seq 1 of epoch 1: what came after it is told as rolled back."""
    found = await journals([line(1, 1, "a"), line(1, 2, "b")], [line(2, 3, "b", restored_seq=1)])
    told = [(one.id, one.epoch, one.status) for one in await read(found, [1, 2])]
    assert told == [
        ("a", 1, ActionStatus.DONE),
        ("b", 1, ActionStatus.ROLLED_BACK),
        ("b", 2, ActionStatus.DONE),
    ]


async def test_the_newest_record_of_an_id_counts() -> None:
    """An id that ran anew after a rewind answers what it did then; one that did not, the older record."""
    found = await journals([line(1, 1, "a"), line(1, 2, "b")], [line(2, 3, "b", restored_seq=0)])
    kept = await found.find(SESSION, [1, 2], ["a", "b", "nothing"])
    newest = kept["b"].record
    assert (newest.epoch, newest.status, kept["b"].sha) == (2, ActionStatus.DONE, "00")
    assert kept["a"].record.status is ActionStatus.ROLLED_BACK
    assert "nothing" not in kept


async def test_lines_larger_than_any_piece_are_put_together() -> None:
    """What compresses a thousandfold, and what does not compress, come out as they went in."""
    flood = "y\n" * 2_000_000
    found = await journals([line(1, 1, "a", stdout=flood), line(1, 2, "b")])
    records = await read(found, [1])
    assert [one.id for one in records] == ["a", "b"]
    assert records[0].observation is not None
    assert records[0].observation.stdout == flood  # type: ignore[union-attr]


async def test_an_epoch_without_steps_has_no_journal() -> None:
    """A missing object is an empty one."""
    assert await read(await journals([]), [1]) == []
