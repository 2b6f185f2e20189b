"""The records that the store keeps: frozen; `codec` turns them to items and back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from provisioner.codec import RecordTooNew, dump, load
from provisioner.pool_state import PoolState
from shoal.contract.base import HostId, KeyId, SessionId, SnapshotId, TenantId
from shoal.contract.errors import ErrorDetail
from shoal.contract.host import Capacity, Load, WarmKey, WarmReport
from shoal.contract.images import ImageConfig, Layer
from shoal.contract.sessions import End, Network, Resources, ResourcesAsked, Restored
from shoal.contract.states import (
    HostState,
    ImageState,
    Phase,
    Scope,
    SessionState,
    SnapshotState,
    Substrate,
)


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Who is isolated, limited and billed. `parent` None is the root; a child's quota was carved out of its parent's.

    Attributes:
        max_sessions, max_cpu_millis, max_memory_mib: Its quota; None means no limit of its own.
    """

    id: TenantId
    name: str
    parent: TenantId | None
    created_at: datetime
    max_sessions: int | None = None
    max_cpu_millis: int | None = None
    max_memory_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key, by the SHA-256 of its secret. `prefix` is what people recognise it by; `revoked_at` None: it works."""

    id: KeyId
    tenant: TenantId
    hash: str
    prefix: str
    name: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a session's disk starts from, resolved once: it never changes for the session.

    `digest` is the image's or the snapshot's; the layers are in the manifest of that digest.
    """

    digest: str
    image_digest: str
    image: str | None = None
    snapshot: SnapshotId | None = None


@dataclass(frozen=True, kw_only=True)
class Retiring:
    """The incarnation before this one, which must be ended before the session starts again."""

    host: HostId
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session.

    Attributes:
        request_hash: SHA-256 of the body that made it: tells a repeat from another request.
        epoch: The incarnation that runs or is being placed; counts from 1.
        source: Where it began. `restore_from`: where this epoch's disk comes from; None is `source`.
        placer, placer_until: The replica that places it now, and until when others leave it alone.
        attempts: Starts that failed since it last ran.
        last_seq: As of the last state change or heartbeat that was written down.
        first_seq: The first seq of this epoch.
        journals: Epochs whose journals are in the blob store.
        retiring: The incarnation to be ended first.
        holds_quota, grant: Whether its share of the quota is taken, and of which shard.
        shards, queue_shards: Over how many shards its tenant's lists and its pool's queue were then spread.
        error: Why its last start failed; None when none did, or when it ran since.
    """

    id: SessionId
    tenant: TenantId
    key_id: KeyId
    request_hash: str
    name: str | None = None
    run: str | None = None
    pool: str
    substrate: Substrate
    state: SessionState
    phase: Phase | None = None
    epoch: int
    source: Source
    resources: Resources
    env: dict[str, str]
    workdir: str | None = None
    user: str | None = None
    on_start: tuple[str, ...]
    network: Network
    labels: dict[str, str]
    created_at: datetime
    expires_at: datetime
    idle_pause_s: int | None = None
    idle_timeout_s: int | None = None
    on_host_loss: str
    durability: str
    snapshot_every: int | None = None
    queue: bool = True
    ready_at: datetime | None = None
    ended_at: datetime | None = None
    host: HostId | None = None
    address: str | None = None
    warm: bool | None = None
    restore_from: Source | None = None
    restored: Restored | None = None
    placer: str | None = None
    placer_until: datetime | None = None
    attempts: int = 0
    last_seq: int = 0
    first_seq: int = 1
    journals: tuple[int, ...] = ()
    last_snapshot: SnapshotId | None = None
    last_snapshot_seq: int | None = None
    retiring: Retiring | None = None
    holds_quota: bool = True
    grant: int = 0
    shards: int = 1
    queue_shards: int = 1
    error: ErrorDetail | None = None
    end: End | None = None


@dataclass(frozen=True, kw_only=True)
class Queued:
    """A session that waits for a place (its entry in its pool's queue)."""

    session: SessionId
    tenant: TenantId
    run: str | None
    resources: Resources
    key: WarmKey
    created_at: datetime
    expires_at: datetime
    placer_until: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A session's sandbox on a host (its entry in the host's list). `since`: when it was written down;
    `look`: changes with what the host must hear."""

    session: SessionId
    epoch: int
    host: HostId
    resources: Resources
    key: WarmKey
    since: datetime
    look: str | None = None


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, or a task, that runs the agent.

    Attributes:
        instance: What the capacity driver calls it.
        join_hash, token_hash: SHA-256 of its one-time join token and of the token its heartbeats carry.
        boot_id: Who registered; None until then.
        heard_at: When its last heartbeat that was written down arrived.
        beat, said_at: That heartbeat's number, and its time by the host's own clock.
        held: What the sessions on it hold, by the control plane's own count.
        reserved: What its agent says is held, warm sandboxes included.
        sessions: How many sessions the control plane has on it; `sandboxes`: how many of theirs its agent reports.
        busy_at: When a session was last on it, or when it registered.
        drain: Whether the control plane wants it drained.
        draining: Whether its agent takes no new sandboxes.
    """

    id: HostId
    pool: str
    state: HostState
    instance: str
    created_at: datetime
    join_hash: str
    token_hash: str | None = None
    boot_id: str | None = None
    address: str | None = None
    version: str | None = None
    registered_at: datetime | None = None
    heard_at: datetime | None = None
    said_at: datetime | None = None
    beat: int = 0
    capacity: Capacity | None = None
    reserved: Capacity | None = None
    held: Capacity | None = None
    load: Load = field(default_factory=Load)
    substrates: tuple[Substrate, ...] = ()
    warm: tuple[WarmReport, ...] = ()
    layers: tuple[str, ...] = ()
    sessions: int = 0
    sandboxes: int = 0
    busy_at: datetime | None = None
    drain: bool = False
    draining: bool = False
    last_event: int = 0
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WarmLevel:
    """How many warm sandboxes of a key a host is to keep."""

    key: WarmKey
    source: Source
    count: int


