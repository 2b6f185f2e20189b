"""A whole provisioner in virtual time: fakes below, use cases above, hosts that do what agents do."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable
from typing import Any, TypeVar

from provisioner.agents.fake import FakeAgents, FakeHost
from provisioner.auth import DEFAULT_TENANT, Principal
from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.builders.fake import FakeBuilder
from provisioner.capacity.fake import FakeCapacity
from provisioner.clock import ManualClock
from provisioner.manifests import canonical, digest_of
from provisioner.route_tokens import RouteSigner
from provisioner.services import Services, build_services
from provisioner.settings import PoolSettings, ProvisionerSettings
from provisioner.store.fake import FakeStore
from provisioner.store.port import Store, StoreError
from shoal.contract.base import HostId, KeyId, SessionId
from shoal.contract.errors import ShoalError
from shoal.contract.host import Capacity, Register
from shoal.contract.images import ImageManifest, ImagePut, Layer, LayersSource
from shoal.contract.sessions import ResourcesAsked, SessionCreate
from shoal.contract.states import Scope, Substrate

T = TypeVar("T")
WHO = Principal(tenant=DEFAULT_TENANT, key=KeyId("key_test"), scopes=frozenset({Scope.ADMIN}))
IMAGE = "code:1"
SHAPE = Capacity(cpu_millis=8000, memory_mib=8192, disk_mib=65_536, sandboxes=8)


def pool(**changes: Any) -> PoolSettings:
    """A pool of small hosts, without warm sandboxes unless said."""
    about: dict[str, Any] = {"max_hosts": 3, "host_capacity": SHAPE, "warm_default": 0, "warm_max": 0}
    return PoolSettings(**(about | changes))


class World:
    """Services over fakes. `settle` lets tasks run in virtual time; `beat` lets hosts report and obey."""

    def __init__(self, store: Store | None = None, settings: ProvisionerSettings | None = None) -> None:
        self.clock = ManualClock()
        self.store = store or FakeStore(clock=self.clock.now)
        self.blobs = FakeBlobs()
        self.agents = FakeAgents()
        self.capacity = FakeCapacity(self.clock)
        self.builder = FakeBuilder(self.blobs)
        self.settings = settings or ProvisionerSettings(pools=(pool(),))
        self.services: Services = self.replica("one")
        self.tokens: dict[HostId, str] = {}

    def replica(self, name: str, **options: Any) -> Services:
        """Another control plane process over the same state. `options` are those of `build_services`."""
        counter = itertools.count(1)
        signer = RouteSigner(self.store, self.clock, key_life_s=86_400)
        about: dict[str, Any] = {
            "store": self.store,
            "blobs": self.blobs,
            "agents": self.agents,
            "capacity": self.capacity,
            "clock": self.clock,
            "signer": signer,
            "settings": self.settings,
            "replica": name,
            "builder": self.builder,
            "ids": lambda kind: f"{kind}_{name}{next(counter):04d}",
            "chance": random.Random(7),
        }
        return build_services(**(about | options))

    async def open(self) -> World:
        """Keys, a tenant and an image."""
        await self.services.signer.refresh()
        await self.services.auth.bootstrap()
        await self.add_image()
        return self

    async def add_image(self, tag: str = "1", **resources: int) -> None:
        """Register `code:<tag>` of one layer."""
        data = f"layer of {tag}".encode()
        digest = digest_of(data)
        self.blobs.objects[names.layer(digest)] = data
        layer = Layer(digest=digest, diff_id=digest, size_bytes=len(data))
        manifest = ImageManifest(architecture="amd64", layers=[layer])
        asked = ResourcesAsked(**({"memory_mib": 1024, "disk_mib": 1024} | resources))
        body = ImagePut(source=LayersSource(manifest=manifest), resources=asked, wait_s=0)
        await self.services.images.put(WHO, "code", tag, body)
        await self.services.context.background.idle()
        image = await self.services.images.get(WHO, "code", tag)
        assert image.digest == digest_of(canonical(manifest))

    async def finish(self, work: Awaitable[T], *, limit_s: float = 60.0, beats: bool = True) -> T:
        """Run `work` to its end, moving virtual time on and letting hosts report.

        Over a store with threads of its own, real moments pass between the virtual ones.
        """
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        waited = 0.0
        while not task.done():
            if not isinstance(self.store, FakeStore):
                await asyncio.wait({task}, timeout=0.005)
            await self.run(0.1, beats=beats)
            waited += 0.1
            if waited > limit_s:
                task.cancel()
                raise AssertionError(f"not done within {limit_s} virtual seconds")
        return task.result()

    async def drive(self, work: Awaitable[T]) -> T:
        """Run `work` to its end, moving virtual time on while it waits."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        for _ in range(1000):
            for _ in range(10):
                await asyncio.sleep(0)
                if task.done():
                    return task.result()
            if isinstance(self.store, FakeStore):
                await self.clock.advance(0.05)
            else:
                await asyncio.wait({task}, timeout=0.02)
        raise AssertionError("it does not end")

    async def run(self, seconds: float, *, beats: bool = True) -> None:
        """Let time pass in steps of 0.1 s; hosts report in each."""
        for _ in range(max(1, round(seconds / 0.1))):
            await self.clock.advance(0.1)
            if beats:
                await self.beat()
        await self.clock.advance(0)

    async def host(self, **about: Any) -> FakeHost:
        """A host that the reconciler would have started, registered."""
        services = self.services
        await services.reconciler._executor._start(self.settings.pools[0].name, 1)
        return await self.join(**about)

    async def join(self, **about: Any) -> FakeHost:
        """Let the host that was started last register."""
        start = self.capacity.starts[-1]
        about.setdefault("capacity", SHAPE)
        host = self.agents.add(start.host, **about)
        await self.register(host, start.join_token)
        return host

    async def register(self, host: FakeHost, join_token: str) -> None:
        """Let a host introduce itself, and report once."""
        registered = await self.services.hosts.register(
            Register(
                join_token=join_token,
                boot_id=host.boot_id,
                address=host.address,
                capacity=host.capacity,
                substrates=[Substrate.CONTAINER],
                version="test",
            )
        )
        self.tokens[host.id] = registered.token
        await self.beat(host.id)

    async def beat(self, *ids: str) -> None:
        """Let all hosts (or these) report, and do as they are told."""
        for id, host in list(self.agents.hosts.items()):
            if f"i-{id}" not in self.capacity._instances:
                # Its machine was ended, and everything on it with it.
                host.reachable = False
                host.sandboxes.clear()
            if (not ids or id in ids) and host.reachable:
                try:
                    reply = await self.drive(
                        self.services.hosts.heartbeat(id, host.heartbeat(self.clock.now()))
                    )
                except (ShoalError, StoreError):
                    # An agent goes on without an answer, and reports again.
                    continue
                host.obey(reply)

    async def tick(self) -> None:
        """One tick of the reconciler, and let what it started register."""
        await self.services.reconciler.tick()
        await self.arrive()

    async def arrive(self) -> None:
        """Let every host that was started and has not registered do so."""
        for start in self.capacity.starts:
            alive = f"i-{start.host}" in self.capacity._instances
            if alive and start.host not in self.agents.hosts:
                host = self.agents.add(start.host, capacity=SHAPE)
                await self.register(host, start.join_token)

    async def create(self, **fields: Any) -> SessionId:
        """Make a session of the image and let its placing end."""
        fields.setdefault("wait_s", 1)
        key = fields.pop("key", None)
        body = SessionCreate(image=IMAGE, **fields)
        created = await self.finish(self.services.sessions.create(WHO, body, idempotency_key=key))
        return created.session.id
