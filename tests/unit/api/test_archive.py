"""What is left of a session without a sandbox."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import zstandard

from api.archive import JournalArchive
from provisioner.auth import Principal
from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.journals import Journals
from shoal.contract.actions import (
    Action,
    ActionList,
    ActionRecord,
    ActionRequest,
    Exec,
    ExecObservation,
    WriteFile,
)
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.identity import digest, kept_json
from shoal.contract.sessions import Session
from shoal.contract.states import ActionStatus, Scope, SessionState
from tests.unit.api.fakes import FULL_KEY, TENANT, ended
from tests.unit.api.test_routes import a_session

WHO = Principal(tenant=TENANT, key=FULL_KEY, scopes=frozenset((Scope.READ,)))
SESSION = SessionId("ses_1")
ENDED = ended(SESSION)
ENDING = replace(ENDED, state=SessionState.ENDING)


@dataclass
class Index:
    """Which epochs are flushed."""

    epochs: tuple[int, ...] = ()

    #: What is flushed while somebody waits; None: nothing, and the session goes on ending.
    later: tuple[int, ...] | None = None
    waited: float | None = None

    async def journals(self, who: Principal, id: SessionId) -> tuple[int, ...]:
        return self.epochs

    async def get(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Session:
        self.waited = wait_s
        if self.later is not None:
            self.epochs = self.later
        return a_session(id, SessionState.ENDING if self.later is None else SessionState.ENDED)


async def archive(*epochs: int) -> JournalArchive:
    blobs = FakeBlobs()
    for epoch in epochs:
        record = ActionRecord(
            id=f"a{epoch}", seq=epoch, epoch=epoch, status=ActionStatus.DONE, action=Exec(command="true")
        )
        line = record.model_dump_json().encode() + b"\n"
        await blobs.put(names.journal(SESSION, epoch), zstandard.ZstdCompressor().compress(line))
    return JournalArchive(sessions=Index(epochs), journals=Journals(blobs))


async def lines(found: JournalArchive, after_seq: int = 0) -> list[ActionRecord]:
    return [ActionRecord.model_validate_json(line) async for line in found.trajectory(WHO, ENDED, after_seq)]


async def test_all_epochs_are_one_trajectory() -> None:
    """Of every epoch whose journal is stored."""
    assert [record.seq for record in await lines(await archive(1, 2))] == [1, 2]
    assert [record.seq for record in await lines(await archive(1, 2), after_seq=1)] == [2]


async def test_a_journal_on_its_way_is_asked_for_again_and_not_told_as_empty() -> None:
    """While a session ends, what is not stored yet is `session_not_ready`, never a missing step."""
    found = await archive()
    with pytest.raises(ShoalError) as refused:
        await found.action(WHO, ENDING, "a1")
    assert refused.value.code is ErrorCode.SESSION_NOT_READY
    assert refused.value.retry_after_s
    with pytest.raises(ShoalError) as refused:
        _ = [line async for line in found.trajectory(WHO, ENDING, 0)]
    assert refused.value.code is ErrorCode.SESSION_NOT_READY


async def test_once_it_has_ended_what_is_not_there_was_never_made() -> None:
    """404 for the action, an empty trajectory for a session that never acted."""
    with pytest.raises(ShoalError) as refused:
        await (await archive()).action(WHO, ENDED, "a1")
    assert refused.value.code is ErrorCode.NOT_FOUND
    assert await lines(await archive()) == []


def step(
    id: str,
    action: Action,
    seq: int,
    exit_code: int = 0,
    status: ActionStatus = ActionStatus.DONE,
    **more: Any,
) -> bytes:
    """A line as an agent flushes it."""
    kept = kept_json(action)
    record = ActionRecord(
        id=id,
        seq=seq,
        epoch=1,
        status=status,
        action=json.loads(kept),
        observation=ExecObservation(exit_code=exit_code) if status is ActionStatus.DONE else None,
    )
    line = {**record.model_dump(mode="json"), "sha": digest(SESSION, action, kept), **more}
    return json.dumps(line).encode() + b"\n"


TRUE, SECRET = Exec(command="true"), Exec(command="env", env={"KEY": "s3cret"})
WRITE = WriteFile(path="/f", content="x")


async def flushed(*lines: bytes, index: Index | None = None) -> JournalArchive:
    blobs = FakeBlobs()
    await blobs.put(names.journal(SESSION, 1), zstandard.ZstdCompressor().compress(b"".join(lines)))
    return JournalArchive(sessions=index or Index((1,)), journals=Journals(blobs))


@pytest.mark.parametrize("action", [TRUE, SECRET, WRITE], ids=["exec", "secret", "write"])
async def test_a_step_is_replayed_from_the_archive_as_its_host_did(action: Action) -> None:
    """The same id and action: the record, marked as replayed; another action: a conflict, also where only a secret
    differs."""
    found = await flushed(step("a", action, 1))
    told = await found.replay(WHO, ENDED, ActionRequest(id="a", action=action))
    assert isinstance(told, ActionRecord)
    assert (told.id, told.seq, told.status, told.replayed) == ("a", 1, ActionStatus.DONE, True)
    assert await found.action(WHO, ENDED, "a") == told
    others: list[Action] = [Exec(command="false"), Exec(command="env", env={"KEY": "other"})]
    for other in others:
        with pytest.raises(ShoalError) as refused:
            await found.replay(WHO, ENDED, ActionRequest(id="a", action=other))
        assert refused.value.code is ErrorCode.ACTION_CONFLICT


async def test_what_was_not_done_is_not_replayed() -> None:
    """Unknown ids, no id, steps without an end, steps that a rewind undid, another incarnation."""
    found = await flushed(step("lost", TRUE, 1, status=ActionStatus.UNKNOWN), step("a", TRUE, 2))
    for asked in (
        ActionRequest(id="b", action=TRUE),
        ActionRequest(action=TRUE),
        ActionRequest(id="lost", action=TRUE),
        ActionRequest(id="a", action=TRUE, epoch=2),
    ):
        assert await found.replay(WHO, ENDED, asked) is None
    blobs = FakeBlobs()
    lineage = {"first_seq": 3, "restored_seq": 1}
    lines = {1: step("a", TRUE, 1) + step("b", TRUE, 2), 2: step("c", TRUE, 3, lineage=lineage)}
    for epoch, line in lines.items():
        await blobs.put(names.journal(SESSION, epoch), zstandard.ZstdCompressor().compress(line))
    found = JournalArchive(sessions=Index((1, 2)), journals=Journals(blobs))
    told = {
        id: await found.replay(WHO, replace(ENDED, epoch=2), ActionRequest(id=id, action=TRUE)) is not None
        for id in "abc"
    }
    assert told == {"a": True, "b": False, "c": True}


@pytest.mark.parametrize(
    ("codes", "keep_going", "told", "skipped"),
    [
        ([0, 0, 0], False, 3, 0),
        ([0, 1], False, 2, 1),
        ([0, 1, 0], True, 3, 0),
        ([0, 1], True, None, 0),
        ([0, 0], False, None, 0),
        ([], False, None, 0),
    ],
)
async def test_a_list_is_replayed_when_it_came_to_its_end(
    codes: list[int], keep_going: bool, told: int | None, skipped: int
) -> None:
    """To its last step, or to the first failure unless it was to go on; one that was cut off is not."""
    found = await flushed(*(step(f"l.{n}", TRUE, n + 1, code) for n, code in enumerate(codes)))
    asked = ActionRequest(id="l", actions=[TRUE] * 3, keep_going=keep_going)
    answer = await found.replay(WHO, ENDED, asked)
    if told is None:
        assert answer is None
        return
    assert isinstance(answer, ActionList)
    assert [record.id for record in answer.actions] == [f"l.{n}" for n in range(told)]
    assert (answer.id, answer.status, answer.skipped) == ("l", ActionStatus.DONE, skipped)


async def test_a_replay_waits_for_the_journal_of_a_session_that_ends() -> None:
    """As long as the request says; a step is never told as not made because its record is on its way."""
    asked = ActionRequest(id="a", action=TRUE, wait_s=7)
    index = Index((), later=(1,))
    told = await (await flushed(step("a", TRUE, 1), index=index)).replay(WHO, ENDING, asked)
    assert isinstance(told, ActionRecord)
    assert index.waited == 7
    with pytest.raises(ShoalError) as refused:
        await (await flushed(step("a", TRUE, 1), index=Index())).replay(WHO, ENDING, asked)
    assert refused.value.code is ErrorCode.SESSION_NOT_READY
    index = Index((1,))
    assert await (await flushed(step("a", TRUE, 1), index=index)).replay(WHO, ENDING, asked) is not None
    assert index.waited is None
