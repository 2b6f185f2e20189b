"""Sessions: what a trainer asks for and what it is told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.contract.base import Answer, Labels, Name, SessionId, SnapshotId, Time, WaitSeconds, Wire
from shoal.contract.errors import ErrorDetail
from shoal.contract.states import EndReason, Phase, SessionState, Substrate

#: How many sessions one call may create.
MAX_COUNT = 1000


class Resources(Wire):
    """Hard limits of a sandbox. CPU in thousandths of a core; memory, disk and /dev/shm in MiB."""

    cpu_millis: int = Field(default=1000, ge=10, le=256_000)
    memory_mib: int = Field(default=1024, ge=32, le=1_048_576)
    disk_mib: int = Field(default=4096, ge=64, le=1_048_576)
    pids: int = Field(default=512, ge=8, le=32_768)
    shm_mib: int = Field(default=64, ge=1, le=65_536)


class ResourcesAsked(Wire):
    """Resources where None means: the image's default, else that of `Resources`."""

    cpu_millis: int | None = Field(default=None, ge=10, le=256_000)
    memory_mib: int | None = Field(default=None, ge=32, le=1_048_576)
    disk_mib: int | None = Field(default=None, ge=64, le=1_048_576)
    pids: int | None = Field(default=None, ge=8, le=32_768)
    shm_mib: int | None = Field(default=None, ge=1, le=65_536)


class Network(Wire):
    """What a sandbox may reach. `none`: nothing but its own loopback."""

    mode: Literal["none", "allowlist"] = "none"
    allow: list[Annotated[str, Field(min_length=1, max_length=300)]] = Field(
        default_factory=list, max_length=200
    )

    @model_validator(mode="after")
    def _a_list_needs_its_mode(self) -> Network:
        if self.allow and self.mode == "none":
            raise ValueError('`allow` needs `mode: "allowlist"`')
        return self


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")]
EnvValue = Annotated[str, Field(max_length=131_072, pattern=r"^[^\x00]*$")]


class SessionCreate(Wire):
    """`POST /v1/sessions`. Exactly one of `image` and `snapshot`.

    Attributes:
        image: `name:tag` of a registered image.
        snapshot: A snapshot to start from.
        name: Unique in the run: the same name answers the session there is.
        workdir: None means the image's, else /workspace.
        user: None means the image's, else root.
        on_start: Shell commands run after the start and after every restore, before the first action.
        ttl_s: Seconds from creation to the session's end.
        idle_pause_s: Seconds without activity until it pauses; None never pauses.
        idle_timeout_s: Seconds without activity until it ends; None never ends.
        snapshot_every: Seconds between automatic snapshots; None takes none.
        count: How many sessions to make of this; over 1 answers `sessions`.
        queue: Whether to wait for capacity; False answers `no_capacity` instead.
        wait_s: Seconds this call may wait for the session to run.
    """

    image: str | None = Field(default=None, max_length=300)
    snapshot: SnapshotId | None = None
    name: Name | None = None
    substrate: Substrate = Substrate.CONTAINER
    pool: Name | None = None
    run: Name | None = None
    labels: Labels = Field(default_factory=dict)
    resources: ResourcesAsked = Field(default_factory=ResourcesAsked)
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, max_length=500)
    workdir: str | None = Field(default=None, pattern=r"^/[^\x00]*$", max_length=4096)
    user: str | None = Field(default=None, min_length=1, max_length=64)
    on_start: list[Annotated[str, Field(min_length=1, max_length=65_536)]] = Field(
        default_factory=list, max_length=32
    )
    network: Network = Field(default_factory=Network)
    ttl_s: int = Field(default=14_400, ge=1, le=1_209_600)
    idle_pause_s: int | None = Field(default=600, ge=1)
    idle_timeout_s: int | None = Field(default=None, ge=1)
    on_host_loss: Literal["fail", "restore"] = "fail"
    snapshot_every: int | None = Field(default=None, ge=10)
    durability: Literal["host", "remote"] = "host"
    count: int = Field(default=1, ge=1, le=MAX_COUNT)
    queue: bool = True
    wait_s: WaitSeconds = 25.0

    @model_validator(mode="after")
    def _one_source(self) -> SessionCreate:
        if (self.image is None) == (self.snapshot is None):
            raise ValueError("give exactly one of `image` and `snapshot`")
        return self


