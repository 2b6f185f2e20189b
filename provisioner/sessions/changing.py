"""Changing sessions while they live: patch, replace, acknowledge; and what becomes of them when a host is lost."""

from __future__ import annotations

from datetime import timedelta

from provisioner import keys
from provisioner.agents.port import HostRef
from provisioner.auth import Principal
from provisioner.context import Context, log
from provisioner.lifecycle import LIVE
from provisioner.manifests import snapshot_source
from provisioner.model import Retiring, Session, Snapshot, Source, load, replace
from provisioner.sessions import records
from provisioner.sessions.ending import Ending
from provisioner.sessions.placing import Placing
from provisioner.sessions.records import Loaded
from provisioner.sessions.starting import retired
from provisioner.store.port import ConditionFailed, Op
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxPatch, SandboxStatus
from shoal.contract.sessions import Restored, SessionAck, SessionPatch
from shoal.contract.states import EndReason, Phase, SessionState, SnapshotState

_TRIES = 10


def ended_error(session: Session) -> ShoalError:
    """What every request to an ending or ended session is told."""
    details = {"end": session.end.model_dump(mode="json")} if session.end else {}
    return ShoalError(
        ErrorCode.SESSION_ENDED,
        f"Session {session.id} has ended ({session.end.reason.value if session.end else 'unknown'}).",
        details=details,
    )


