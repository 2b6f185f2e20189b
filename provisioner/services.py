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
                layers(who, LayersAsked) -> LayerUploads    (where to push the layers that are missing)
    transfers   announce(who, TransferCreate) -> Transfer;  send_out(who, session) -> id
                check_out(who, session, id) -> None;  read_link(id, *, media_type) -> URL
    links       check(token, method) -> BlobClaims          (links to this service, where blobs are a directory)
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

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from provisioner import keys, roster, spread
from provisioner.agents.port import AgentClient
from provisioner.auth import Auth
from provisioner.blob_links import BlobLinks
from provisioner.blobs.port import Blobs
from provisioner.builders.port import Builder
from provisioner.capacity.port import Capacity
from provisioner.clock import Clock
from provisioner.context import Background, Context, Ids, Wake
from provisioner.demand import DemandLog
from provisioner.departure import Departure
from provisioner.executor import Executor
from provisioner.fleet import Fleet
from provisioner.heartbeats import Heartbeats
from provisioner.hosts import Hosts
from provisioner.images import Images
from provisioner.manifests import Sources
from provisioner.model import Queued, load
from provisioner.pins import Pins
from provisioner.pools import Pools
from provisioner.pushed_layers import PushedLayers
from provisioner.reconcile import Reconciler
from provisioner.route_tokens import RouteSigner
from provisioner.sessions import Sessions
from provisioner.sessions.queue import Pump
from provisioner.settings import ProvisionerSettings
from provisioner.shift import Shifts
from provisioner.snapshots import Snapshots
from provisioner.store.port import Store
from provisioner.store.steady import SteadyStore
from provisioner.transfers import Transfers
from provisioner.turns import Turns
from provisioner.usage import Usage
from provisioner.waiters import Waiters
from provisioner.wakes import StoredWake
from shoal.contract.base import TenantId, new_id


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
    may leave both out and drive `reconciler.tick()` and `pump.drain()` itself. A process that runs only while it
    answers (Lambda) starts nothing, and answers in `turns`; a reconciler that is woken works in `shifts`."""

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
    transfers: Transfers
    links: BlobLinks
    reconciler: Reconciler
    pump: Pump
    context: Context
    capacity: Capacity
    turns: Turns
    shifts: Shifts
    _loops: list[asyncio.Task[None]] = field(default_factory=list, repr=False)

    async def start(self, *, reconciles: bool = True) -> None:
        """Read the keys and begin the background work.

        Args:
            reconciles: False leaves hosts to a reconciler in another process.

        Raises:
            ShoalError: UNAVAILABLE when the store does not answer.
        """
        await self.signer.refresh()
        if reconciles:
            self._loops.append(asyncio.create_task(self.reconciler.run(), name="reconciler"))
        else:
            self._loops.append(asyncio.create_task(self.turns.upkeep(), name="upkeep"))
        self._loops.append(asyncio.create_task(self.pump.run(), name="queue"))

    async def close(self) -> None:
        """End the background work; hosts go on. Store, blobs, agents and capacity stay the caller's to close."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops.clear()
        await self.context.background.close()

    async def end_hosts(self) -> None:
        """End every host and stop scaling: for the end of a service on one machine. Call it while the internal routes
        still answer, so that hosts can flush their journals and report what ended.

        Raises:
            CapacityError: Some could not be ended; calling again tries again.
        """
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops.clear()
        instances = await self.capacity.instances()
        await self.capacity.stop([instance.id for instance in instances])
        for instance in instances:
            await self.hosts.leave(instance.host)
            await self.hosts.forget(instance.host)

    async def counts(self) -> Counts:
        """What there is now: reads the live lists, so it is for a page that is asked for every few seconds."""
        store = self.context.store
        hosts = await roster.hosts(store)
        now = self.clock.now()
        sessions: Counter[str] = Counter()
        for tenant in await store.query_all(keys.TENANTS):
            id = TenantId(tenant.key.sk)
            family = keys.partitions(keys.live_list(id), await spread.lists_of(store, id))
            entries = await spread.everything(store, family)
            found = await store.get_many([keys.session(entry.item["session"]) for entry in entries])
            sessions.update(str(item.item["state"]) for item in found if item is not None)
        waiting = [
            load(Queued, item.item)
            for pool in self.settings.pools
            for item in await spread.queue(store, pool.name)
        ]
        oldest = min((entry.created_at for entry in waiting), default=now)
        return Counts(
            sessions=dict(sessions),
            hosts=dict(Counter(host.state.value for host in hosts)),
            queue=len(waiting),
            queue_age_s=(now - oldest).total_seconds(),
            warm=sum(report.ready for host in hosts for report in host.warm),
        )


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
    builder: Builder | None = None,
    ids: Ids = new_id,
    chance: random.Random | None = None,
    reconciler_elsewhere: bool = False,
    execution_enabled: bool = True,
) -> Services:
    """Wire the use cases.

    Args:
        signer: Shared with the agent client.
        replica: Names this process among its equals.
        builder: Makes images from recipes, references and archives; None answers those with NOT_IMPLEMENTED.
        ids: Makes an id of a kind.
        chance: For placement's draw and for jitter; None seeds one.
        reconciler_elsewhere: Whether the reconciler is another process, to be woken through the store.
        execution_enabled: False takes no new session and starts no host; what runs may end, and what is idle goes.
    """
    chance = chance or random.Random()
    steady = SteadyStore(store, clock, chance)
    sources = Sources(steady, blobs)
    background = Background()
    context = Context(
        store=steady,
        blobs=blobs,
        agents=agents,
        clock=clock,
        ids=ids,
        settings=settings,
        signer=signer,
        replica=replica,
        chance=chance,
        waiters=Waiters(clock),
        fleet=Fleet(steady, clock, settings),
        sources=sources,
        pins=Pins(steady, sources, clock),
        demand=DemandLog(clock),
        background=background,
        wake_queue=Wake(clock),
        wake_reconciler=(
            StoredWake(clock, steady, background, replica) if reconciler_elsewhere else Wake(clock)
        ),
        execution_enabled=execution_enabled,
    )
    sessions = Sessions(context)
    snapshots = Snapshots(context)
    links = BlobLinks(blobs, signer, clock)
    images = Images(context, builder, PushedLayers(blobs, links))
    transfers = Transfers(context, links)
    usage = Usage(context)
    departure = Departure(context, sessions)
    executor = Executor(context, capacity, sessions, departure)
    heartbeats = Heartbeats(context, sessions, snapshots, usage, departure)
    pump = Pump(context, sessions.placing)
    reconciler = Reconciler(context, capacity, executor, sessions, snapshots, images, transfers, store)
    return Services(
        settings=settings,
        store=steady,
        blobs=blobs,
        clock=clock,
        auth=Auth(steady, clock),
        signer=signer,
        sessions=sessions,
        snapshots=snapshots,
        images=images,
        pools=Pools(context),
        usage=usage,
        hosts=Hosts(context, heartbeats, departure, transfers),
        transfers=transfers,
        links=links,
        reconciler=reconciler,
        pump=pump,
        context=context,
        capacity=capacity,
        turns=Turns(context, pump),
        shifts=Shifts(context, reconciler, executor),
    )
