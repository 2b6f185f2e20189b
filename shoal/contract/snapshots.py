"""Snapshots: durable, incremental copies of a session's disk."""

from __future__ import annotations

from pydantic import Field

from shoal.contract.base import Answer, Labels, Name, SessionId, SnapshotId, Time, WaitSeconds, Wire
from shoal.contract.errors import ErrorDetail
from shoal.contract.states import SnapshotState


class SnapshotCreate(Wire):
    """`POST /v1/sessions/{id}/snapshots`. `id` is the caller's own idempotency of it, unique in the session."""

    id: Name | None = None
    labels: Labels = Field(default_factory=dict)
    wait_s: WaitSeconds = 25.0


class Snapshot(Answer):
    """A snapshot. `seq` is the last action it holds whole; `open_actions` ran at that moment. `size_bytes` is what
    this one adds to its parent, compressed; `sha256` is of its manifest, in hex."""

    id: SnapshotId
    session: SessionId
    run: str | None = None
    state: SnapshotState
    client_id: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    epoch: int
    seq: int | None = None
    open_actions: list[str] = Field(default_factory=list)
    base: str | None = None
    parent: SnapshotId | None = None
    layers: int = 0
    size_bytes: int = 0
    sha256: str | None = None
    created_at: Time
    available_at: Time | None = None
    error: ErrorDetail | None = None


class SnapshotPage(Answer):
    """Snapshots, newest first."""

    snapshots: list[Snapshot]
    cursor: str | None = None
