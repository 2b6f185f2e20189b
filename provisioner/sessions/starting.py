"""What a session's start says to its agent, and what the agent's answers make of the session: pure."""

from __future__ import annotations

from datetime import datetime

from provisioner.model import Session, replace
from provisioner.sessions import records
from shoal.contract.errors import ErrorCode, ErrorDetail, ShoalError
from shoal.contract.host import SandboxPatch, SandboxSource, SandboxStart, SandboxStatus
from shoal.contract.states import Phase, SessionState


def retired(session: Session, status: SandboxStatus | None, *, gap: int) -> Session:
    """The session once the incarnation before is over; without a `status` nobody knows how far that came."""
    old = session.retiring
    assert old is not None
    journals = session.journals
    if status is not None:
        last_seq = max(session.last_seq, status.last_seq)
        if status.journal_flushed and old.epoch not in journals:
            journals = (*journals, old.epoch)
    else:
        # Steps may have been made that no record shows: their numbers are not used again, and their loss is told.
        last_seq = session.last_seq + gap
    restored = session.restored
    if restored is not None and last_seq <= restored.seq:
        # Nothing happened after the moment the disk goes back to: nothing is lost.
        restored = restored.model_copy(update={"acknowledged": True})
    return replace(
        session,
        retiring=None,
        journals=journals,
        last_seq=last_seq,
        first_seq=last_seq + 1,
        restored=restored,
    )


def with_status(session: Session, status: SandboxStatus, now: datetime) -> Session:
    """The session after its sandbox said how it is."""
    assert status.state in ("starting", "running", "paused")
    state = {
        "starting": SessionState.STARTING,
        "running": SessionState.RUNNING,
        "paused": SessionState.PAUSED,
    }[status.state]
    if state is SessionState.STARTING and session.state is SessionState.RESTORING:
        state = SessionState.RESTORING
    restored = session.restored
    if restored is not None and status.lost_actions and not restored.lost_actions:
        restored = restored.model_copy(update={"lost_actions": status.lost_actions})
    runs = state in (SessionState.RUNNING, SessionState.PAUSED)
    if state is SessionState.PAUSED and session.state in (SessionState.PENDING, SessionState.STARTING):
        session = records.moved(session, SessionState.RUNNING)
    return records.moved(
        session,
        state,
        phase=None if runs else status.phase or Phase.STARTING_SANDBOX,
        warm=status.warm,
        ready_at=session.ready_at or (now if runs else None),
        attempts=0 if runs else session.attempts,
        error=None if runs else session.error,
        last_seq=max(session.last_seq, status.last_seq),
        restored=restored,
    )


def start_error(status: SandboxStatus) -> ErrorDetail:
    """Why a sandbox did not start, as its agent says."""
    if status.error is not None:
        return status.error
    message = status.end_detail or "The sandbox ended before it ran."
    return ShoalError(ErrorCode.SANDBOX_START_FAILED, message).body().error


def start_message(session: Session, source: SandboxSource, wait_s: float) -> SandboxStart:
    """What the agent is told."""
    restored = session.restored
    return SandboxStart(
        session=session.id,
        epoch=session.epoch,
        tenant=session.tenant,
        run=session.run,
        pool=session.pool,
        labels=session.labels,
        source=source,
        substrate=session.substrate,
        resources=session.resources,
        env=session.env,
        workdir=session.workdir,
        user=session.user,
        on_start=list(session.on_start),
        network=session.network,
        expires_at=session.expires_at,
        idle_pause_s=session.idle_pause_s,
        idle_timeout_s=session.idle_timeout_s,
        durability="remote" if session.durability == "remote" else "host",
        first_seq=session.first_seq,
        rewound=restored is not None and not restored.acknowledged,
        restored_seq=restored.seq if restored is not None else None,
        history=list(session.journals),
        wait_s=wait_s,
    )


def settings_of(session: Session) -> SandboxPatch:
    """All that a session's sandbox is to go by and that can change while it lives."""
    restored = session.restored
    return SandboxPatch(
        epoch=session.epoch,
        expires_at=session.expires_at,
        idle_pause_s=session.idle_pause_s,
        idle_timeout_s=session.idle_timeout_s,
        labels=session.labels,
        network=session.network,
        acknowledged=restored is None or restored.acknowledged,
    )


def patched(started: Session, now: Session) -> SandboxPatch | None:
    """What a sandbox that was started for `started` must be told of the session as it is now; None for nothing."""
    names = ("expires_at", "idle_pause_s", "idle_timeout_s", "labels", "network")
    changes = {name: getattr(now, name) for name in names if getattr(now, name) != getattr(started, name)}
    return SandboxPatch.model_validate({"epoch": now.epoch, **changes}) if changes else None
