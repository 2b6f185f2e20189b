"""An agent's core over fakes: everything but processes, disks and sockets is real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from runtime_image.agent.adoption import Adopter
from runtime_image.agent.ending import Ender
from runtime_image.agent.events import Events
from runtime_image.agent.fakes import FakeControl, FakeLink, FakeRuntime, ManualClock
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.incarnate import Incarnator
from runtime_image.agent.journals import Journals
from runtime_image.agent.keeper import Keeper
from runtime_image.agent.layer_store import Stack
from runtime_image.agent.link import GuestLink
from runtime_image.agent.metering import UsageQueue
from runtime_image.agent.ports import DescriptorStore, NoStore
from runtime_image.agent.room import HostLimits
from runtime_image.agent.service import SandboxService
from runtime_image.agent.starting import Starter
from runtime_image.agent.transfer import UrlTransfer
from runtime_image.agent.warm import WarmPool
from shoal.contract.base import HostId, SessionId, TenantId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Capacity, HeartbeatReply, Registered, SandboxSource, SandboxStart
from shoal.contract.images import Layer
from shoal.contract.sessions import Resources
from shoal.contract.states import EndReason, Substrate
from shoal.contract.urls import Url

DIGEST = "sha256:" + "a" * 64
SOURCE = SandboxSource(
    digest=DIGEST, image_digest=DIGEST, layers=[Layer(digest=DIGEST, diff_id=DIGEST, size_bytes=1)]
)
SMALL = Resources(cpu_millis=100, memory_mib=64, disk_mib=256, pids=32)


class FakeLayers:
    """Layers that are always here, unless `missing`."""

    def __init__(self) -> None:
        self.held = 0
        self.missing = False

    async def acquire(self, layers: list[Layer]) -> Stack:
        """Pin them."""
        if self.missing:
            raise ShoalError(ErrorCode.IMAGE_PULL_FAILED, "missing", details={"phase": "fetching_image"})
        self.held += 1
        return Stack(layers=tuple(layers), paths=(Path("/nonexistent/layer"),))

    def release(self, stack: Stack) -> None:
        """Unpin them."""
        self.held -= 1

    def digests(self) -> list[str]:
        """One."""
        return [DIGEST]


@dataclass
class Host:
    """A host's core."""

    root: Path
    clock: ManualClock = field(default_factory=ManualClock)
    runtime: FakeRuntime = field(default_factory=FakeRuntime)
    layers: FakeLayers = field(default_factory=FakeLayers)
    links: list[FakeLink] = field(default_factory=list)
    nudges: int = 0
    store: DescriptorStore = field(default_factory=NoStore)
    on_connect: Callable[[FakeLink], None] = lambda link: None
    capacity: Capacity = field(
        default_factory=lambda: Capacity(cpu_millis=1000, memory_mib=2048, disk_mib=4096, sandboxes=4)
    )

    def __post_init__(self) -> None:
        registered = Registered(host=HostId("hst_1"), pool="p", token="t", lease_s=10, heartbeat_s=1, keys=[])
        self.control = FakeControl(HeartbeatReply(lease_s=10, heartbeat_s=1, keys=[]), registered)
        self.blobs = self.root / "blobs"
        self.control.place = lambda item: Url(
            url=(self.blobs / f"{item.session}-{item.epoch}").as_uri()  # type: ignore[union-attr]
        )
        self.usage, self.events = UsageQueue(), Events(self.clock)
        self.keeper = Keeper(self.store)
        self.journals = Journals(self.root / "journals", self.control, UrlTransfer())
        layers: Any = self.layers

        async def connect(sock: socket.socket | None) -> GuestLink:
            link = FakeLink()
            self.on_connect(link)
            link.sock = sock
            self.links.append(link)
            return cast(GuestLink, link)

        self.starter = _SocketlessStarter(
            runtime=self.runtime, layers=layers, connect=connect, clock=self.clock, concurrency=4
        )
        self.warm = WarmPool(
            runtime=self.runtime,
            starter=self.starter,
            layers=layers,
            keeper=self.keeper,
            clock=self.clock,
            concurrency=1,
            may_add=lambda ask: self.service.may_add_warm(ask),
        )
        host: Callable[[], HostId] = lambda: HostId("hst_1")  # noqa: E731
        self.incarnator = Incarnator(
            runtime=self.runtime,
            starter=self.starter,
            warm=self.warm,
            keeper=self.keeper,
            journals=self.journals,
            usage=self.usage,
            clock=self.clock,
            host=host,
            snapshot_index=lambda hosted, id: None,
        )
        self.ender = Ender(
            runtime=self.runtime,
            incarnator=self.incarnator,
            journals=self.journals,
            usage=self.usage,
            clock=self.clock,
            host=host,
        )

        def nudge() -> None:
            self.nudges += 1

        self.service = SandboxService(
            limits=HostLimits(capacity=self.capacity, disk_path=self.root, disk_floor_mib=0),
            runtime=self.runtime,
            warm=self.warm,
            incarnator=self.incarnator,
            ender=self.ender,
            journals=self.journals,
            events=self.events,
            clock=self.clock,
            nudge=nudge,
        )
        self.adopter = Adopter(
            runtime=self.runtime,
            service=self.service,
            incarnator=self.incarnator,
            warm=self.warm,
            keeper=self.keeper,
            journals=self.journals,
            layers=layers,
            connect=connect,
            clock=self.clock,
        )
        self.go_on = self.adopter.go_on

    def spec(self, session: str = "ses_1", epoch: int = 1, **fields: Any) -> SandboxStart:
        """What the control plane would ask."""
        return SandboxStart(
            session=SessionId(session),
            epoch=epoch,
            tenant=TenantId("ten_1"),
            pool="p",
            **{
                "source": SOURCE,
                "substrate": Substrate.CONTAINER,
                "resources": SMALL,
                "expires_at": self.clock.now() + timedelta(hours=1),
                **fields,
            },
        )

    async def start(self, session: str = "ses_1", epoch: int = 1, **fields: Any) -> Hosted:
        """Start one, and wait until it runs or has failed."""
        hosted = await self.service.start(self.spec(session, epoch, **fields))
        while hosted.state == "starting":
            await asyncio.sleep(0)
        return hosted

    async def ended(self, hosted: Hosted) -> None:
        """Return when it has ended."""
        assert hosted.ending is not None
        await hosted.ending


class _SocketlessStarter(Starter):
    """Fake sandboxes have no socket to greet through."""

    async def _greet(self, sandbox: Any) -> GuestLink:
        return await self._connect(None)  # type: ignore[arg-type]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A host with room for four sandboxes."""
    made = Host(tmp_path)
    yield made
    made.ender.give_up()
    for hosted in made.service:
        made.service.end(hosted, reason=EndReason.DELETED)
        if hosted.ending is not None:
            await hosted.ending
        hosted.journal.close()
    await made.warm.close()
