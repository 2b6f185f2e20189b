"""What is left of a session that has no sandbox any more: its flushed journals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from provisioner.auth import Principal
from provisioner.journals import Journals, Kept
from provisioner.sessions import Location
from shoal.contract.actions import Action, ActionList, ActionRecord, ActionRequest
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.identity import digest, kept_json
from shoal.contract.sessions import Session
from shoal.contract.states import ActionStatus, SessionState


class JournalIndex(Protocol):
    """Which epochs of a session have their journals in the blob store."""

    async def journals(self, who: Principal, id: SessionId) -> tuple[int, ...]:
        """Oldest first."""

    async def get(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Session:
        """A session; `wait_s` waits for its state to change."""


class JournalArchive:
    """Reads actions and trajectories of ended sessions."""

    def __init__(self, *, sessions: JournalIndex, journals: Journals) -> None:
        self._sessions = sessions
        self._journals = journals

    async def action(self, who: Principal, location: Location, action: str) -> ActionRecord:
        """The newest record of one action, as its host would answer it.

        Raises:
            ShoalError: NOT_FOUND; SESSION_NOT_READY while the journal is on its way to the blob store.
        """
        epochs = await self._sessions.journals(who, location.session)
        kept = (await self._journals.find(location.session, epochs, [action])).get(action)
        if kept is not None:
            return _replayed(kept.record)
        _refuse_while_ending(location)
        raise ShoalError(ErrorCode.NOT_FOUND, f"session {location.session} has no action {action}")

    async def replay(
        self, who: Principal, location: Location, asked: ActionRequest
    ) -> ActionRecord | ActionList | None:
        """What a request that was made before was answered, as its host would answer it; None when it was not, or not
        to its end. While the journal is on its way to the blob store it is waited for, as long as the request says.

        Raises:
            ShoalError: ACTION_CONFLICT when the id was another action's; SESSION_NOT_READY while the journal is on its
                way.
        """
        if asked.id is None or (asked.epoch is not None and asked.epoch != location.epoch):
            return None
        epochs = await self._sessions.journals(who, location.session)
        if location.state is SessionState.ENDING and location.epoch not in epochs:
            session = await self._sessions.get(who, location.session, wait_s=asked.wait_s)
            epochs = await self._sessions.journals(who, location.session)
            if session.state is SessionState.ENDING and location.epoch not in epochs:
                _refuse_while_ending(location)
        if asked.action is not None:
            wanted = {asked.id: asked.action}
        else:
            wanted = {f"{asked.id}.{n}": action for n, action in enumerate(asked.actions or ())}
        kept = await self._journals.find(location.session, epochs, wanted)
        records: list[ActionRecord] = []
        for id, action in wanted.items():
            record = _same(location.session, id, action, kept.get(id))
            if record is None:
                return None
            records.append(record)
            if _failed(record) and not asked.keep_going:
                break
        if asked.action is not None:
            return records[0]
        return ActionList(
            id=asked.id, status=ActionStatus.DONE, actions=records, skipped=len(wanted) - len(records)
        )

    async def trajectory(self, who: Principal, location: Location, after_seq: int) -> AsyncIterator[bytes]:
        """The log as JSON lines, ordered by epoch and seq.

        Raises:
            ShoalError: SESSION_NOT_READY while the journal is on its way to the blob store.
        """
        epochs = await self._sessions.journals(who, location.session)
        if location.epoch not in epochs:
            _refuse_while_ending(location)
        async for line in self._journals.lines(location.session, epochs, after_seq=after_seq):
            yield line


def _same(session: SessionId, id: str, action: Action, kept: Kept | None) -> ActionRecord | None:
    """The record of this very action, if it is one of a step that was done and that the disk held at last."""
    if kept is None or kept.record.status is ActionStatus.ROLLED_BACK:
        return None
    if kept.sha and kept.sha != digest(session, action, kept_json(action)):
        raise ShoalError(
            ErrorCode.ACTION_CONFLICT,
            f"Action {id} was used with another action; give this one another id.",
            details={"id": id},
        )
    if kept.record.status is not ActionStatus.DONE:
        return None
    return _replayed(kept.record)


def _replayed(record: ActionRecord) -> ActionRecord:
    """As a host tells what it has from its journal."""
    return record.model_copy(update={"replayed": True})


def _failed(record: ActionRecord) -> bool:
    return record.error is not None or (record.observation is not None and record.observation.failed)


def _refuse_while_ending(location: Location) -> None:
    if location.state is SessionState.ENDING:
        raise ShoalError(
            ErrorCode.SESSION_NOT_READY,
            f"session {location.session} is ending: its journal is being stored",
            retry_after_s=0.5,
            details={"state": location.state.value, "epoch": location.epoch},
        )
