"""Ending sessions: the intent is one write and frees everything that others could wait for; the rest follows."""

from __future__ import annotations

from datetime import timedelta

from provisioner.agents.port import HostRef
from provisioner.context import Context, log
from provisioner.lifecycle import LIVE
from provisioner.model import Session, replace
from provisioner.sessions import records
from provisioner.sessions.records import Loaded
from provisioner.store.port import ConditionFailed, Op
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ErrorDetail, ShoalError
from shoal.contract.host import SandboxStatus
from shoal.contract.sessions import End
from shoal.contract.states import EndReason, SessionState

_TRIES = 20


class Ending:
    """Ends sessions, from any state, any number of times."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._keep = timedelta(seconds=context.settings.keep_ended_s)

    async def end(
        self,
        found: Loaded,
        reason: EndReason,
        detail: str | None = None,
        *,
        error: ErrorDetail | None = None,
        tell_host: bool = True,
    ) -> Session:
        """End a session; answers it as it is after the intent was written.

        Args:
            error: What to keep as the session's error.
            tell_host: Whether to command its host; False where the host is gone, or says itself that it ended.
        """
        context = self._context
        for _ in range(_TRIES):
            session = found.session
            if session.state not in LIVE:
                return session
            if error is not None:
                session = replace(session, error=error)
            now = context.clock.now()
            new, ops = records.ending(session, found.version, records.end_of(reason, detail), now, self._keep)
            try:
                await context.store.transact(ops)
            except ConditionFailed:
                again = await records.read(context.store, session.id)
                if again is None:
                    return session
                found = again
                continue
            log.info("session.ending", session_id=new.id, epoch=new.epoch, reason=reason.value)
            context.waiters.notify(new.id)
            context.wake_queue.set()
            if tell_host and new.host is not None and new.address is not None:
                context.background.start(self.command(new), "end sandbox")
            return new
        raise ShoalError(ErrorCode.CONFLICT, f"Session {found.session.id} keeps changing; try again.")

    async def command(self, session: Session, *, wait_s: float = 0.0) -> None:
        """Tell the host of an ending session. What goes wrong here, its heartbeats make good."""
        assert session.host is not None
        assert session.address is not None
        reason = session.end.reason if session.end else EndReason.DELETED
        ref = HostRef(id=session.host, address=session.address)
        try:
            status = await self._context.agents.end(
                ref, session.id, epoch=session.epoch, reason=reason, wait_s=wait_s
            )
        except ShoalError as error:
            if error.code is ErrorCode.NOT_FOUND:
                await self.finished(session.id, session.epoch, None)
            else:
                await self._look_again(session)
            return
        if status.state in ("ended", "failed"):
            await self.finished(session.id, session.epoch, status)

    async def _look_again(self, session: Session) -> None:
        try:
            await self._context.store.transact([records.look_again(session, self._context.ids("look"))])
        except (ConditionFailed, ShoalError):
            # It is gone, or it is looked at in its turn.
            return

    async def finished(self, id: SessionId, epoch: int, status: SandboxStatus | None) -> Session | None:
        """An ending session's sandbox is gone; None when there is no such session any more."""
        context = self._context
        for _ in range(_TRIES):
            found = await records.read(context.store, id)
            if found is None:
                return None
            session = found.session
            if session.state is not SessionState.ENDING or session.epoch != epoch:
                return session
            now = context.clock.now()
            journals, last_seq = session.journals, session.last_seq
            if status is not None:
                last_seq = max(last_seq, status.last_seq)
                if status.journal_flushed and epoch not in journals:
                    journals = (*journals, epoch)
            new = records.moved(
                session,
                SessionState.ENDED,
                phase=None,
                ended_at=now,
                journals=journals,
                last_seq=last_seq,
            )
            ops: list[Op] = [records.save(new, found.version, expires_at=now + self._keep)]
            if session.host is not None:
                ops.append(records.unassign(session.host, session.id, session.epoch))
            try:
                await context.store.transact(ops)
            except ConditionFailed:
                continue
            log.info("session.ended", session_id=new.id, epoch=new.epoch)
            context.waiters.notify(new.id)
            return new
        return None


def by_itself(status: SandboxStatus) -> End:
    """Why a sandbox says it ended."""
    if status.end_reason is not None and status.state != "failed":
        return records.end_of(status.end_reason, status.end_detail)
    detail = status.end_detail
    if status.error is not None:
        detail = f"{status.error.code}: {status.error.message}"
    return records.end_of(status.end_reason or EndReason.FAILED, detail)
