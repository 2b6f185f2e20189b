"""Whether this host takes a sandbox: pure arithmetic over what is reserved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from shoal.contract.host import Capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """What one sandbox holds of a host. CPU in thousandths of a core, memory and disk in MiB."""

    cpu_millis: int
    memory_mib: int
    disk_mib: int
    sandboxes: int = 1

    def __add__(self, other: Reservation) -> Reservation:
        return Reservation(
            cpu_millis=self.cpu_millis + other.cpu_millis,
            memory_mib=self.memory_mib + other.memory_mib,
            disk_mib=self.disk_mib + other.disk_mib,
            sandboxes=self.sandboxes + other.sandboxes,
        )


NOTHING = Reservation(cpu_millis=0, memory_mib=0, disk_mib=0, sandboxes=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why there is no room: the first thing that is short, how much is asked for and how much is left."""

    short_of: str
    asked: int
    left: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """There is room once these warm sandboxes (by their ids) are gone."""

    evict: tuple[str, ...] = ()


def total(reservations: Iterable[Reservation]) -> Reservation:
    """The sum; nothing for none."""
    result = NOTHING
    for one in reservations:
        result = result + one
    return result


def _shortage(capacity: Capacity, held: Reservation, ask: Reservation) -> Refusal | None:
    for field in fields(Reservation):
        asked, left = getattr(ask, field.name), getattr(capacity, field.name) - getattr(held, field.name)
        if asked > left:
            return Refusal(short_of=field.name, asked=asked, left=max(0, left))
    return None


def admit(
    *,
    capacity: Capacity,
    sessions: Reservation,
    warm: Mapping[str, Reservation],
    ask: Reservation,
    keep: str | None = None,
    oldest_first: Sequence[str] = (),
) -> Admitted | Refusal:
    """Decide about one sandbox for a session.

    Args:
        capacity: What may be reserved, overcommit included.
        sessions: What the sandboxes of sessions hold.
        warm: What each warm sandbox holds, by id; these give way.
        ask: What the new one wants.
        keep: A warm sandbox that the session would take over: its own reservation falls away, and it is not evicted.
        oldest_first: The order in which warm ones are evicted; those not named come last, in the mapping's order.

    Returns:
        `Admitted` with the fewest evictions in that order, or the `Refusal` that holds even without any warm one.
    """
    refusal = _shortage(capacity, sessions, ask)
    if refusal is not None:
        return refusal
    order = [id for id in oldest_first if id in warm]
    order += [id for id in warm if id not in set(order)]
    order = [id for id in order if id != keep]
    evicted: list[str] = []
    while True:
        held = sessions + total(warm[id] for id in order[len(evicted) :])
        if _shortage(capacity, held, ask) is None:
            return Admitted(evict=tuple(evicted))
        evicted.append(order[len(evicted)])


def admit_warm(*, capacity: Capacity, held: Reservation, ask: Reservation) -> bool:
    """Whether a warm sandbox fits beside all that there is; it never pushes anything out."""
    return _shortage(capacity, held, ask) is None
