"""The journal: what was written before a crash is there after it, whole records only, in any order of damage."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_image.agent.journal import flush, records
from runtime_image.agent.journal.file import JOURNAL_FILE, Journal, record_json
from runtime_image.agent.journal.flush import Lineage
from runtime_image.agent.journal.history import Epoch, History
from shoal.contract.actions import ActionRecord
from shoal.contract.states import ActionStatus

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
ACTION = b'{"type":"exec","command":"true"}'
OBSERVATION = b'{"type":"exec","exit_code":0}'


def _write(journal: Journal, *ids: str, first_seq: int = 1, settle: bool = True) -> None:
    for seq, id in enumerate(ids, first_seq):
        entry = journal.intent(seq=seq, id=id, sha="s" + id, action=ACTION, at=AT)
        if settle:
            journal.result(entry, status=ActionStatus.DONE, body=OBSERVATION, at=AT)


def test_records_survive_a_restart(tmp_path: Path) -> None:
    """Reopened, the journal answers what was recorded, and tells what has no end."""
    journal = Journal(tmp_path)
    _write(journal, "a", "b")
    journal.intent(seq=3, id="c", sha="x", action=ACTION, at=AT)
    journal.close()
    again = Journal(tmp_path)
    assert again.last_seq == 3
    assert [entry.id for entry in again.unsettled()] == ["c"]
    entry = again.get("b")
    assert entry is not None
    record = ActionRecord.model_validate_json(
        record_json("ses_1", 2, entry, again.read(entry), replayed=True)
    )
    assert (record.id, record.seq, record.epoch, record.status, record.replayed) == ("b", 2, 2, "done", True)
    assert record.started_at == AT
    again.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(min_value=0, max_value=2000), noise=st.binary(max_size=40))
def test_a_torn_tail_is_cut_and_the_rest_kept(tmp_path: Path, cut: int, noise: bytes) -> None:
    """Wherever a write broke off, and whatever stands behind it, exactly the whole records before are there, and
    writing goes on after them."""
    directory = tmp_path / f"{cut}-{noise.hex()[:20]}"
    journal = Journal(directory)
    ends = []
    for seq in range(1, 11):
        _write(journal, f"id{seq}", first_seq=seq)
        ends.append(journal.size_bytes)
    journal.close()
    path = directory / JOURNAL_FILE
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data))] + noise)
    again = Journal(directory)
    whole = sum(end <= cut for end in ends)
    settled = [entry for entry in again.entries() if entry.result is not None]
    if not noise:
        assert len(settled) == whole
    assert [entry.seq for entry in settled] == list(range(1, len(settled) + 1))
    assert path.stat().st_size == again.size_bytes
    _write(again, "next", first_seq=50)
    again.close()
    last = Journal(directory)
    assert last.get("next") is not None
    last.close()


def test_a_record_that_was_changed_is_not_read(tmp_path: Path) -> None:
    """A flipped byte ends the journal there: it is never answered as if it were true."""
    journal = Journal(tmp_path)
    _write(journal, "a", "b")
    journal.close()
    path = tmp_path / JOURNAL_FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    again = Journal(tmp_path)
    assert [entry.id for entry in again.unsettled()] == ["b"]
    again.close()


def test_what_floods_is_stored_small(tmp_path: Path) -> None:
    """A megabyte of the same line takes a few kilobytes, and comes back whole."""
    journal = Journal(tmp_path)
    entry = journal.intent(seq=1, id="a", sha="s", action=ACTION, at=AT)
    body = json.dumps({"type": "exec", "stdout": "y\n" * 500_000}).encode()
    journal.result(entry, status=ActionStatus.DONE, body=body, at=AT)
    assert journal.size_bytes < 10_000
    assert journal.read(entry).observation == body
    journal.close()


def test_a_frame_that_claims_too_much_is_not_believed() -> None:
    """A length beyond the limit ends reading instead of allocating it."""
    huge = (records.MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little") + bytes(5)
    assert list(records.frames(memoryview(huge + bytes(100)))) == []


@pytest.fixture
def three_epochs(tmp_path: Path) -> dict[int, Epoch]:
    """1: a b c (seq 1 to 3). 2 went back to seq 1: d e (4, 5). 3 went back to seq 4: b again (6)."""
    made = {}
    for number, ids, first, restored in ((1, "abc", 1, None), (2, "de", 4, 1), (3, "b", 6, 4)):
        journal = Journal(tmp_path / str(number))
        _write(journal, *ids, first_seq=first)
        blob = tmp_path / f"{number}.zst"
        flush.pack(journal, "ses_1", number, Lineage(first_seq=first, restored_seq=restored), blob)
        journal.close()
        made[number] = Epoch.unpack(number, blob, tmp_path / f"{number}.jsonl")
    return made


def test_history_knows_what_the_disk_still_holds(three_epochs: dict[int, Epoch]) -> None:
    """Every rewind on the way counts: b and c went with the second epoch, e with the third."""
    history = History(three_epochs, restored_seq=None)
    assert {id: past.status for id in "abcde" if (past := history.get(id)) is not None} == {
        "a": ActionStatus.DONE,
        "b": ActionStatus.DONE,
        "c": ActionStatus.ROLLED_BACK,
        "d": ActionStatus.DONE,
        "e": ActionStatus.ROLLED_BACK,
    }
    assert history.get("nothing") is None
    assert history.lost() == ["b", "c", "e"]
    assert [json.loads(line)["status"] for line in history.lines(0)] == [
        "done", "rolled_back", "rolled_back", "done", "rolled_back", "done"
    ]  # fmt: skip
    assert [json.loads(line)["seq"] for line in history.lines(4)] == [5, 6]


def test_a_rewind_to_the_image_loses_everything(three_epochs: dict[int, Epoch]) -> None:
    """restored_seq 0: no step of any epoch is held."""
    history = History(three_epochs, restored_seq=0)
    assert all(past.status is ActionStatus.ROLLED_BACK for id in "abcde" if (past := history.get(id)))


def test_flushed_lines_are_action_records(three_epochs: dict[int, Epoch]) -> None:
    """What is flushed reads as the contract's records; the fields of our own are not answered on."""
    past = three_epochs[1].get("a")
    assert past is not None
    assert ActionRecord.model_validate_json(past.line).seq == 1
    assert past.sha == "sa"
    line = next(iter(History(three_epochs, restored_seq=None).lines(0)))
    assert {"sha", "lineage"}.isdisjoint(json.loads(line))
