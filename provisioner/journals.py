"""Journals of sandboxes that are gone, read from the blob store.

An agent flushes each epoch's journal as one zstd stream of JSON lines, a line an `ActionRecord` ordered by seq. Each
line also has `lineage`: `first_seq`, and `restored_seq` where that epoch's disk began as of an earlier step: recorded
steps after it are `rolled_back`. An epoch without steps has no object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import zstandard

from provisioner.blobs import names
from provisioner.blobs.port import BlobMissing, Blobs
from shoal.contract.actions import ActionRecord
from shoal.contract.base import SessionId
from shoal.contract.states import ActionStatus

#: Compressed bytes that are unpacked at a time; journals of floods unpack a thousandfold.
_PIECE_BYTES = 65_536
_UNPACKED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A record, and what tells its action from others of the same id (`shoal.contract.identity.digest`); empty where
    the journal does not tell."""

    record: ActionRecord
    sha: str


class Journals:
    """Reads the flushed journals of ended sessions and of earlier epochs."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def find(
        self, session: SessionId, epochs: Sequence[int], actions: Collection[str]
    ) -> dict[str, Kept]:
        """The newest record of each of these actions, by their ids; those that have none are left out.

        Args:
            epochs: The session's epochs whose journals are in the blob store.
        """
        floors = await self._floors(session, epochs)
        wanted = set(actions)
        found: dict[str, Kept] = {}
        for epoch in sorted(epochs, reverse=True):
            async for line in self._epoch(session, epoch):
                fields = json.loads(line)
                if fields["id"] in wanted:
                    wanted.discard(fields["id"])
                    found[fields["id"]] = Kept(
                        record=_record(fields, floors.get(epoch)), sha=fields.get("sha", "")
                    )
                if not wanted:
                    return found
        return found

    async def lines(
        self, session: SessionId, epochs: Sequence[int], *, after_seq: int = 0
    ) -> AsyncIterator[bytes]:
        """Records with a greater seq than `after_seq`, ordered by epoch and seq: JSON, each with its newline."""
        floors = await self._floors(session, epochs)
        for epoch in sorted(epochs):
            async for line in self._epoch(session, epoch):
                fields = json.loads(line)
                if (fields.get("seq") or 0) > after_seq:
                    yield _record(fields, floors.get(epoch)).model_dump_json().encode() + b"\n"

    async def _floors(self, session: SessionId, epochs: Sequence[int]) -> dict[int, int]:
        """For each epoch the last seq that the newest disk still holds; epochs without one hold all of theirs."""
        floors: dict[int, int] = {}
        floor: int | None = None
        for epoch in sorted(epochs, reverse=True):
            if floor is not None:
                floors[epoch] = floor
            if epoch == min(epochs):
                break
            async for line in self._epoch(session, epoch):
                restored: int | None = (json.loads(line).get("lineage") or {}).get("restored_seq")
                if restored is not None:
                    floor = restored if floor is None else min(floor, restored)
                break
        return floors

    async def _epoch(self, session: SessionId, epoch: int) -> AsyncIterator[bytes]:
        """The lines of one epoch, without their newlines."""
        rest = bytearray()
        unpacker = zstandard.ZstdDecompressor().decompressobj(write_size=_UNPACKED_BYTES)
        chunks = self._blobs.get(names.journal(session, epoch))
        try:
            async for chunk in chunks:
                for start in range(0, len(chunk), _PIECE_BYTES):
                    piece = chunk[start : start + _PIECE_BYTES]
                    rest += await asyncio.to_thread(unpacker.decompress, piece)
                    lines = rest.split(b"\n")
                    rest = lines.pop()
                    for line in lines:
                        yield bytes(line)
        except BlobMissing:
            return
        if rest:
            yield bytes(rest)


def _record(fields: dict[str, Any], floor: int | None) -> ActionRecord:
    record = ActionRecord.model_validate(fields)
    if floor is not None and (record.seq or 0) > floor:
        return record.model_copy(update={"status": ActionStatus.ROLLED_BACK})
    return record
