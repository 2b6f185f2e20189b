"""What the planner sees, and what it decides: plain facts, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from provisioner.model import PoolState, Source, WarmLevel
from provisioner.placement import HostView, Room, WarmName
from shoal.contract.base import HostId, SessionId
from shoal.contract.host import WarmKey
from shoal.contract.states import HostState, Substrate


@dataclass(frozen=True, kw_only=True)
class PoolPolicy:
    """What holds for one pool, as in `PoolSettings`. `host_room` None: not known before a host tells; `max_step` None:
    as many at once as it takes."""

    name: str
    min_hosts: int
    max_hosts: int
    host_room: Room | None
    idle_to_zero_s: float
    scale_in_cooldown_s: float
    warm_default: int
    warm_max: int
    warm_keep_s: float
    max_step: int | None = None
    headroom_sandboxes: int = 0
    headroom_share: float = 0.0
    scale_in_margin: float = 0.0
    drain_below: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What holds for all. `tick_s`: how far apart two looks may be. The others as in `ProvisionerSettings`."""

    pools: tuple[PoolPolicy, ...]
    lease_s: float
    lost_margin_s: float
    host_start_s: float
    host_queue_s: float = 0.0
    tick_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class InstanceFacts:
    """A machine as its driver knows it; all as in `provisioner.capacity.port.Instance`."""

    id: str
    host: HostId
    alive: bool
    detail: str | None = None
    queued: bool = False
    ran_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A host's record, and its machine.

    Attributes:
        view: As placement sees it.
        instance: None when the driver knows none (any more).
        sessions, sandboxes: How many the control plane has on it, and how many its agent reports.
        drain, draining: Wanted, and acknowledged by its agent.
        levels: Its present warm orders.
    """

    view: HostView
    state: HostState
    created_at: datetime
    registered_at: datetime | None
    heard_at: datetime | None
    busy_at: datetime | None
    instance: InstanceFacts | None
    sessions: int = 0
    sandboxes: int = 0
    drain: bool = False
    draining: bool = False
    levels: tuple[WarmLevel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A session in the queue. `leased`: some replica is placing it now; `since`: when it was asked for, which decides
    nothing and is only told."""

    session: SessionId
    pool: str
    substrate: Substrate
    room: Room
    warm: WarmName
    expires_at: datetime
    leased: bool = False
    since: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A prepare. `claimed`: sandboxes of its kind that sessions took since it was made and still hold."""

    id: str
    pool: str
    key: WarmKey
    source: Source
    room: Room
    count: int
    expires_at: datetime
    by: datetime | None = None
    claimed: int = 0


@dataclass(frozen=True, kw_only=True)
class Recent:
    """How often sandboxes of a kind were asked for. `busiest`: the most within one bucket of late."""

    pool: str
    key: WarmKey
    source: Source
    room: Room
    last_at: datetime
    busiest: int


@dataclass(frozen=True, kw_only=True)
class View:
    """All that the planner looks at. `orphans`: machines whose host has no record."""

    hosts: tuple[HostFacts, ...] = ()
    orphans: tuple[InstanceFacts, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    recent: tuple[Recent, ...] = ()
    pools: Mapping[str, PoolState] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoseHost:
    """Declare a host lost. `failed`: it never came up."""

    host: HostId
    pool: str
    detail: str
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class StopInstance:
    """End a machine."""

    instance: str
    host: HostId
    reason: str


@dataclass(frozen=True, kw_only=True)
class SetLevels:
    """A host's warm orders from now on."""

    host: HostId
    levels: tuple[WarmLevel, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now; empty when all is as it should be.

    Attributes:
        start: How many hosts to start per pool.
        resume: Hosts per pool whose start was ordered and whose driver knows no machine of theirs yet, oldest first:
            the driver is asked for them again, before those of `start`.
        lose: Hosts to declare lost.
        drain, undrain: Hosts to change so.
        stop: Machines to end.
        forget: Records of hosts that are over.
        levels: Warm orders that change.
        expire: Sessions whose time ended in the queue.
        drop: Prepares (pool, id) that have expired.
        pools: States of pools that change.
    """

    start: Mapping[str, int] = field(default_factory=dict)
    resume: Mapping[str, tuple[HostId, ...]] = field(default_factory=dict)
    lose: tuple[LoseHost, ...] = ()
    drain: tuple[HostId, ...] = ()
    undrain: tuple[HostId, ...] = ()
    stop: tuple[StopInstance, ...] = ()
    forget: tuple[HostId, ...] = ()
    levels: tuple[SetLevels, ...] = ()
    expire: tuple[SessionId, ...] = ()
    drop: tuple[tuple[str, str], ...] = ()
    pools: tuple[PoolState, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return self == Plan()
