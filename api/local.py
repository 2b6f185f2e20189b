"""The `local` profile, wired: SQLite, a directory of blobs, agents as subprocesses of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from api.home import Home
from api.options import UpOptions
from provisioner.agents.http import HttpAgents
from provisioner.blobs.local import LocalBlobs
from provisioner.builders.local import LocalBuilder
from provisioner.capacity.local import LocalCapacity
from provisioner.capacity.port import HostStart
from provisioner.clock import SystemClock
from provisioner.route_tokens import RouteSigner
from provisioner.services import Services, build_services
from provisioner.settings import PoolSettings, ProvisionerSettings
from provisioner.store.sqlite import SqliteStore
from shoal.contract.base import HostId

#: How often a core may be reserved on one machine: agents' sandboxes mostly wait for the model that drives them.
_CPU_OVERCOMMIT = 16.0


@dataclass(frozen=True, kw_only=True)
class Local:
    """A machine's own service."""

    services: Services


@dataclass(frozen=True, kw_only=True)
class AgentCommands:
    """How agents of this machine are started and cleaned up after. All share unpacked layers and the guest's runtime,
    and each may use its even part of the machine. Whatever else an agent can be told is taken from the environment
    (`SHOAL_AGENT_...`)."""

    home: Path
    control_url: str
    hosts: int

    def start(self, start: HostStart, host_home: Path) -> list[str]:
        """The command line of one host's agent, with the holder that keeps it running."""
        holder = host_home / "holder.sock"
        return [
            sys.executable, "-m", "runtime_image.agent.holder", "--socket", str(holder), "--",
            sys.executable, "-m", "runtime_image.agent",
            "--control-url", self.control_url,
            "--home", str(host_home),
            "--listen", "127.0.0.1:0",
            "--layers-dir", str(self.home / "layers"),
            "--guest-dir", str(self.home / "guest"),
            "--holder", str(holder),
        ]  # fmt: skip

    def environment(self, start: HostStart, host_home: Path) -> dict[str, str]:
        """Its environment: the join token is in it, since command lines are for all to see."""
        environment = {
            "SHOAL_AGENT_CPU_OVERCOMMIT": str(_CPU_OVERCOMMIT),
            **self._share(),
            **os.environ,
            "SHOAL_AGENT_JOIN_TOKEN": start.join_token,
        }
        environment.pop("SHOAL_API_KEY", None)
        return environment

    def cleanup(self, host: HostId, host_home: Path) -> list[str]:
        """The command that removes what a killed host left."""
        return [sys.executable, "-m", "runtime_image.agent.cleanup", "--home", str(host_home)]

    def _share(self) -> dict[str, str]:
        if self.hosts == 1:
            return {}
        memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        return {
            "SHOAL_AGENT_CPU_MILLIS": str((os.cpu_count() or 1) * 1000 // self.hosts),
            "SHOAL_AGENT_MEMORY_MIB": str(memory_mib // self.hosts),
        }


@asynccontextmanager
async def open_local(options: UpOptions, home: Home, url: str) -> AsyncIterator[Local]:
    """Open the home's state; what is there is used as it is. Closing leaves hosts alone: end them first.

    Args:
        url: Where hosts will reach the control plane.
    """
    clock = SystemClock()
    settings = ProvisionerSettings(
        pools=(
            PoolSettings(
                max_hosts=options.max_hosts,
                idle_to_zero_s=options.idle_to_zero_s,
                warm_default=options.warm,
                warm_max=max(options.warm, PoolSettings().warm_max) if options.warm else 0,
            ),
        )
    )
    async with AsyncExitStack() as stack:
        store = SqliteStore(home.path / "state.db")
        stack.push_async_callback(store.close)
        blobs = LocalBlobs(home.path / "blobs")
        stack.push_async_callback(blobs.close)
        signer = RouteSigner(store, clock, key_life_s=settings.signing_key_s)
        agents = HttpAgents(signer)
        stack.push_async_callback(agents.close)
        commands = AgentCommands(home=home.path, control_url=url, hosts=options.max_hosts)
        capacity = LocalCapacity(
            home.path / "hosts",
            command=commands.start,
            clock=clock,
            environment=commands.environment,
            cleanup=commands.cleanup,
            max_hosts=options.max_hosts,
        )
        stack.push_async_callback(capacity.close)
        services = build_services(
            store=store,
            blobs=blobs,
            agents=agents,
            capacity=capacity,
            clock=clock,
            signer=signer,
            settings=settings,
            replica=f"local-{os.getpid()}",
            builder=LocalBuilder(
                blobs,
                [sys.executable, "-m", "runtime_image.builder"],
                work=home.path / "builds",
                cache=_build_cache(),
            ),
        )
        yield Local(services=services)


def _build_cache() -> Path:
    """Where built images are kept by the digest of their recipe; `make setup` fills it too."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SHOAL_CACHE") or Path(base) / "shoal") / "builds"
