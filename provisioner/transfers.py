"""Files on their way into sessions and out of them, beside the entrance: announced here, bound to one use, forgotten.

The bytes go from the caller to the blob store and from there to the host's agent, or back; none pass here. What is
left over is the bucket's lifecycle to take, or `sweep`'s where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from provisioner import keys
from provisioner.auth import Principal
from provisioner.blob_links import BlobLinks
from provisioner.blobs import names
from provisioner.blobs.port import BlobError
from provisioner.codec import dump, load
from provisioner.context import Context
from provisioner.store.port import Absent, ConditionFailed, Put, Stored, VersionIs
from shoal.contract import transfers as wire
from shoal.contract.base import SessionId, TenantId
from shoal.contract.errors import ErrorCode, ShoalError

#: Seconds between two sweeps, and objects that one looks at: the lifecycle does it where there is one.
_SWEEP_S = 600.0
_SWEPT_AT_ONCE = 1000
#: Seconds for which a caller's link to a file that is ready is good.
_READ_S = 900.0


@dataclass(frozen=True, kw_only=True)
class FileTransfer:
    """One file under way.

    Attributes:
        direction: Into a session or out of one.
        session: Out: whose. In: whose it became; None until it was used.
        use: What it was used for, in the agent's words; the same again is no other use.
    """

    id: str
    tenant: TenantId
    direction: Literal["in", "out"]
    created_at: datetime
    expires_at: datetime
    session: SessionId | None = None
    use: str | None = None
    size_bytes: int | None = None
    sha256: str | None = None


class Transfers:
    """What routes, the relay and `Hosts` call."""

    def __init__(self, context: Context, links: BlobLinks) -> None:
        self._context = context
        self._links = links
        self._swept_at: float | None = None

    async def announce(self, who: Principal, body: wire.TransferCreate) -> wire.Transfer:
        """A file that is to go into a session.

        Raises:
            ShoalError: UNAVAILABLE.
        """
        made = await self._make(who.tenant, "in", size_bytes=body.size_bytes, sha256=body.sha256)
        put = await self._links.link(
            "put",
            names.transfer(made.id),
            expires_s=wire.TRANSFER_LIFE_S,
            sha256=body.sha256,
            size_bytes=body.size_bytes,
        )
        return wire.Transfer(id=made.id, size_bytes=body.size_bytes, put=put, expires_at=made.expires_at)

    async def send_out(self, who: Principal, session: SessionId) -> str:
        """A file of a session that is to come out: its id, for the host's agent.

        Raises:
            ShoalError: UNAVAILABLE.
        """
        return (await self._make(who.tenant, "out", session=session)).id

    async def check_out(self, who: Principal, session: SessionId, id: str) -> None:
        """See that a transfer is one out of this session.

        Raises:
            ShoalError: NOT_FOUND for another's, another session's, or one that is over.
        """
        await self._outgoing(session, id, who.tenant)

    async def read_link(self, id: str, *, media_type: str) -> str:
        """Where the caller reads what came out.

        Raises:
            ShoalError: UNAVAILABLE.
        """
        link = await self._links.link("get", names.transfer(id), expires_s=_READ_S, media_type=media_type)
        return link.url

    async def bind(self, tenant: TenantId, session: SessionId, id: str, use: str) -> FileTransfer:
        """Use an announced file for a session, once.

        Raises:
            ShoalError: NOT_FOUND for another tenant's or one that is over; CONFLICT for one that was used otherwise.
        """
        for _ in range(5):
            stored, found = await self._read(id)
            if stored is None or found is None or found.tenant != tenant or found.direction != "in":
                raise _unknown(id)
            if found.use is not None:
                if (found.session, found.use) != (session, use):
                    raise ShoalError(
                        ErrorCode.CONFLICT, f"The transfer {id} was used for another file; announce one anew."
                    )
                return found
            bound = replace(found, session=session, use=use)
            try:
                await self._context.store.transact([_put(bound, VersionIs(version=stored.version))])
            except ConditionFailed:
                continue
            return bound
        raise ShoalError(ErrorCode.UNAVAILABLE, "The transfer keeps changing; try again.", retry_after_s=0.5)

    async def outgoing(self, session: SessionId, id: str) -> FileTransfer:
        """The transfer that a host is to fill.

        Raises:
            ShoalError: NOT_FOUND.
        """
        return await self._outgoing(session, id, None)

    async def sweep(self) -> None:
        """Delete files that are over, now and then, a part of them each time; repeatable, and harmless to others.

        Raises:
            ShoalError: UNAVAILABLE.
        """
        context = self._context
        now = context.clock.monotonic()
        if self._swept_at is not None and now - self._swept_at < _SWEEP_S:
            return
        self._swept_at = now
        seen = 0
        try:
            async for info in context.blobs.list(f"transfers/{context.chance.randrange(16):x}"):
                seen += 1
                if seen > _SWEPT_AT_ONCE:
                    return
                _, found = await self._read(info.name.rpartition("/")[2])
                if found is None:
                    await context.blobs.delete(info.name)
        except BlobError as error:
            raise ShoalError(ErrorCode.UNAVAILABLE, "The blob store does not answer.") from error

    async def _make(
        self,
        tenant: TenantId,
        direction: Literal["in", "out"],
        *,
        session: SessionId | None = None,
        size_bytes: int | None = None,
        sha256: str | None = None,
    ) -> FileTransfer:
        now = self._context.clock.now()
        made = FileTransfer(
            id=self._context.ids("trf"),
            tenant=tenant,
            direction=direction,
            created_at=now,
            expires_at=now + timedelta(seconds=wire.TRANSFER_LIFE_S),
            session=session,
            size_bytes=size_bytes,
            sha256=sha256,
        )
        await self._context.store.transact([_put(made, Absent())])
        return made

    async def _outgoing(self, session: SessionId, id: str, tenant: TenantId | None) -> FileTransfer:
        _, found = await self._read(id)
        if (
            found is None
            or found.direction != "out"
            or found.session != session
            or tenant not in (None, found.tenant)
        ):
            raise _unknown(id)
        return found

    async def _read(self, id: str) -> tuple[Stored | None, FileTransfer | None]:
        """The record, unless it is over."""
        if not id.startswith("trf_") or len(id) > 100:
            return None, None
        stored = await self._context.store.get(keys.transfer(id))
        found = load(FileTransfer, stored.item) if stored else None
        if found is not None and found.expires_at <= self._context.clock.now():
            return None, None
        return stored, found


def _put(record: FileTransfer, condition: Absent | VersionIs) -> Put:
    return Put(
        key=keys.transfer(record.id), item=dump(record), conditions=(condition,), expires_at=record.expires_at
    )


def _unknown(id: str) -> ShoalError:
    return ShoalError(
        ErrorCode.NOT_FOUND, f"There is no transfer {id[:100]} here, or it is over: announce one anew."
    )
