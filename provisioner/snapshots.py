"""Snapshots: taken by a host, committed here: the manifest last, once, and then the record says `available`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from provisioner import keys, spread
from provisioner.agents.port import HostRef
from provisioner.auth import Principal
from provisioner.blobs import names
from provisioner.blobs.port import BlobError, BlobExists
from provisioner.context import Context, log
from provisioner.lifecycle import LIVE, SNAPSHOT, move
from provisioner.manifests import SnapshotManifest, canonical, digest_of
from provisioner.model import Session, Snapshot, dump, load, replace
from provisioner.sessions import records
from provisioner.sessions.changing import ended_error
from provisioner.sessions.create import request_hash
from provisioner.sessions.queries import decode_cursor, encode_cursor, page_size
from provisioner.snapshot_view import tell
from provisioner.store.port import (
    Absent,
    AttributeIs,
    ConditionFailed,
    Delete,
    Exists,
    Op,
    Put,
    Update,
    VersionIs,
)
from shoal.contract import snapshots as wire
from shoal.contract.base import HostId, SessionId, SnapshotId
from shoal.contract.errors import ErrorCode, ErrorDetail, ShoalError
from shoal.contract.host import SnapshotTake, SnapshotTaken
from shoal.contract.images import MAX_LAYERS
from shoal.contract.states import SessionState, SnapshotState

_TRIES = 10
#: Seconds one look at a host's progress waits; heartbeats tell, too.
_WAIT_S = 20.0
#: Seconds after which a snapshot that its host does not report was not heard of there.
_UNHEARD_S = 10.0


class Snapshots:
    """What routes call; `reported` is for heartbeats, `recover` for the reconciler."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def create(self, who: Principal, session: SessionId, body: wire.SnapshotCreate) -> wire.Snapshot:
        """Take a snapshot and wait up to `body.wait_s` for it to be durable. The same `id` again answers the same one.

        Raises:
            ShoalError: NOT_FOUND, SESSION_ENDED, SESSION_NOT_READY, IDEMPOTENCY_CONFLICT.
        """
        context = self._context
        found = await records.read_own(context.store, who, session)
        hashed = request_hash(body)
        if body.id is None:
            id = SnapshotId(context.ids("snp"))
        else:
            id = SnapshotId(keys.derived_id("snp", session, body.id))
            stored = await context.store.get(keys.snapshot(id))
            if stored is not None:
                if stored.item["request_hash"] != hashed:
                    raise ShoalError(
                        ErrorCode.IDEMPOTENCY_CONFLICT,
                        f"Snapshot {body.id} of this session is another request's.",
                    )
                return await self.get(who, id, wait_s=body.wait_s)
        snapshot = await self._begin(found.session, id, body, hashed)
        self._order(snapshot, found.session.address or "")
        return await self.get(who, id, wait_s=body.wait_s)

    async def get(self, who: Principal, id: SnapshotId, *, wait_s: float = 0.0) -> wire.Snapshot:
        """A snapshot; `wait_s` waits while it is being made.

        Raises:
            ShoalError: SNAPSHOT_NOT_FOUND.
        """

        async def read() -> Snapshot:
            stored = await self._context.store.get(keys.snapshot(id))
            snapshot = load(Snapshot, stored.item) if stored else None
            if snapshot is None or snapshot.tenant != who.tenant:
                raise ShoalError(ErrorCode.SNAPSHOT_NOT_FOUND, f"No snapshot {id}.")
            return snapshot

        snapshot = await self._context.waiters.until(
            id, read, lambda now: now.state is not SnapshotState.CREATING, wait_s
        )
        return tell(snapshot)

    async def list(
        self,
        who: Principal,
        *,
        session: SessionId | None = None,
        run: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.SnapshotPage:
        """Snapshots, newest first.

        Raises:
            ShoalError: INVALID_REQUEST.
        """
        limit = page_size(self._context, limit)
        pks = [f"SESSNP#{session}"]
        if session is None:
            shards = await spread.lists_of(self._context.store, who.tenant)
            pks = keys.partitions(keys.snapshot_list(who.tenant), shards)
        found: Sequence[wire.Snapshot] = ()
        after = decode_cursor(cursor)
        while True:
            page = await spread.page(self._context.store, pks, after=after, limit=limit, reverse=True)
            stored = await self._context.store.get_many(
                [keys.snapshot(SnapshotId(entry.item["snapshot"])) for entry in page.items]
            )
            snapshots = [load(Snapshot, item.item) for item in stored if item is not None]
            found = [
                *found,
                *(
                    tell(snapshot)
                    for snapshot in snapshots
                    if snapshot.tenant == who.tenant and (run is None or snapshot.run == run)
                ),
            ]
            after = page.after
            # Pages are read whole, so that the cursor is always at a page's end; with a filter one may be longer.
            if after is None or len(found) >= limit:
                return wire.SnapshotPage(snapshots=[*found], cursor=encode_cursor(after))

    async def delete(self, who: Principal, id: SnapshotId) -> None:
        """Take a snapshot away; repeatable. Sessions that started from it go on: layers stay, others may share them.

        Raises:
            ShoalError: CONFLICT while it is being made.
        """
        context = self._context
        stored = await context.store.get(keys.snapshot(id))
        snapshot = load(Snapshot, stored.item) if stored else None
        if stored is None or snapshot is None or snapshot.tenant != who.tenant:
            return
        if snapshot.state is SnapshotState.CREATING:
            raise ShoalError(ErrorCode.CONFLICT, f"Snapshot {id} is being made; wait for it.")
        try:
            await context.blobs.delete(names.snapshot(id))
        except BlobError as error:
            raise ShoalError(ErrorCode.UNAVAILABLE, "The blob store does not answer.") from error
        await context.store.transact(
            [
                Delete(key=stored.key),
                Delete(key=keys.snapshot_entry(snapshot.tenant, snapshot.created_at, id, snapshot.shards)),
                Delete(key=keys.session_snapshot(snapshot.session, snapshot.created_at, id)),
            ]
        )

    async def reported(self, host: HostId, taken: SnapshotTaken) -> bool:
        """A host says how far a snapshot is; answers whether it may forget it."""
        stored = await self._context.store.get(keys.snapshot(taken.snapshot))
        snapshot = load(Snapshot, stored.item) if stored else None
        if snapshot is None or snapshot.state is not SnapshotState.CREATING:
            return True
        if snapshot.host != host or taken.state in ("copying", "uploading"):
            return False
        try:
            await self.settle(snapshot, taken)
        except ShoalError as error:
            log.warning("snapshot.unsettled", snapshot_id=snapshot.id, code=error.code.value)
            return False
        return True

    async def remind(self, host: HostId, address: str, reported: Iterable[SnapshotId]) -> None:
        """Order again what a host should be taking and does not report: the order may never have been sent."""
        there = frozenset(reported)
        now = self._context.clock.now()
        mine = keys.snapshots_open_on(host)
        for entry in await self._context.store.query_all(mine.pk, prefix=mine.sk):
            id = SnapshotId(entry.item["snapshot"])
            if id in there:
                continue
            stored = await self._context.store.get(keys.snapshot(id))
            snapshot = load(Snapshot, stored.item) if stored else None
            if snapshot is None or snapshot.state is not SnapshotState.CREATING:
                continue
            if (now - snapshot.created_at).total_seconds() >= _UNHEARD_S:
                log.info("snapshot.ordered_again", snapshot_id=snapshot.id, host_id=host)
                self._order(snapshot, address)

    async def recover(self, hosts: frozenset[HostId]) -> None:
        """Fail snapshots whose host is not among those that are there; look after those that nobody waits for."""
        for entry in await spread.everything(self._context.store, keys.snapshots_open()):
            stored = await self._context.store.get(keys.snapshot(SnapshotId(entry.item["snapshot"])))
            snapshot = load(Snapshot, stored.item) if stored else None
            if snapshot is None or snapshot.state is not SnapshotState.CREATING:
                await self._context.store.transact([Delete(key=entry.key)])
            elif snapshot.host not in hosts:
                await self._failed(snapshot, _lost().body().error)

    async def settle(self, snapshot: Snapshot, taken: SnapshotTaken) -> None:
        """Commit what a host has uploaded, or record that it failed."""
        if taken.state == "failed":
            error = (
                taken.error or ShoalError(ErrorCode.SNAPSHOT_FAILED, "The host gave no reason.").body().error
            )
            await self._failed(snapshot, error)
        elif taken.state == "uploaded":
            try:
                await self._commit(snapshot, taken)
            except BlobError as error:
                raise ShoalError(ErrorCode.UNAVAILABLE, "The blob store does not answer.") from error

    async def _begin(
        self, session: Session, id: SnapshotId, body: wire.SnapshotCreate, hashed: str
    ) -> Snapshot:
        if session.state not in LIVE:
            raise ended_error(session)
        if session.state not in (SessionState.RUNNING, SessionState.PAUSED) or session.host is None:
            raise ShoalError(
                ErrorCode.SESSION_NOT_READY,
                f"Session {session.id} is {session.state.value}.",
                retry_after_s=1.0,
            )
        snapshot = Snapshot(
            id=id,
            tenant=session.tenant,
            session=session.id,
            run=session.run,
            state=SnapshotState.CREATING,
            epoch=session.epoch,
            host=session.host,
            created_at=self._context.clock.now(),
            request_hash=hashed,
            client_id=body.id,
            labels=body.labels,
            image_digest=session.source.image_digest,
            image=session.source.image,
            parent=session.last_snapshot,
            resources=session.resources,
            shards=session.shards,
        )
        entry = {"snapshot": id}
        listed = keys.snapshot_entry(snapshot.tenant, snapshot.created_at, id, snapshot.shards)
        try:
            await self._context.store.transact(
                [
                    Put(key=keys.snapshot(id), item=dump(snapshot), conditions=(Absent(),)),
                    Put(key=listed, item=entry),
                    Put(key=keys.session_snapshot(session.id, snapshot.created_at, id), item=entry),
                    Put(key=keys.snapshot_open(session.host, id), item=entry),
                ]
            )
        except ConditionFailed as error:
            if error.current is None or error.current.item["request_hash"] != hashed:
                raise ShoalError(
                    ErrorCode.IDEMPOTENCY_CONFLICT, "The snapshot's id is another request's."
                ) from error
            return load(Snapshot, error.current.item)
        return snapshot

    def _order(self, snapshot: Snapshot, address: str) -> None:
        self._context.background.start(self._take(snapshot, address), "take snapshot")

    async def _take(self, snapshot: Snapshot, address: str) -> None:
        """Give the order to the host, which goes on by itself, and follow how far it comes."""
        assert snapshot.host is not None
        ref = HostRef(id=snapshot.host, address=address)
        take = SnapshotTake(snapshot=snapshot.id, epoch=snapshot.epoch, wait_s=0.0)
        try:
            taken = await self._context.agents.take_snapshot(ref, snapshot.session, take)
        except ShoalError as error:
            await self._refused(snapshot, error)
        else:
            self._context.background.start(self._follow(snapshot, ref, taken), "follow snapshot", long=True)

    async def _follow(self, snapshot: Snapshot, ref: HostRef, taken: SnapshotTaken) -> None:
        try:
            while taken.state in ("copying", "uploading"):
                taken = await self._context.agents.snapshot_status(
                    ref, snapshot.session, snapshot.id, wait_s=_WAIT_S
                )
            await self.settle(snapshot, taken)
        except ShoalError as error:
            await self._refused(snapshot, error)

    async def _refused(self, snapshot: Snapshot, error: ShoalError) -> None:
        if error.code is ErrorCode.HOST_UNREACHABLE and error.details.get("sent", True):
            # It may be on its way all the same: the host's heartbeats tell, or the host is lost.
            return
        await self._failed(snapshot, error.body().error)

    async def _commit(self, snapshot: Snapshot, taken: SnapshotTaken) -> None:
        context = self._context
        if len(taken.layers) > MAX_LAYERS:
            reason = f"It has {len(taken.layers)} layers, over {MAX_LAYERS}."
            await self._failed(snapshot, ShoalError(ErrorCode.SNAPSHOT_FAILED, reason).body().error)
            return
        for layer in taken.layers:
            there = await context.blobs.head(names.layer(layer.digest))
            if there is None or there.size_bytes != layer.size_bytes:
                reason = f"The layer {layer.digest} did not reach the blob store."
                await self._failed(snapshot, ShoalError(ErrorCode.SNAPSHOT_FAILED, reason).body().error)
                return
        manifest = SnapshotManifest(
            image_digest=taken.image_digest or snapshot.image_digest,
            layers=taken.layers,
            config=taken.config,
            session=snapshot.session,
            epoch=taken.epoch,
            seq=taken.seq,
            open_actions=taken.open_actions,
            parent=snapshot.parent,
        )
        data = canonical(manifest)
        digest = digest_of(data)
        try:
            await context.blobs.put_if_absent(names.manifest(digest), data)
        except BlobExists:
            pass
        commit = json.dumps(
            {"digest": digest, "session": snapshot.session, "epoch": taken.epoch}, sort_keys=True
        )
        try:
            await context.blobs.put_if_absent(names.snapshot(snapshot.id), commit.encode())
        except BlobExists:
            there_already = json.loads(await context.blobs.read(names.snapshot(snapshot.id)))
            digest = there_already["digest"]
        await self._finish(
            snapshot,
            SnapshotState.AVAILABLE,
            seq=taken.seq,
            epoch=taken.epoch,
            open_actions=tuple(taken.open_actions),
            image_digest=manifest.image_digest,
            digest=digest,
            layers=len(taken.layers),
            size_bytes=taken.size_bytes,
            available_at=context.clock.now(),
        )

    async def _failed(self, snapshot: Snapshot, error: ErrorDetail) -> None:
        log.warning("snapshot.failed", snapshot_id=snapshot.id, session_id=snapshot.session, code=error.code)
        await self._finish(snapshot, SnapshotState.FAILED, error=error)

    async def _finish(self, snapshot: Snapshot, state: SnapshotState, **changes: object) -> None:
        context = self._context
        for _ in range(_TRIES):
            stored = await context.store.get(keys.snapshot(snapshot.id))
            now = load(Snapshot, stored.item) if stored else None
            if stored is None or now is None or now.state is not SnapshotState.CREATING:
                return
            new = replace(now, state=move(SNAPSHOT, now.state, state), **changes)  # type: ignore[arg-type]
            ops: list[Op] = [
                Put(key=stored.key, item=dump(new), conditions=(VersionIs(version=stored.version),)),
                Delete(key=keys.snapshot_open(_host(snapshot), snapshot.id)),
            ]
            if state is SnapshotState.AVAILABLE:
                note = await self._note(new)
                if note is not None:
                    ops.append(note)
            try:
                await context.store.transact(ops)
            except ConditionFailed:
                continue
            log.info("snapshot.finished", snapshot_id=new.id, session_id=new.session, state=state.value)
            context.waiters.notify(new.id)
            return

    async def _note(self, snapshot: Snapshot) -> Update | None:
        """The session's own note of its newest snapshot; none when it has a newer one, or is no more."""
        found = await records.read(self._context.store, snapshot.session)
        if found is None:
            return None
        session = found.session
        if session.last_snapshot_seq is not None and session.last_snapshot_seq > (snapshot.seq or 0):
            return None
        return Update(
            key=keys.session(session.id),
            set={"last_snapshot": snapshot.id, "last_snapshot_seq": snapshot.seq},
            conditions=(Exists(), AttributeIs(name="last_snapshot", value=session.last_snapshot)),
        )


def _host(snapshot: Snapshot) -> HostId:
    """The host that takes it: known from the first."""
    assert snapshot.host is not None
    return snapshot.host


def _lost() -> ShoalError:
    return ShoalError(ErrorCode.SNAPSHOT_FAILED, "The host was lost before the snapshot was durable.")
