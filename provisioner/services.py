"""The use cases, assembled: what the HTTP surface calls, and what a composition root builds.

Every method that a route calls takes the `Principal` first, answers the contract's models, and raises `ShoalError`;
nothing of another tenant is visible (NOT_FOUND). Signatures at a glance:

    auth        authenticate(key) -> Principal; bootstrap() -> NewKey | None
    sessions    create(who, SessionCreate, *, idempotency_key=None, wait_s=None) -> Created(session, created)
                create_many(who, SessionCreate, *, idempotency_key=None, wait_s=None) -> Sessions (count > 1)
                create_batch(who, SessionBatch, *, idempotency_key=None) -> Sessions
                get(who, id, *, wait_s=0.0) -> Session         (waits for a change of state)
                list(who, *, run=None, name=None, state=None, labels=None, cursor=None, limit=100) -> SessionPage
                events(who, id, *, cursor=None, limit=100) -> EventPage
                patch(who, id, SessionPatch) -> Session
                delete(who, id, *, wait_s=0.0) -> Session;  delete_many(who, SessionsDelete) -> SessionsDeleted
                replace(who, id, SessionReplace) -> Session;  acknowledge(who, id, SessionAck) -> Session
                locate(who, id, *, wait_s=0.0) -> Location;  token(who, location) -> (token, seconds it is good)
                journals(who, id) -> tuple[int, ...]       (epochs whose journals are in the blob store, oldest first)
    snapshots   create(who, session, SnapshotCreate) -> Snapshot;  get(who, id, *, wait_s=0.0) -> Snapshot
                list(who, *, session=None, run=None, cursor=None, limit=100) -> SnapshotPage;  delete(who, id) -> None
    images      put(who, name, tag, ImagePut) -> Image;  get(who, name, tag, *, wait_s=0.0) -> Image
                list(who, *, cursor=None, limit=100) -> ImagePage;  delete(who, name, tag) -> None
    pools       list(who) -> PoolPage;  get(who, name) -> Pool
                prepare(who, pool, Prepare, *, idempotency_key=None) -> Prepared
                prepared(who, pool, id, *, wait_s=0.0) -> Prepared;  prepares(who, pool) -> PreparedPage
                release(who, pool, id) -> None
    usage       query(who, *, since=None, until=None, run=None, session=None, cursor=None, limit=100) -> UsagePage
    hosts       register(Register) -> Registered;  authenticate(host, token) -> None
                heartbeat(host, Heartbeat) -> HeartbeatReply;  urls(host, UrlsAsked) -> Urls;  leave(host) -> None
    signer      session(who, host, address, session, epoch) -> token;  public_keys
    metrics     await counts() -> Counts (sessions and hosts by state, queue length and age, warm)
"""

from __future__ import annotations

from dataclasses import dataclass

from provisioner.agents.port import AgentClient
from provisioner.auth import Auth
from provisioner.blobs.port import Blobs
from provisioner.capacity.port import Capacity
from provisioner.clock import Clock
from provisioner.hosts import Hosts
from provisioner.images import Images
from provisioner.pools import Pools
from provisioner.route_tokens import RouteSigner
from provisioner.sessions import Sessions
from provisioner.settings import ProvisionerSettings
from provisioner.snapshots import Snapshots
from provisioner.store.port import Store
from provisioner.usage import Usage


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What there is now, for the metrics page. `queue_age_s`: how long the first in the queue has waited."""

    sessions: dict[str, int]
    hosts: dict[str, int]
    queue: int
    queue_age_s: float
    warm: int


@dataclass(frozen=True, kw_only=True)
class Services:
    """Everything a surface needs. `start` begins the background work (reconciler, queue), `close` ends it; a test
    may leave both out and drive `reconciler.tick()` itself."""

    settings: ProvisionerSettings
    store: Store
    blobs: Blobs
    clock: Clock
    auth: Auth
    signer: RouteSigner
    sessions: Sessions
    snapshots: Snapshots
    images: Images
    pools: Pools
    usage: Usage
    hosts: Hosts

    async def start(self) -> None:
        """Read the keys and begin the background work."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the background work; hosts go on. Store, blobs, agents and capacity stay the caller's to close."""
        raise NotImplementedError

    async def counts(self) -> Counts:
        """What there is now."""
        raise NotImplementedError


def build_services(
    *,
    store: Store,
    blobs: Blobs,
    agents: AgentClient,
    capacity: Capacity,
    clock: Clock,
    signer: RouteSigner,
    settings: ProvisionerSettings,
    replica: str,
) -> Services:
    """Wire the use cases. `replica` names this process among its equals; `signer` is shared with the agent client."""
    raise NotImplementedError
