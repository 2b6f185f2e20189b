"""What the agent's core asks of its neighbours on the host: the sandbox runtime, and the holder of descriptors.

The real ones are `sandboxes.SandboxRuntime` and `holder.HolderClient`; scripted ones are in `fakes`.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from runtime_image.agent.link import GuestLink
from runtime_image.agent.sandboxes import Limits, LimitsHit, Sandbox, SandboxSpec, Usage

#: Greets the guest behind a socket; raises LinkClosedError.
Connect = Callable[[socket.socket], Awaitable[GuestLink]]


class KillGroup(Protocol):
    """The processes of one step: a cgroup of their own."""

    procs_fd: int

    def kill(self) -> None:
        """SIGKILL to the whole tree; nothing when it is gone."""

    def alive(self) -> bool:
        """Whether a process is left."""

    def remove(self) -> bool:
        """Close and remove it; False while processes are in it. Repeatable."""


class OomCounter(Protocol):
    """How many processes the memory limit of a sandbox has killed."""

    def read(self) -> int:
        """The count, by one system call. Raises OSError when the sandbox is gone."""

    def close(self) -> None:
        """Repeatable."""


class RuntimePort(Protocol):
    """Starts, limits, freezes, measures, adopts and removes sandboxes: see `sandboxes.SandboxRuntime`, whose
    docstrings are this port's. Errors are SandboxRuntimeError."""

    @property
    def disk_classes(self) -> tuple[int, ...]:
        """Sizes a disk can have, MiB, ascending."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Make and start a sandbox; cancelled or failed, nothing of it is left."""

    async def stop(self, sandbox_id: str) -> None:
        """Kill and remove; repeatable, from any half-made state."""

    async def set_limits(self, sandbox: Sandbox, limits: Limits) -> None:
        """Set cpu, memory and pids."""

    async def freeze(self, sandbox: Sandbox) -> None:
        """Return when every process stands still."""

    async def thaw(self, sandbox: Sandbox) -> None:
        """Let a frozen sandbox go on."""

    def usage(self, sandbox: Sandbox) -> Usage:
        """What it used so far; well under a millisecond. Raises SandboxGone."""

    def limits_hit(self, sandbox: Sandbox) -> LimitsHit:
        """Which limits it has run into; well under a millisecond. Raises SandboxGone."""

    def oom_counter(self, sandbox: Sandbox) -> OomCounter:
        """Counts the processes that the memory limit has killed; the caller closes it. Raises SandboxGone."""

    def kill_group(self, sandbox: Sandbox, name: str) -> KillGroup:
        """Make or find a kill group. Raises SandboxGone."""

    def alive(self, sandbox: Sandbox) -> bool:
        """Whether the guest runs."""

    async def adopt(self) -> list[Sandbox]:
        """Sandboxes of an earlier agent that live, without their sockets."""

    async def sweep(self, keep: set[str]) -> list[str]:
        """Remove everything of ours but `keep`."""


class DescriptorStore(Protocol):
    """Keeps descriptors while the agent is away, so that the next one can adopt; see `holder.HolderClient`."""

    def put(self, name: str, fd: int) -> None:
        """Keep a copy of `fd` under `name`; replaces what was there."""

    def get_all(self) -> dict[str, int]:
        """Copies of all that is kept; the caller owns them."""

    def drop(self, name: str) -> None:
        """Keep it no longer; harmless when there is none."""


class NoStore:
    """Keeps nothing: without a holder a dead agent's sandboxes are cleaned up, not adopted."""

    def put(self, name: str, fd: int) -> None:
        """Not kept."""

    def get_all(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def drop(self, name: str) -> None:
        """There is none."""
