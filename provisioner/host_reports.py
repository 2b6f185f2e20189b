"""What a heartbeat makes of its host's record: pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from provisioner.model import Assignment, Host, replace
from provisioner.placement import Room
from shoal.contract.host import Heartbeat

_OVER = ("ended", "failed")


def heard(
    host: Host, body: Heartbeat, assigned: Sequence[Assignment], last_event: int, now: datetime
) -> Host:
    """The host as it reports itself, with what the records say is on it."""
    held = Room()
    for assignment in assigned:
        held = held + Room.for_one(assignment.resources)
    return replace(
        host,
        address=body.address,
        heard_at=now,
        said_at=body.at,
        beat=body.beat,
        capacity=body.capacity,
        reserved=body.reserved,
        held=held.wire(),
        load=body.load,
        substrates=tuple(body.substrates),
        warm=tuple(body.warm),
        layers=tuple(sorted(body.layers)),
        sessions=len(assigned),
        sandboxes=sum(status.state not in _OVER for status in body.sandboxes),
        busy_at=now if assigned else host.busy_at,
        draining=body.draining,
        last_event=last_event,
        counters=body.counters,
    )


def worth_writing(old: Host, new: Host, *, at_least_s: float) -> bool:
    """Whether others must know: something changed but for what changes all the time, or the last word is old."""
    if old.heard_at is None or new.heard_at is None:
        return True
    if (new.heard_at - old.heard_at).total_seconds() >= at_least_s:
        return True
    same = replace(
        new,
        heard_at=old.heard_at,
        said_at=old.said_at,
        beat=old.beat,
        load=old.load,
        busy_at=old.busy_at,
        counters=old.counters,
    )
    return same != old


def room_grew(old: Host, new: Host) -> bool:
    """Whether somebody who waits may fit now."""
    if old.held is None or old.capacity != new.capacity or old.state is not new.state:
        return True
    warm = sum(report.ready for report in new.warm) > sum(report.ready for report in old.warm)
    return warm or new.sessions < old.sessions
