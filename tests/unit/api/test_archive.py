"""What is left of a session without a sandbox."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import zstandard

from api.archive import JournalArchive
from provisioner.auth import Principal
from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.journals import Journals
from shoal.contract.actions import ActionRecord, Exec
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import ActionStatus, Scope, SessionState
from tests.unit.api.fakes import FULL_KEY, TENANT, ended

WHO = Principal(tenant=TENANT, key=FULL_KEY, scopes=frozenset((Scope.READ,)))
SESSION = SessionId("ses_1")
ENDED = ended(SESSION)
ENDING = replace(ENDED, state=SessionState.ENDING)


@dataclass
class Index:
    """Which epochs are flushed."""

    epochs: tuple[int, ...] = ()

    async def journals(self, who: Principal, id: SessionId) -> tuple[int, ...]:
        return self.epochs


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
