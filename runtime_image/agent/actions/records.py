"""What is recorded of a session's steps, in this epoch and those before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from runtime_image.agent.journal.file import Journal, record_json
from runtime_image.agent.journal.history import History, with_fields
from shoal.contract.actions import Action, ActionRecord
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.identity import digest, kept_json
from shoal.contract.states import ActionStatus


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A step that was recorded: its `ActionRecord` as JSON."""

    record: bytes
    status: ActionStatus
    seq: int

    @property
    def failed(self) -> bool:
        """Whether a list of steps stops at it."""
        parsed = ActionRecord.model_validate_json(self.record)
        return parsed.error is not None or (parsed.observation is not None and parsed.observation.failed)


def check_same(id: str, known: str, sha: str | None) -> None:
    """Raise `action_conflict` when `sha` is that of another action."""
    if sha is not None and known and known != sha:
        raise ShoalError(
            ErrorCode.ACTION_CONFLICT,
            f"Action {id} was used with another action; give this one another id.",
            details={"id": id},
        )


class Records:
    """Reads the records of one incarnation's session; the epochs before are fetched when first needed."""

    def __init__(
        self, *, session: str, epoch: int, journal: Journal, history: Callable[[], Awaitable[History]] | None
    ) -> None:
        """`history` is None for a session's first epoch."""
        self.session = session
        self.epoch = epoch
        self._journal = journal
        self._history = history

    def digest(self, action: Action) -> tuple[bytes, str]:
        """(the action as it is kept, what tells it from others)."""
        kept = kept_json(action)
        return kept, digest(self.session, action, kept)

    async def find(self, id: str, *, sha: str | None = None) -> Replay | None:
        """The record of a step; None when there is none. A step of this epoch without an end is `running`.

        Raises:
            ShoalError: `action_conflict` when `sha` is another action's; `unavailable` when earlier epochs cannot be
                read now.
        """
        entry = self._journal.get(id)
        if entry is not None:
            check_same(id, entry.sha, sha)
            record = record_json(self.session, self.epoch, entry, self._journal.read(entry), replayed=True)
            return Replay(record=record, status=entry.status, seq=entry.seq)
        if self._history is None:
            return None
        past = (await self._history()).get(id)
        if past is None:
            return None
        if past.status is not ActionStatus.ROLLED_BACK:
            check_same(id, past.sha, sha)
        return Replay(record=with_fields(past.line, replayed=True), status=past.status, seq=past.seq)

    def known_here(self, id: str) -> bool:
        """Whether this epoch has a record of that id."""
        return self._journal.get(id) is not None

    async def lines(self, after_seq: int) -> AsyncIterator[bytes]:
        """The trajectory after `after_seq`: JSON lines by epoch and seq. What runs now is told as `running`."""
        if self._history is not None:
            for line in (await self._history()).lines(after_seq):
                yield line
        for n, entry in enumerate(list(self._journal.entries(after_seq))):
            yield record_json(self.session, self.epoch, entry, self._journal.read(entry)) + b"\n"
            if n % 64 == 63:
                # Reading is from the page cache, but long journals shall not hold the loop.
                await asyncio.sleep(0)
