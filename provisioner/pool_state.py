"""What the reconciler remembers of a pool from tick to tick: one of the records of `model`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from shoal.contract.host import Capacity


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """What the reconciler remembers of a pool.

    Attributes:
        failures: Hosts in a row that did not come up.
        host_capacity: How large its hosts were when there last were any.
        start_ms: How long the latest hosts took from their order to their registration, the newest last.
        measured_to: The newest registration among those.
        surplus_since: Since when it could do without hosts that sessions are on.
    """

    name: str
    not_scaling: str | None = None
    failures: int = 0
    last_failure_at: datetime | None = None
    last_failure: str | None = None
    host_capacity: Capacity | None = None
    start_ms: tuple[int, ...] = ()
    measured_to: datetime | None = None
    surplus_since: datetime | None = None
