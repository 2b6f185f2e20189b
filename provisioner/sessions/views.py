"""Sessions as the service tells them."""

from __future__ import annotations

from provisioner.model import Session
from shoal.contract import sessions as wire
from shoal.contract.host import SandboxStatus
from shoal.contract.states import SessionState


def tell(session: Session, status: SandboxStatus | None = None) -> wire.Session:
    """A session for the wire; `status` is what its sandbox last said, where that is newer than the record."""
    last_seq = session.last_seq
    phase = session.phase
    if status is not None:
        last_seq = max(last_seq, status.last_seq)
        if session.state is SessionState.STARTING and status.phase is not None:
            phase = status.phase
    if session.state is SessionState.RUNNING:
        phase = None
    return wire.Session(
        id=session.id,
        name=session.name,
        state=session.state,
        phase=phase,
        epoch=session.epoch,
        image=session.source.image,
        snapshot=session.source.snapshot,
        image_digest=session.source.image_digest,
        substrate=session.substrate,
        pool=session.pool,
        run=session.run,
        labels=session.labels,
        resources=session.resources,
        network=session.network,
        created_at=session.created_at,
        ready_at=session.ready_at,
        ended_at=session.ended_at,
        expires_at=session.expires_at,
        idle_pause_s=session.idle_pause_s,
        idle_timeout_s=session.idle_timeout_s,
        host=session.host,
        last_seq=last_seq,
        last_snapshot=session.last_snapshot,
        warm=session.warm,
        restored=session.restored,
        end=session.end,
    )
