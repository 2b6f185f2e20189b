"""What the control plane and a host's agent say to each other.

    agent -> control plane    POST /internal/v1/hosts:register            Register -> Registered
                              POST /internal/v1/hosts/{host}/heartbeat    Heartbeat -> HeartbeatReply
                              POST /internal/v1/hosts/{host}/urls         UrlsAsked -> Urls (urls.py)
                              POST /internal/v1/hosts/{host}/leave        (drained: the host is going)
    control plane -> agent    PUT    /v1/sandboxes/{session}              SandboxStart -> SandboxStatus
                              GET    /v1/sandboxes/{session}?wait_s=      -> SandboxStatus
                              PATCH  /v1/sandboxes/{session}              SandboxPatch -> SandboxStatus
                              DELETE /v1/sandboxes/{session}?epoch=&reason=&wait_s=    -> SandboxStatus
                              POST   /v1/sandboxes/{session}/snapshots    SnapshotTake -> SnapshotTaken
                              GET    /v1/sandboxes/{session}/snapshots/{snapshot}?wait_s=   -> SnapshotTaken
    anyone with a session's route token -> agent
                              the public routes below /v1/sessions/{session}/ for actions, files, trajectory

The first group is authorised by the host's own token (from registration), the others by route tokens.
Orders to agents travel in heartbeat replies; every message may be repeated without harm.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field

from shoal.contract.base import Answer, HostId, SessionId, SnapshotId, TenantId, Time, WaitSeconds, Wire
from shoal.contract.errors import ErrorDetail
from shoal.contract.images import ImageConfig, Layer
from shoal.contract.route import PublicKey
from shoal.contract.sessions import EnvName, EnvValue, Event, Network, Resources
from shoal.contract.states import EndReason, Phase, Substrate
from shoal.contract.usage import UsageRecord

PROTOCOL = 1


class Capacity(Answer):
    """What a host lets sandboxes reserve, overcommit included and the agent's own reserve taken off."""

    cpu_millis: int
    memory_mib: int
    disk_mib: int
    sandboxes: int


class Load(Answer):
    """What is really used on a host at the moment."""

    cpu_used_millis: int = 0
    memory_available_mib: int = 0
    disk_free_mib: int = 0


class Register(Wire):
    """A host introduces itself. `boot_id` is the agent's own choice per first start and kept over its restarts."""

    protocol: int = PROTOCOL
    join_token: str
    boot_id: str
    address: str
    capacity: Capacity
    substrates: list[Substrate]
    version: str


class Registered(Answer):
    """What a host needs from then on. `token` authorises its heartbeats; `lease_s`: without an acknowledged heartbeat
    for so long (monotonic) the agent freezes its sandboxes and refuses work."""

    host: HostId
    pool: str
    token: str
    lease_s: float
    heartbeat_s: float
    keys: list[PublicKey]


SandboxState = Literal["starting", "running", "paused", "ending", "ended", "failed"]


class WarmKey(Answer):
    """What makes one warm sandbox as good as another: disk (by its image's or snapshot's digest), substrate, disk
    class. CPU, memory and pids are set at the claim."""

    digest: str
    substrate: Substrate
    disk_mib: int


class SandboxSource(Answer):
    """The disk to start from: layers bottom first, and the image's defaults. `digest` is the image's or snapshot's."""

    digest: str
    image_digest: str
    snapshot: SnapshotId | None = None
    layers: list[Layer]
    config: ImageConfig = Field(default_factory=ImageConfig)


class SandboxStart(Wire):
    """Start (or say that it runs already) a session's sandbox of this epoch.

    Attributes:
        first_seq: The next action's seq; all below are taken.
        rewound: Set when earlier epochs had actions that this disk does not hold: actions are refused with
            `session_rewound` until acknowledged. `restored_seq` is the last that it holds.
        history: Epochs whose journals are in the blob store, oldest first: recorded steps are answered from them.
    """

    session: SessionId
    epoch: int = Field(ge=1)
    tenant: TenantId
    run: str | None = None
    pool: str
    labels: dict[str, str] = Field(default_factory=dict)
    source: SandboxSource
    substrate: Substrate
    resources: Resources
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    on_start: list[str] = Field(default_factory=list)
    network: Network = Field(default_factory=Network)
    expires_at: Time
    idle_pause_s: int | None = None
    idle_timeout_s: int | None = None
    durability: Literal["host", "remote"] = "host"
    first_seq: int = Field(default=1, ge=1)
    rewound: bool = False
    restored_seq: int | None = None
    history: list[int] = Field(default_factory=list)
    wait_s: WaitSeconds = 25.0

    def settings(self, *, acknowledged: bool) -> SandboxPatch:
        """All that a patch can change, as it is here."""
        return SandboxPatch(
            epoch=self.epoch,
            expires_at=self.expires_at,
            idle_pause_s=self.idle_pause_s,
            idle_timeout_s=self.idle_timeout_s,
            labels=self.labels,
            network=self.network,
            acknowledged=acknowledged,
        )


