"""What a heartbeat says, and what its reply makes happen."""

from __future__ import annotations

from collections.abc import Callable

from runtime_image.agent.clock import Clock
from runtime_image.agent.events import Events
from runtime_image.agent.layer_store import LayerStore
from runtime_image.agent.machine import LoadMeter
from runtime_image.agent.metering import UsageQueue
from runtime_image.agent.service import SandboxService
from runtime_image.agent.settings import AgentSettings
from runtime_image.agent.snapshots import Snapshots
from runtime_image.agent.warm import WarmPool
from shoal.contract.host import Heartbeat, HeartbeatReply, Register
from shoal.contract.states import EndReason, Substrate

VERSION = "0.1.0"
_SUBSTRATES = [Substrate.CONTAINER]


class Report:
    """Puts heartbeats together and carries out the replies. Everything in a reply is a level: a lost one is made good
    by the next."""

    def __init__(
        self,
        *,
        settings: AgentSettings,
        address: str,
        boot_id: str,
        service: SandboxService,
        warm: WarmPool,
        layers: LayerStore,
        snapshots: Snapshots,
        usage: UsageQueue,
        events: Events,
        load: LoadMeter,
        clock: Clock,
        shutdown: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._address = address
        self._boot_id = boot_id
        self._service = service
        self._warm = warm
        self._layers = layers
        self._snapshots = snapshots
        self._usage = usage
        self._events = events
        self._load = load
        self._clock = clock
        self._shutdown = shutdown
        self.counters: Callable[[], dict[str, float]] = dict

    def register(self) -> Register:
        """How this host introduces itself."""
        return Register(
            join_token=self._settings.join_token.get_secret_value(),
            boot_id=self._boot_id,
            address=self._address,
            capacity=self._service.capacity,
            substrates=_SUBSTRATES,
            version=VERSION,
        )

    def beat(self, number: int) -> Heartbeat:
        """Everything this host knows."""
        return Heartbeat(
            boot_id=self._boot_id,
            beat=number,
            at=self._clock.now(),
            address=self._address,
            capacity=self._service.capacity,
            reserved=self._service.reserved(),
            load=self._load.read(),
            substrates=_SUBSTRATES,
            draining=self._service.draining,
            sandboxes=[hosted.status() for hosted in self._service],
            warm=self._warm.report(),
            layers=self._layers.digests(),
            snapshots=self._snapshots.report(),
            usage=self._usage.head(),
            events=self._events.head(),
            counters=self.counters(),
        )

    def obey(self, reply: HeartbeatReply, beat: Heartbeat) -> None:
        """Carry out what the reply to `beat` says."""
        self._usage.acked(min(reply.acked_usage, len(beat.usage)))
        self._events.acked(reply.acked_event)
        self._service.draining = reply.drain or reply.shutdown
        for released in reply.release:
            hosted = self._service.find(released.session, released.epoch)
            if hosted is not None:
                self._service.end(hosted, EndReason.DELETED, "released by the control plane")
        for forgotten in reply.forget:
            self._service.forget(forgotten.session, forgotten.epoch)
        self._snapshots.forget(reply.forget_snapshots)
        self._warm.set_orders([] if self._service.draining else reply.warm)
        if reply.shutdown:
            self._shutdown()
