"""What is left of a session that has no sandbox any more: its flushed journals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from provisioner.auth import Principal
from provisioner.journals import Journals
from provisioner.sessions import Location
from shoal.contract.actions import ActionRecord
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import SessionState


class JournalIndex(Protocol):
    """Which epochs of a session have their journals in the blob store."""

    async def journals(self, who: Principal, id: SessionId) -> tuple[int, ...]:
        """Oldest first."""


class JournalArchive:
    """Reads actions and trajectories of ended sessions."""

    def __init__(self, *, sessions: JournalIndex, journals: Journals) -> None:
        self._sessions = sessions
        self._journals = journals

    async def action(self, who: Principal, location: Location, action: str) -> ActionRecord:
        """The newest record of one action.

        Raises:
            ShoalError: NOT_FOUND; SESSION_NOT_READY while the journal is on its way to the blob store.
        """
        epochs = await self._sessions.journals(who, location.session)
        record = await self._journals.find(location.session, epochs, action)
        if record is not None:
            return record
        _refuse_while_ending(location)
        raise ShoalError(ErrorCode.NOT_FOUND, f"session {location.session} has no action {action}")

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


def _refuse_while_ending(location: Location) -> None:
    if location.state is SessionState.ENDING:
        raise ShoalError(
            ErrorCode.SESSION_NOT_READY,
            f"session {location.session} is ending: its journal is being stored",
            retry_after_s=0.5,
            details={"state": location.state.value, "epoch": location.epoch},
        )
