"""Where in the blob store things are. Names begin with a piece of a hash where many are written at once, since object
stores spread their load by prefix."""

from __future__ import annotations

import hashlib

from shoal.contract.base import SessionId


def layer(digest: str) -> str:
    """A layer's compressed tar, by its digest `sha256:...`."""
    hexed = digest.removeprefix("sha256:")
    return f"layers/{hexed[:2]}/{hexed}.tar.zst"


def manifest(digest: str) -> str:
    """The manifest of an image or a snapshot, by its digest."""
    hexed = digest.removeprefix("sha256:")
    return f"manifests/{hexed[:2]}/{hexed}.json"


def snapshot(snapshot_id: str) -> str:
    """The commit record of a snapshot: written last, once."""
    return f"snapshots/{_spread(snapshot_id)}/{snapshot_id}.json"


def journal(session: SessionId, epoch: int) -> str:
    """The flushed journal of a session's epoch (zstd, JSON lines of `ActionRecord`)."""
    return f"journals/{_spread(session)}/{session}/{epoch}.jsonl.zst"


def transfer(id: str) -> str:
    """A file on its way into a session or out of it."""
    return f"transfers/{_spread(id)}/{id}"


def _spread(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:2]