class SessionBatch(Wire):
    """`POST /v1/sessions:batch`: sessions that are not alike. Each item's `count` must be 1; its `wait_s` is unused."""

    items: list[SessionCreate] = Field(min_length=1, max_length=MAX_COUNT)
    wait_s: WaitSeconds = 25.0


class SessionPatch(Wire):
    """`PATCH /v1/sessions/{id}`: only the fields given change. `ttl_s` counts from now."""

    ttl_s: int | None = Field(default=None, ge=1, le=1_209_600)
    idle_pause_s: int | None = Field(default=None, ge=1)
    idle_timeout_s: int | None = Field(default=None, ge=1)
    labels: Labels | None = None
    network: Network | None = None


class SessionsDelete(Wire):
    """`POST /v1/sessions:delete`: a whole run, or a list of ids."""

    run: Name | None = None
    ids: list[SessionId] | None = Field(default=None, max_length=10_000)

    @model_validator(mode="after")
    def _one_choice(self) -> SessionsDelete:
        if (self.run is None) == (self.ids is None):
            raise ValueError("give exactly one of `run` and `ids`")
        return self


class SessionReplace(Wire):
    """`POST .../replace`: throw the sandbox away; the session goes on in the next epoch."""

    from_: Literal["image", "last_snapshot"] = Field(default="image", alias="from")
    wait_s: WaitSeconds = 25.0


class SessionAck(Wire):
    """`POST .../ack`: the caller has seen that this epoch's disk was rewound."""

    epoch: int = Field(ge=1)


class Restored(Answer):
    """What a restored session went back to. `from` is `image` or a snapshot's id; `seq` is the last action that the
    disk holds (0: none); `lost_actions` are the ids of recorded actions after it, oldest first, 1,000 at the most."""

    from_: str = Field(alias="from", serialization_alias="from")
    seq: int
    lost_actions: list[str] = Field(default_factory=list)
    acknowledged: bool = False


class End(Answer):
    """Why a session ended."""

    reason: EndReason
    detail: str | None = None


class Direct(Answer):
    """The way straight to the session's host, for callers that can reach it; good for at most 60 s."""

    url: str
    token: str


class Session(Answer):
    """A session as the service tells it. `host` is opaque; `ready_at` is when it first ran; `waiting_for`: why no host
    comes for it, while it waits for one and that is known."""

    id: SessionId
    name: str | None = None
    state: SessionState
    phase: Phase | None = None
    waiting_for: str | None = None
    epoch: int
    image: str | None = None
    snapshot: SnapshotId | None = None
    image_digest: str | None = None
    substrate: Substrate
    pool: str
    run: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    resources: Resources
    network: Network
    created_at: Time
    ready_at: Time | None = None
    ended_at: Time | None = None
    expires_at: Time
    idle_pause_s: int | None = None
    idle_timeout_s: int | None = None
    host: str | None = None
    last_seq: int = 0
    last_snapshot: SnapshotId | None = None
    warm: bool | None = None
    restored: Restored | None = None
    end: End | None = None
    direct: Direct | None = None


class SessionItem(Answer):
    """One item of a batch: a session, or why there is none."""

    session: Session | None = None
    error: ErrorDetail | None = None


class Sessions(Answer):
    """What `count` > 1 and `:batch` answer, in the order asked."""

    sessions: list[SessionItem]


class SessionPage(Answer):
    """One page of a list; `cursor` is None at the end."""

    sessions: list[Session]
    cursor: str | None = None


class SessionsDeleted(Answer):
    """What `:delete` answers: how many sessions are ending or ended by it."""

    ids: list[SessionId]


class Event(Answer):
    """Something that happened to a session; `kind` is a dotted name, `data` its facts.

    Limits hit are `limit.memory` (processes were killed for memory: `count`, `limit_mib`), `limit.pids` (processes
    could not be started: `count`, `limit`) and `limit.disk` (the disk was seen full: `limit_mib`): each at most once a
    minute and sandbox, with the count since the last, and once more at the sandbox's end where there is more to tell.
    """

    at: Time
    kind: str
    message: str
    data: dict[str, object] = Field(default_factory=dict)


class EventPage(Answer):
    """Events, oldest first."""

    events: list[Event]
    cursor: str | None = None
