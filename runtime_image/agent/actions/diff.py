"""`diff`: what changed on the disk, read from the writable layer outside the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from runtime_image.agent.actions.context import Bench
from runtime_image.layers import Changes, LayerError, LayerIndex, changes, index
from runtime_image.layers.entries import Kind
from runtime_image.layers.index import IndexEntry
from shoal.contract.actions import Diff, DiffObservation, FileError

#: Paths of one kind that are told; the rest shows as `truncated`.
MAX_PATHS = 10_000


async def run_diff(bench: Bench, action: Diff) -> DiffObservation:
    """Perform a `diff` since the session's start, or since a snapshot of it that was taken of this sandbox."""
    upper, lowers = bench.sandbox.upper, bench.lowers
    try:
        if action.since == "start":
            return _observed(await asyncio.to_thread(changes, upper, lowers))
        then = bench.snapshot_index(action.since)
        if then is None:
            message = (
                f"{action.since} is not a snapshot of this sandbox; `since` takes `start` or one of its own"
            )
            return DiffObservation(error=FileError(errno="ENOENT", message=message))
        return _observed(await asyncio.to_thread(since, upper, lowers, then))
    except (LayerError, OSError) as error:
        return DiffObservation(error=FileError(errno="EBUSY", message=f"the disk changed meanwhile: {error}"))


def since(upper: Path, lowers: Sequence[Path], then: LayerIndex) -> Changes:
    """What changed in a writable layer since `then`, an index of it. Blocking.

    A file that was written with the same content counts as changed: only its times and inode are compared.
    """
    now = index(upper)
    start = changes(upper, lowers)
    new_since_start = set(start.added)
    added: list[str] = []
    changed: list[str] = []
    removed: list[str] = []
    for path in sorted((now.entries.keys() | then.entries.keys()) - {""}):
        was, has = then.entries.get(path), now.entries.get(path)
        hidden = has is None or has.kind is Kind.WHITEOUT
        was_hidden = was is not None and was.kind is Kind.WHITEOUT
        if hidden:
            # Without an entry of its own it was seen from below, if a whiteout hides it now.
            if not was_hidden and (was is not None or has is not None):
                removed.append(path)
        elif was_hidden or (was is None and path in new_since_start):
            added.append(path)
        elif has is not None and (has.kind is not Kind.DIRECTORY if was is None else _differs(was, has)):
            changed.append(path)
    return Changes(added=tuple(added), changed=tuple(changed), removed=tuple(removed))


def _differs(was: IndexEntry, has: IndexEntry) -> bool:
    if was.kind is not has.kind or (was.mode, was.uid, was.gid) != (has.mode, has.uid, has.gid):
        return True
    if has.kind is Kind.DIRECTORY:
        return False
    return (was.size, was.mtime_ns, was.inode, was.link_target) != (
        has.size,
        has.mtime_ns,
        has.inode,
        has.link_target,
    )


def _observed(found: Changes) -> DiffObservation:
    return DiffObservation(
        added=list(found.added[:MAX_PATHS]),
        changed=list(found.changed[:MAX_PATHS]),
        removed=list(found.removed[:MAX_PATHS]),
        truncated=any(len(part) > MAX_PATHS for part in (found.added, found.changed, found.removed)),
    )