class SandboxPatch(Wire):
    """Only the fields given change. `acknowledged`: the caller has acknowledged the rewind into this epoch."""

    epoch: int
    expires_at: Time | None = None
    idle_pause_s: int | None = None
    idle_timeout_s: int | None = None
    labels: dict[str, str] | None = None
    network: Network | None = None
    acknowledged: bool = False

    def mark(self) -> str:
        """What tells these settings from others, whoever computes it: a digest of their form on the wire."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


class SandboxStatus(Answer):
    """A sandbox as its agent knows it, in answers and in heartbeats.

    Attributes:
        last_seq: The last seq given to an action.
        running_actions: How many actions run now.
        idle_s: Seconds since the last activity; 0 while an action runs.
        warm: Whether it came from the warm pool.
        end_reason: Why it ended, when `state` is `ending`, `ended` or `failed`.
        journal_flushed: Whether the whole journal is in the blob store.
        error: Why it failed.
        timings_ms: How long each phase of the start took.
        lost_actions: After a rewind, the ids of recorded actions that the disk does not hold (1,000 at the most).
        settings: The mark of the settings that it goes by (`SandboxPatch.mark`): one that differs from the record's
            missed a patch, and is sent it again. Empty when it does not tell.
    """

    session: SessionId
    epoch: int
    state: SandboxState
    phase: Phase | None = None
    warm: bool = False
    last_seq: int = 0
    running_actions: int = 0
    idle_s: float = 0.0
    end_reason: EndReason | None = None
    end_detail: str | None = None
    journal_flushed: bool = False
    oom_kills: int = 0
    error: ErrorDetail | None = None
    timings_ms: dict[str, float] = Field(default_factory=dict)
    lost_actions: list[str] = Field(default_factory=list)
    settings: str = ""


class SnapshotTake(Wire):
    """Take a snapshot. The agent uploads its layer under the snapshot's id; the control plane commits the manifest."""

    snapshot: SnapshotId
    epoch: int
    exclude: list[str] = Field(default_factory=list)
    wait_s: WaitSeconds = 25.0


class SnapshotTaken(Answer):
    """How far a snapshot is on its host. `layers` are all layers bottom first, those of the session's source included;
    `open_actions` ran at the moment of the copy."""

    snapshot: SnapshotId
    session: SessionId
    epoch: int
    state: Literal["copying", "uploading", "uploaded", "failed"]
    seq: int = 0
    open_actions: list[str] = Field(default_factory=list)
    layers: list[Layer] = Field(default_factory=list)
    image_digest: str = ""
    config: ImageConfig = Field(default_factory=ImageConfig)
    size_bytes: int = 0
    frozen_ms: float = 0.0
    error: ErrorDetail | None = None


class WarmReport(Answer):
    """How many warm sandboxes of a key there are."""

    key: WarmKey
    ready: int
    starting: int = 0
    error: str | None = None


class SessionEvent(Answer):
    """An event that a host reports of one of its sessions; `n` counts up per host, so that a repeat is known."""

    n: int
    session: SessionId
    event: Event


class Heartbeat(Wire):
    """What a host knows, whole: sandboxes that the report does not name are not on it.

    Attributes:
        beat: Counts up; an older one arriving late is ignored.
        reserved: What sandboxes (sessions' and warm ones) hold of the capacity.
        layers: Digests of the layers on the disk.
        usage: Records not acknowledged yet, at most 500.
        events: Events not acknowledged yet, at most 500.
    """

    protocol: int = PROTOCOL
    boot_id: str
    beat: int
    at: Time
    address: str
    capacity: Capacity
    reserved: Capacity
    load: Load = Field(default_factory=Load)
    substrates: list[Substrate]
    draining: bool = False
    sandboxes: list[SandboxStatus] = Field(default_factory=list)
    warm: list[WarmReport] = Field(default_factory=list)
    layers: list[str] = Field(default_factory=list)
    snapshots: list[SnapshotTaken] = Field(default_factory=list)
    usage: list[UsageRecord] = Field(default_factory=list)
    events: list[SessionEvent] = Field(default_factory=list)
    counters: dict[str, float] = Field(default_factory=dict)


class WarmOrder(Answer):
    """Keep `count` warm sandboxes of `key`."""

    key: WarmKey
    source: SandboxSource
    count: int


class Incarnation(Answer):
    """One epoch of a session."""

    session: SessionId
    epoch: int


class HeartbeatReply(Answer):
    """What a host is to do. Everything is a level, not an edge: a lost reply is made good by the next.

    Attributes:
        warm: All warm levels; a key not named is 0.
        drain: Take no new sandboxes.
        shutdown: End everything and exit.
        release: Sandboxes that nobody owns: tear them down.
        forget: Ended sandboxes whose end is recorded: their local journals and reports may go.
        acked_usage: How many of the records sent, from the first, are stored.
        acked_event: The largest event number that is stored.
    """

    lease_s: float
    heartbeat_s: float
    keys: list[PublicKey]
    warm: list[WarmOrder] = Field(default_factory=list)
    drain: bool = False
    shutdown: bool = False
    release: list[Incarnation] = Field(default_factory=list)
    forget: list[Incarnation] = Field(default_factory=list)
    forget_snapshots: list[SnapshotId] = Field(default_factory=list)
    acked_usage: int = 0
    acked_event: int = 0


class FileSent(Answer):
    """A file, or a directory's tar, that an agent put at its transfer's URL."""

    size_bytes: int
    sha256: str
    kind: str
    mode: int
    mtime_ns: int
