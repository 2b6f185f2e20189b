"""The composition root: puts one host's agent together, runs it, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from runtime_image.agent import id_stretch, machine
from runtime_image.agent.adoption import Adopter
from runtime_image.agent.clock import SystemClock
from runtime_image.agent.control import HttpControlPlane
from runtime_image.agent.ending import Ender
from runtime_image.agent.events import Events
from runtime_image.agent.guest_runtime import build_guest_runtime
from runtime_image.agent.heartbeat import Heart, Reporter
from runtime_image.agent.holder import HolderClient, HolderError
from runtime_image.agent.host_runtime import runtime_settings
from runtime_image.agent.http.actions import ActionRoutes
from runtime_image.agent.http.app import create_app
from runtime_image.agent.http.files import FileRoutes
from runtime_image.agent.http.sandboxes import SandboxRoutes
from runtime_image.agent.incarnate import Incarnator
from runtime_image.agent.journals import Journals
from runtime_image.agent.keeper import Keeper
from runtime_image.agent.layer_store import LayerStore
from runtime_image.agent.life import Life
from runtime_image.agent.link import GuestLink
from runtime_image.agent.metering import UsageQueue
from runtime_image.agent.metrics import AgentMetrics, Sources
from runtime_image.agent.passages import Passages
from runtime_image.agent.ports import DescriptorStore, NoStore
from runtime_image.agent.report import Report
from runtime_image.agent.room import HostLimits
from runtime_image.agent.sandboxes import SandboxRuntime
from runtime_image.agent.service import SandboxService
from runtime_image.agent.settings import AgentSettings
from runtime_image.agent.snapshots import Snapshots
from runtime_image.agent.starting import Starter
from runtime_image.agent.tokens import TokenVerifier
from runtime_image.agent.transfer import UrlTransfer
from runtime_image.agent.warm import WarmPool
from runtime_image.layers import LayerCache
from shoal.contract.base import HostId, new_id
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import EndReason

_log = structlog.get_logger()

_LINK_TIMEOUT_S = 15.0
#: How long callers of a restarted agent wait for its first heartbeat, rather than be refused, seconds.
_FIRST_BEAT_S = 1.0


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling: the agent decides how it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Agent:
    """One host's agent. Use `run`, once."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._leave = False
        self._orphaned = False

    def stop(self, *, leave: bool = False) -> None:
        """End everything and let `run` return. `leave`: by order of the control plane, which is told."""
        self._leave = self._leave or leave
        self._stop.set()

    async def run(self) -> None:
        """Be a host until told to stop, by SIGTERM, SIGINT or the control plane; then nothing of it is left.

        Raises:
            ShoalError: The control plane does not take this host, or has been silent for `orphan_s`; its holder ends
                with it then.
            SandboxRuntimeError: This machine cannot run sandboxes, or another agent uses the home.
        """
        settings = self._settings
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        async with AsyncExitStack() as stack:
            try:
                await self._run(stack)
            except ShoalError:
                # Nobody takes this host: an agent that its holder starts again would fare no better.
                _let_holder_end(settings)
                raise

    async def _run(self, stack: AsyncExitStack) -> None:
        settings, clock = self._settings, SystemClock()
        home = settings.home
        listener = _listen(settings)
        stack.callback(listener.close)
        address = settings.advertise or "http://{}:{}".format(*listener.getsockname()[:2])
        guest_dir = await asyncio.to_thread(build_guest_runtime, settings.guest_dir or home / "guest")
        runtime = await stack.enter_async_context(
            SandboxRuntime(
                runtime_settings(
                    home, guest_dir=guest_dir, cgroup_name=settings.cgroup_name, id_base=settings.id_base
                )
            )
        )
        control, transfer, tokens = (
            HttpControlPlane(settings.control_url),
            UrlTransfer(),
            TokenVerifier(clock),
        )
        stack.push_async_callback(control.close)
        stack.push_async_callback(transfer.close)
        cache = LayerCache(settings.layers_dir or home / "layers")
        layers = LayerStore(cache, control, transfer, home / "incoming")
        keeper, usage, events = Keeper(_descriptors(settings)), UsageQueue(), Events(clock)
        journals = Journals(home / "journals", control, transfer)

        async def connect(sock: socket.socket) -> GuestLink:
            return await GuestLink.connect(sock, timeout_s=_LINK_TIMEOUT_S)

        starter = Starter(
            runtime=runtime,
            layers=layers,
            connect=connect,
            clock=clock,
            concurrency=settings.start_concurrency,
        )
        warm = WarmPool(
            runtime=runtime,
            starter=starter,
            layers=layers,
            keeper=keeper,
            clock=clock,
            concurrency=settings.warm_concurrency,
            may_add=lambda ask: service.may_add_warm(ask),
        )
        incarnator = Incarnator(
            runtime=runtime,
            starter=starter,
            warm=warm,
            keeper=keeper,
            journals=journals,
            usage=usage,
            clock=clock,
            host=lambda: HostId(heart.host),
            snapshot_index=lambda hosted, id: snapshots.index_of(hosted, id),
        )
        ender = Ender(
            runtime=runtime,
            incarnator=incarnator,
            journals=journals,
            usage=usage,
            clock=clock,
            host=lambda: HostId(heart.host),
        )
        service = SandboxService(
            limits=HostLimits(
                capacity=machine.capacity(settings), disk_path=home, disk_floor_mib=settings.disk_floor_mib
            ),
            runtime=runtime,
            warm=warm,
            incarnator=incarnator,
            ender=ender,
            journals=journals,
            events=events,
            clock=clock,
            nudge=lambda: heart.nudge(),
        )
        snapshots = Snapshots(
            find=service.current,
            runtime=runtime,
            layers=layers,
            control=control,
            transfer=transfer,
            staging=home / "snapshots",
            clock=clock,
            nudge=lambda: heart.nudge(),
        )
        passages = Passages(
            control, transfer, spool=home / "passages", floor_bytes=settings.disk_floor_mib << 20
        )
        report = Report(
            settings=settings,
            address=address,
            boot_id=_boot_id(home),
            service=service,
            warm=warm,
            layers=layers,
            snapshots=snapshots,
            usage=usage,
            events=events,
            load=machine.LoadMeter(home, clock),
            clock=clock,
            shutdown=lambda: self.stop(leave=True),
        )
        adopter = Adopter(
            runtime=runtime,
            service=service,
            incarnator=incarnator,
            warm=warm,
            keeper=keeper,
            journals=journals,
            layers=layers,
            connect=connect,
            clock=clock,
        )
        heart = Heart(
            home=home,
            control=control,
            reporter=Reporter(register=report.register, beat=report.beat, obey=report.obey),
            service=service,
            runtime=runtime,
            tokens=tokens,
            clock=clock,
            go_on=adopter.go_on,
        )
        metrics = AgentMetrics(
            Sources(service=service, warm=warm, snapshots=snapshots, heart=heart, usage=usage)
        )
        report.counters = metrics.counters
        app = create_app(
            [
                *ActionRoutes(service, tokens).routes(),
                *FileRoutes(service, tokens, passages).routes(),
                *SandboxRoutes(service, snapshots, tokens).routes(),
            ],
            metrics=metrics.text,
            ready=lambda: heart.ready,
        )
        life = Life(
            service=service,
            ender=ender,
            incarnator=incarnator,
            warm=warm,
            layers=layers,
            disk_path=home,
            disk_floor_mib=settings.disk_floor_mib,
            usage_interval_s=settings.usage_interval_s,
            clock=clock,
        )
        heart.load()
        await adopter.adopt()
        server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=3,
                backlog=2048,
            )
        )
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_serve(server, listener, heart))]
        try:
            registering = asyncio.create_task(heart.register())
            stopping = asyncio.create_task(self._stop.wait())
            tasks += [registering, stopping, asyncio.create_task(self._end_when_orphaned(heart))]
            await asyncio.wait({registering, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                registering.result()
                beating = asyncio.create_task(heart.run())
                background = [
                    beating,
                    asyncio.create_task(heart.watch_lease()),
                    asyncio.create_task(life.run()),
                ]
                tasks += background
                _log.info("agent.ready", host_id=heart.host, address=address)
                # A loop that ends by itself has failed: the agent goes with it, and its holder starts another.
                await asyncio.wait({stopping, tasks[0], *background}, return_when=asyncio.FIRST_COMPLETED)
                for task in (tasks[0], *background):
                    if task.done() and not self._stop.is_set():
                        task.result()
                        raise RuntimeError("a loop of the agent has ended")
                await self._take_down(service, warm, snapshots, ender, heart, control)
        finally:
            server.should_exit = True
            server.force_exit = True
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._orphaned:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, f"no control plane has answered for {settings.orphan_s:g} s"
            )

    async def _end_when_orphaned(self, heart: Heart) -> None:
        if self._settings.orphan_s is not None:
            await heart.silence(self._settings.orphan_s)
            self._orphaned = True
            self.stop()

    async def _take_down(
        self,
        service: SandboxService,
        warm: WarmPool,
        snapshots: Snapshots,
        ender: Ender,
        heart: Heart,
        control: HttpControlPlane,
    ) -> None:
        _log.info("agent.stopping", ordered=self._leave)
        service.draining = True
        await snapshots.close()
        detail = "the host was let go" if self._leave else "the host's agent was stopped"
        ending = asyncio.create_task(service.end_all(EndReason.HOST_LOST, detail))
        await warm.close()
        done, _ = await asyncio.wait({ending}, timeout=self._settings.flush_grace_s)
        if not done:
            ender.give_up()
        await ending
        with contextlib.suppress(Exception):
            await heart.beat()
            await control.leave()
        id_stretch.give_up(self._settings.home)
        _log.info("agent.stopped")


def create_agent(settings: AgentSettings) -> Agent:
    """An agent for one host, not running yet."""
    return Agent(settings)


async def _serve(server: _Server, listener: socket.socket, heart: Heart) -> None:
    """Take calls. Those of a restarted agent wait in the listener's queue while its first heartbeat is under way."""
    if heart.host:
        await heart.first_beat(_FIRST_BEAT_S)
    await server.serve(sockets=[listener])


def _let_holder_end(settings: AgentSettings) -> None:
    """The holder is to end with this agent, rather than to start another."""
    if settings.holder is not None:
        with contextlib.suppress(HolderError), HolderClient(settings.holder) as holder:
            holder.shutdown()


def _descriptors(settings: AgentSettings) -> DescriptorStore:
    return NoStore() if settings.holder is None else HolderClient(settings.holder)


def _boot_id(home: Path) -> str:
    path = home / "boot_id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        path.write_text(new_id("boot"))
        return path.read_text().strip()


def _listen(settings: AgentSettings) -> socket.socket:
    """The listening socket. A restarted agent takes the port it had, so that routes to it stay good."""
    host, port = settings.address
    remembered = settings.home / "port"
    candidates = [port]
    if port == 0:
        with contextlib.suppress(OSError, ValueError):
            candidates.insert(0, int(remembered.read_text()))
    for candidate in candidates:
        try:
            listener = socket.create_server(
                (host, candidate),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=2048,
                reuse_port=False,
            )
        except OSError:
            if candidate == candidates[-1]:
                raise
            continue
        break
    listener.setblocking(False)
    remembered.write_text(str(listener.getsockname()[1]))
    os.set_inheritable(listener.fileno(), False)
    return listener
