"""The journals of this host: where they are on the disk, how they reach the blob store, and the epochs before."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from runtime_image.agent.control import ControlPlane
from runtime_image.agent.journal import flush
from runtime_image.agent.journal.file import Journal
from runtime_image.agent.journal.flush import Lineage
from runtime_image.agent.journal.history import Epoch, History
from runtime_image.agent.transfer import Transfer, TransferError
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxStart
from shoal.contract.states import EndReason
from shoal.contract.urls import JournalGet, JournalPut

_ABOUT = "about.json"
_RAN = "ran"
_ENDED = "ended.json"
_FLUSHED = "flushed"


@dataclass(frozen=True, kw_only=True)
class Left:
    """A journal that an earlier agent left.

    Attributes:
        spec: What its sandbox was, without values of its environment.
        ran: Whether the sandbox ever ran.
        flushed: Whether the journal is in the blob store.
        end: Why it was being ended; None when it was not.
    """

    spec: SandboxStart
    ran: bool
    flushed: bool
    end: tuple[EndReason, str | None] | None


class Journals:
    """Journals below one directory: `<session>/<epoch>/`."""

    def __init__(self, root: Path, control: ControlPlane, transfer: Transfer) -> None:
        self._root = root
        self._control = control
        self._transfer = transfer
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def directory(self, session: str, epoch: int) -> Path:
        """Where an epoch's journal is."""
        return self._root / session / str(epoch)

    def open(self, spec: SandboxStart) -> Journal:
        """The journal of an epoch, made or recovered. Beside it stands what its sandbox was, without values of its
        environment, so that it can still be answered and flushed when only the disk is left."""
        directory = self.directory(spec.session, spec.epoch)
        journal = Journal(directory)
        about = directory / _ABOUT
        if not about.exists():
            about.write_text(spec.model_copy(update={"env": {}}).model_dump_json())
        return journal

    def left(self) -> Iterator[Left]:
        """The journals on the disk, by session and epoch. What cannot be read is left out."""
        for about in sorted(self._root.glob(f"*/*/{_ABOUT}")):
            try:
                spec = SandboxStart.model_validate_json(about.read_bytes())
            except (ValidationError, OSError):
                continue
            directory = about.parent
            yield Left(
                spec=spec,
                ran=(directory / _RAN).exists(),
                flushed=(directory / _FLUSHED).exists(),
                end=_read_end(directory / _ENDED),
            )

    def mark_ran(self, session: str, epoch: int) -> None:
        """The sandbox runs: from now on steps may have been made in it."""
        (self.directory(session, epoch) / _RAN).touch()

    def mark_ended(self, session: str, epoch: int, reason: EndReason, detail: str | None) -> None:
        """The sandbox is being ended, and why."""
        directory = self.directory(session, epoch)
        if directory.exists():
            (directory / _ENDED).write_text(json.dumps([reason.value, detail]))

    def forget(self, session: str, epoch: int) -> None:
        """Remove an epoch's journal from the disk; harmless when there is none."""
        shutil.rmtree(self.directory(session, epoch), ignore_errors=True)
        try:
            (self._root / session).rmdir()
        except OSError:
            pass

    async def flush(self, journal: Journal, session: SessionId, epoch: int, lineage: Lineage) -> None:
        """Bring a whole journal into the blob store. One without steps needs no object.

        Raises:
            ShoalError: The control plane gave no URL.
            TransferError: The object store did not take it.
        """
        directory = self.directory(session, epoch)
        if len(journal):
            blob = directory / "flush.zst"
            await asyncio.to_thread(flush.pack, journal, session, epoch, lineage, blob)
            (url,) = await self._control.urls([JournalPut(session=session, epoch=epoch)])
            await self._transfer.put(url, blob)
            blob.unlink(missing_ok=True)
        if directory.exists():
            (directory / _FLUSHED).touch()

    async def history(self, spec: SandboxStart) -> History:
        """The epochs before `spec`'s, fetched from the blob store.

        Raises:
            ShoalError: `unavailable`: they cannot be read now, so that nobody knows which steps were made.
        """
        restored = (spec.restored_seq or 0) if spec.rewound else None
        epochs = await self._epochs(spec.session, spec.epoch, sorted(set(spec.history)))
        return History({epoch.number: epoch for epoch in epochs}, restored_seq=restored)

    async def _epochs(self, session: SessionId, present: int, numbers: Sequence[int]) -> list[Epoch]:
        if not numbers:
            return []
        into = self.directory(session, present)
        into.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            urls = await self._control.urls([JournalGet(session=session, epoch=n) for n in numbers])
            epochs: list[Epoch] = []
            for number, url in zip(numbers, urls, strict=True):
                blob = into / f"history-{number}.zst"
                try:
                    await self._transfer.get(url, blob)
                except TransferError as error:
                    if not error.missing:
                        raise
                    epochs.append(Epoch(number, None))
                    continue
                lines = into / f"history-{number}.jsonl"
                epochs.append(await asyncio.to_thread(Epoch.unpack, number, blob, lines))
                blob.unlink()
        except (ShoalError, TransferError, OSError, ValueError) as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE,
                "The session's earlier records cannot be read at the moment.",
                retry_after_s=1.0,
            ) from error
        return epochs


def _read_end(path: Path) -> tuple[EndReason, str | None] | None:
    try:
        reason, detail = json.loads(path.read_text())
        return EndReason(reason), detail
    except (OSError, ValueError, TypeError):
        return None
