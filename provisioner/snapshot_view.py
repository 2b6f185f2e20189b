"""A snapshot as callers see it."""

from __future__ import annotations

from provisioner.model import Snapshot
from shoal.contract import snapshots as wire


def tell(snapshot: Snapshot) -> wire.Snapshot:
    """A snapshot for the wire."""
    return wire.Snapshot(
        id=snapshot.id,
        session=snapshot.session,
        run=snapshot.run,
        state=snapshot.state,
        client_id=snapshot.client_id,
        labels=snapshot.labels,
        epoch=snapshot.epoch,
        seq=snapshot.seq,
        open_actions=[*snapshot.open_actions],
        base=snapshot.image or snapshot.image_digest,
        parent=snapshot.parent,
        layers=snapshot.layers,
        size_bytes=snapshot.size_bytes,
        sha256=snapshot.digest.removeprefix("sha256:") if snapshot.digest else None,
        created_at=snapshot.created_at,
        available_at=snapshot.available_at,
        error=snapshot.error,
    )