class Changing:
    """Changes sessions."""

    def __init__(self, context: Context, ending: Ending, placing: Placing) -> None:
        self._context = context
        self._ending = ending
        self._placing = placing

    async def patch(self, who: Principal, id: SessionId, body: SessionPatch) -> Session:
        """Change what was given; the sandbox hears of it when it runs.

        Raises:
            ShoalError: NOT_FOUND, SESSION_ENDED; NOT_IMPLEMENTED for a network that is not `none`, or a pause.
        """
        context = self._context
        if body.network is not None and body.network.mode != "none":
            raise ShoalError(ErrorCode.NOT_IMPLEMENTED, "Network allowlists are not served yet.")
        if body.idle_pause_s is not None:
            raise ShoalError(
                ErrorCode.NOT_IMPLEMENTED, "Sessions are not paused yet: leave out `idle_pause_s`."
            )
        for _ in range(_TRIES):
            found = await records.read_own(context.store, who, id)
            session = found.session
            if session.state not in LIVE:
                raise ended_error(session)
            given = {name: getattr(body, name) for name in body.model_fields_set}
            changes: dict[str, object] = {
                name: value for name, value in given.items() if name in ("idle_pause_s", "idle_timeout_s")
            }
            changes |= {name: given[name] for name in ("labels", "network") if given.get(name) is not None}
            if body.ttl_s is not None:
                changes["expires_at"] = context.clock.now() + timedelta(seconds=body.ttl_s)
            new = replace(session, **changes)  # type: ignore[arg-type]
            ops: list[Op] = [records.save(new, found.version)]
            if session.host is None:
                ops.append(records.queue_entry(new))
            else:
                # Where the sandbox does not hear it now, its heartbeats find out.
                ops.append(records.look_again(new, f"patch {found.version}"))
            try:
                await context.store.transact(ops)
            except ConditionFailed:
                continue
            context.waiters.notify(id)
            if new.host is not None and new.address is not None:
                await self._tell(new, changes)
            return new
        raise _busy(id)

    async def _tell(self, session: Session, changes: dict[str, object]) -> None:
        assert session.host is not None
        assert session.address is not None
        patch = SandboxPatch.model_validate({"epoch": session.epoch, **changes})
        ref = HostRef(id=session.host, address=session.address)
        await self._context.agents.patch(ref, session.id, patch)

    async def acknowledge(self, who: Principal, id: SessionId, body: SessionAck) -> Session:
        """The caller has seen the rewind into this epoch; repeatable.

        Raises:
            ShoalError: NOT_FOUND, SESSION_ENDED, EPOCH_MISMATCH; SESSION_NOT_READY while its sandbox starts: until then
                neither what is lost nor the epoch itself is settled.
        """
        context = self._context
        for _ in range(_TRIES):
            found = await records.read_own(context.store, who, id)
            session = found.session
            if session.state not in LIVE:
                raise ended_error(session)
            if session.epoch != body.epoch:
                raise ShoalError(
                    ErrorCode.EPOCH_MISMATCH,
                    f"The session is in epoch {session.epoch}, not {body.epoch}.",
                    details={"epoch": session.epoch},
                )
            if session.restored is None:
                return session
            if session.state not in (SessionState.RUNNING, SessionState.PAUSED):
                raise ShoalError(
                    ErrorCode.SESSION_NOT_READY,
                    f"Session {session.id} is {session.state.value}; acknowledge the rewind once it runs.",
                    retry_after_s=0.5,
                )
            if not session.restored.acknowledged:
                restored = session.restored.model_copy(update={"acknowledged": True})
                new = replace(session, restored=restored)
                try:
                    await context.store.transact([records.save(new, found.version)])
                except ConditionFailed:
                    continue
                session = new
            if session.host is not None and session.address is not None:
                ref = HostRef(id=session.host, address=session.address)
                patch = SandboxPatch(epoch=session.epoch, acknowledged=True)
                await context.agents.patch(ref, session.id, patch)
            context.waiters.notify(id)
            return session
        raise _busy(id)

    async def replace(self, who: Principal, id: SessionId, *, from_snapshot: bool) -> Session:
        """Throw the sandbox away; the session goes on in the next epoch, from its source or its last snapshot.

        Raises:
            ShoalError: NOT_FOUND, SESSION_ENDED; CONFLICT without a snapshot.
        """
        context = self._context
        for _ in range(_TRIES):
            found = await records.read_own(context.store, who, id)
            session = found.session
            if session.state not in LIVE:
                raise ended_error(session)
            if session.state is SessionState.PENDING:
                return session
            source, seq = session.source, 0
            if from_snapshot:
                latest = await self._latest(session)
                if latest is None:
                    raise ShoalError(ErrorCode.CONFLICT, "The session has no snapshot that is available.")
                source, seq = snapshot_source(latest), latest.seq or 0
            new = await self._rewind(
                found, source, seq, lost=False, kind="session.replaced", why="It was replaced on request."
            )
            if new is None:
                continue
            context.background.start(
                self._placing.place(Loaded(session=new, version=found.version + 1)), "place replaced session"
            )
            return new
        raise _busy(id)

    async def host_lost(
        self, found: Loaded, detail: str, status: SandboxStatus | None = None
    ) -> Session | None:
        """The session's host is gone: it goes on elsewhere if it may, else it ends. None: it changed meanwhile.

        Args:
            status: The sandbox's last words, from a host that ended in good order; None when nobody knows how far it
                came.
        """
        session = found.session
        if session.state not in LIVE or session.host is None:
            return session
        if session.state in (SessionState.STARTING, SessionState.RESTORING):
            # This epoch never ran: nothing is lost by starting it elsewhere.
            error = ShoalError(ErrorCode.SANDBOX_START_FAILED, detail).body().error
            return await self._placing.lost_start(found, error, tell_host=False)
        if session.on_host_loss != "restore":
            return await self._ending.end(found, EndReason.HOST_LOST, detail, tell_host=False)
        latest = await self._latest(session)
        source = snapshot_source(latest) if latest else session.source
        seq = (latest.seq or 0) if latest else 0
        new = await self._rewind(
            found, source, seq, lost=True, kind="session.host_lost", why=detail, status=status
        )
        if new is not None:
            self._context.wake_queue.set()
        return new

    async def _rewind(
        self,
        found: Loaded,
        source: Source,
        seq: int,
        *,
        lost: bool,
        kind: str,
        why: str,
        status: SandboxStatus | None = None,
    ) -> Session | None:
        """Write down that the session goes back to `source`, in its next epoch; None when it changed meanwhile.

        `lost`: the host is gone; `status` says how far the sandbox came, if anyone knows.
        """
        context = self._context
        session = found.session
        now = context.clock.now()
        from_ = source.snapshot if source.snapshot and source != session.source else "image"
        restored = Restored.model_validate({"from": from_, "seq": seq})
        old = session.retiring
        if session.host is not None:
            old = Retiring(host=session.host, epoch=session.epoch)
        lease = {"placer": None, "placer_until": None} if lost else self._placing.lease()
        new = records.moved(
            session,
            SessionState.RESTORING,
            phase=Phase.QUEUED if lost else Phase.PLACING,
            epoch=session.epoch + 1,
            restore_from=source,
            restored=restored,
            retiring=old,
            host=None,
            address=None,
            warm=None,
            attempts=0,
            **lease,
        )
        ops: list[Op] = []
        if lost and old is not None:
            new = retired(new, status, gap=context.settings.seq_gap)
            ops.append(records.unassign(old.host, session.id, old.epoch))
        ops = [
            records.save(new, found.version),
            records.queue_entry(new),
            records.event_op(
                session, found.version, now, kind, why, epoch=new.epoch, seq=seq, **{"from": from_}
            ),
            *ops,
        ]
        try:
            await context.store.transact(ops)
        except ConditionFailed:
            return None
        log.info("session.rewound", session_id=new.id, epoch=new.epoch, reason=kind)
        context.waiters.notify(new.id)
        return new

    async def _latest(self, session: Session) -> Snapshot | None:
        if session.last_snapshot is None:
            return None
        stored = await self._context.store.get(keys.snapshot(session.last_snapshot))
        snapshot = load(Snapshot, stored.item) if stored else None
        return snapshot if snapshot and snapshot.state is SnapshotState.AVAILABLE else None


def _busy(id: SessionId) -> ShoalError:
    return ShoalError(ErrorCode.UNAVAILABLE, f"Session {id} keeps changing; try again.", retry_after_s=0.5)
