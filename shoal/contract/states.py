"""The states of things that live, as the wire names them. The tables of moves are in provisioner.lifecycle."""

from __future__ import annotations

from enum import StrEnum


class SessionState(StrEnum):
    """Where a session is in its life."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    RESTORING = "restoring"
    ENDING = "ending"
    ENDED = "ended"


class Phase(StrEnum):
    """What a session that is not running yet is doing; None once it runs."""

    QUEUED = "queued"
    WAITING_FOR_HOST = "waiting_for_host"
    PLACING = "placing"
    FETCHING_IMAGE = "fetching_image"
    STARTING_SANDBOX = "starting_sandbox"
    ON_START = "on_start"
    FLUSHING_JOURNAL = "flushing_journal"


class EndReason(StrEnum):
    """Why a session ended."""

    DELETED = "deleted"
    TTL = "ttl"
    IDLE = "idle"
    OOM = "oom"
    HOST_LOST = "host_lost"
    FAILED = "failed"
    QUOTA = "quota"
    BUDGET = "budget"


class ActionStatus(StrEnum):
    """Where an action is. `unknown`: it had started when its host crashed. `rolled_back`: it ended, and then the
    session's disk went back to a moment before it."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    UNKNOWN = "unknown"
    ROLLED_BACK = "rolled_back"


class SnapshotState(StrEnum):
    """Where a snapshot is; `available` only once it is durable."""

    CREATING = "creating"
    AVAILABLE = "available"
    FAILED = "failed"


class ImageState(StrEnum):
    """Where an image is."""

    BUILDING = "building"
    AVAILABLE = "available"
    FAILED = "failed"


class HostState(StrEnum):
    """Where a host is: `starting` until it registers, `draining` takes no new sandboxes, `lost` is fenced."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    GONE = "gone"


class Substrate(StrEnum):
    """How a sandbox is isolated."""

    CONTAINER = "container"
    GVISOR = "gvisor"
    MICROVM = "microvm"


class Scope(StrEnum):
    """What an API key may do. `admin` includes all others."""

    ADMIN = "admin"
    SESSIONS = "sessions"
    IMAGES = "images"
    READ = "read"
    COSTS = "costs"
