"""Admission: a host is never over its limits, and evicts no more warm sandboxes than it must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime_image.agent.admission import Admitted, Refusal, Reservation, admit, admit_warm, total
from shoal.contract.host import Capacity

amounts = st.integers(min_value=0, max_value=100)
reservations = st.builds(
    Reservation, cpu_millis=amounts, memory_mib=amounts, disk_mib=amounts, sandboxes=st.just(1)
)
capacities = st.builds(
    Capacity,
    cpu_millis=st.integers(0, 300),
    memory_mib=st.integers(0, 300),
    disk_mib=st.integers(0, 300),
    sandboxes=st.integers(0, 6),
)


def _fits(capacity: Capacity, held: Reservation) -> bool:
    return (
        held.cpu_millis <= capacity.cpu_millis
        and held.memory_mib <= capacity.memory_mib
        and held.disk_mib <= capacity.disk_mib
        and held.sandboxes <= capacity.sandboxes
    )


@given(
    capacity=capacities,
    sessions=st.lists(reservations, max_size=3),
    warm=st.lists(reservations, max_size=4),
    ask=reservations,
    keep=st.booleans(),
)
def test_what_is_admitted_fits(
    capacity: Capacity, sessions: list[Reservation], warm: list[Reservation], ask: Reservation, keep: bool
) -> None:
    """Whatever is admitted fits beside what stays; with one eviction fewer it would not; a refusal holds even with
    no warm sandbox at all; the one that is taken over is never evicted."""
    held = {f"w{n}": one for n, one in enumerate(warm)}
    kept = "w0" if keep and warm else None
    decision = admit(
        capacity=capacity, sessions=total(sessions), warm=held, ask=ask, keep=kept, oldest_first=sorted(held)
    )
    if isinstance(decision, Refusal):
        assert not _fits(capacity, total(sessions) + ask)
        return
    assert isinstance(decision, Admitted)
    assert kept not in decision.evict
    stay = [one for id, one in held.items() if id not in decision.evict and id != kept]
    assert _fits(capacity, total([*sessions, *stay]) + ask)
    if decision.evict:
        stay.append(held[decision.evict[-1]])
        assert not _fits(capacity, total([*sessions, *stay]) + ask)


def test_a_refusal_says_what_is_short() -> None:
    """The first thing that is short, how much was asked and how much is left."""
    capacity = Capacity(cpu_millis=1000, memory_mib=100, disk_mib=100, sandboxes=2)
    held = Reservation(cpu_millis=100, memory_mib=60, disk_mib=0)
    ask = Reservation(cpu_millis=100, memory_mib=50, disk_mib=10)
    decision = admit(capacity=capacity, sessions=held, warm={}, ask=ask)
    assert decision == Refusal(short_of="memory_mib", asked=50, left=40)
    assert not admit_warm(capacity=capacity, held=held, ask=ask)