@dataclass(frozen=True, kw_only=True)
class HostOrders:
    """What the planner wants of a host; its heartbeats carry it there."""

    host: HostId
    warm: tuple[WarmLevel, ...] = ()
    drain: bool = False
    shutdown: bool = False


@dataclass(frozen=True, kw_only=True)
class Demand:
    """How often sandboxes of a key were asked for lately. `counts` are per bucket of `DEMAND_BUCKET_S`."""

    pool: str
    key: WarmKey
    source: Source
    resources: Resources
    last_at: datetime
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Capacity asked for before it is needed."""

    id: str
    tenant: TenantId
    pool: str
    sandboxes: int
    source: Source
    resources: Resources
    substrate: Substrate
    created_at: datetime
    expires_at: datetime
    run: str | None = None
    by: datetime | None = None
    request_hash: str = ""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A durable copy of a session's disk, its layers in the manifest of `digest`. `shards`: as its session's."""

    id: SnapshotId
    tenant: TenantId
    session: SessionId
    run: str | None
    state: SnapshotState
    epoch: int
    host: HostId | None
    created_at: datetime
    request_hash: str = ""
    client_id: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    seq: int | None = None
    open_actions: tuple[str, ...] = ()
    image_digest: str = ""
    image: str | None = None
    parent: SnapshotId | None = None
    digest: str | None = None
    layers: int = 0
    size_bytes: int = 0
    resources: Resources = field(default_factory=Resources)
    available_at: datetime | None = None
    error: ErrorDetail | None = None
    shards: int = 1


@dataclass(frozen=True, kw_only=True)
class Image:
    """A name and a tag for an image digest. `builder`, `builder_until`: the replica that builds it, and until when."""

    tenant: TenantId
    name: str
    tag: str
    state: ImageState
    request_hash: str
    request: str
    created_at: datetime
    phase: str | None = None
    digest: str | None = None
    layers: tuple[Layer, ...] = ()
    config: ImageConfig = field(default_factory=ImageConfig)
    resources: ResourcesAsked = field(default_factory=ResourcesAsked)
    provenance: dict[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    available_at: datetime | None = None
    builder: str | None = None
    builder_until: datetime | None = None
    error: ErrorDetail | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """A create of many sessions, so that whoever comes next can finish it. `body`: the requests as JSON lines, one line
    when all are alike; `indexes`: those of them that quota was taken for; `grants`: of which shards of the quota,
    and for how many each, in the order of `indexes`."""

    id: str
    tenant: TenantId
    key_id: KeyId
    request_hash: str
    body: str
    count: int
    indexes: tuple[int, ...]
    grants: tuple[tuple[int, int], ...]
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """A key pair for route tokens: raw Ed25519 keys in URL-safe base64. Signs until `retires_at`, is accepted until
    `ends_at`."""

    kid: str
    private: str
    public: str
    created_at: datetime
    retires_at: datetime
    ends_at: datetime


__all__ = [
    "ApiKey",
    "Assignment",
    "Demand",
    "Group",
    "Host",
    "HostOrders",
    "Image",
    "PoolState",
    "Prepare",
    "Queued",
    "RecordTooNew",
    "Retiring",
    "Session",
    "SigningKey",
    "Snapshot",
    "Source",
    "Tenant",
    "WarmLevel",
    "dump",
    "load",
    "replace",
]
