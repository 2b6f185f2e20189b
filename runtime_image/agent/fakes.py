"""Scriptable stand-ins for what surrounds the agent's core: clock, sandbox runtime, guest, control plane.

They keep the promises of their ports in memory, and fail where a test tells them to.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from runtime_image.agent.link import (
    CodeSpec,
    LinkClosedError,
    OutputTap,
    ProcessExit,
    ProcessSpec,
    SpawnError,
)
from runtime_image.agent.sandboxes import (
    Limits,
    LimitsHit,
    Sandbox,
    SandboxGone,
    SandboxSpec,
    StartFailed,
    Usage,
)
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Heartbeat, HeartbeatReply, Register, Registered
from shoal.contract.urls import Url, UrlAsked


class ManualClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.at = datetime(2026, 1, 1, tzinfo=UTC)
        self.seconds = 1000.0

    def now(self) -> datetime:
        """The time of day."""
        return self.at

    def monotonic(self) -> float:
        """Seconds."""
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.at += timedelta(seconds=seconds)
        self.seconds += seconds


class FakeGroup:
    """A kill group: killing it ends its process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.procs_fd = -1
        self.processes: list[FakeProcess] = []
        self.removed = False
        self.kills = 0

    def kill(self) -> None:
        """End every process of it, unless it is told to ignore that."""
        self.kills += 1
        for process in self.processes:
            process.end(signal="KILL")

    def alive(self) -> bool:
        """Whether a process is left."""
        return any(not process.exited for process in self.processes)

    def remove(self) -> bool:
        """False while a process is left."""
        self.removed = not self.alive()
        return self.removed


class FakeProcess:
    """A process that ends when the test says so."""

    def __init__(self, spec: ProcessSpec | CodeSpec, group: FakeGroup | None) -> None:
        self.spec = spec
        self.process_id = spec.process_id
        self.stdout = OutputTap(spec.output_limit_bytes)
        self.stderr = OutputTap(spec.output_limit_bytes)
        self.stdin = b""
        self.deaf = False
        self.started_monotonic = time.monotonic()
        self._exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        if group is not None:
            group.processes.append(self)

    @property
    def exited(self) -> bool:
        """Whether it has ended."""
        return self._exit.done()

    def print(self, data: bytes) -> None:
        """Write to stdout."""
        self.stdout.feed(self.stdout.total_bytes, memoryview(data))

    def end(self, code: int | None = 0, *, signal: str | None = None) -> None:
        """End it, once; not when it is `deaf` to kills."""
        if self._exit.done() or (signal == "KILL" and self.deaf):
            return
        self.stdout.end()
        self.stderr.end()
        self._exit.set_result(
            ProcessExit(
                exit_code=None if signal else code,
                signal=signal,
                duration_ms=1.0,
                cpu_ms=1.0,
                max_rss_mib=1.0,
            )
        )

    def lose(self) -> None:
        """The guest is gone."""
        if not self._exit.done():
            self._exit.set_exception(LinkClosedError("gone"))

    async def wait(self) -> ProcessExit:
        """How it ended."""
        return await asyncio.shield(self._exit)

    async def write_stdin(self, data: bytes) -> None:
        """Feed it."""
        self.stdin += data

    async def close_stdin(self) -> None:
        """No more input."""


@dataclass
class FakeLink:
    """A guest: each process started is offered to `on_spawn`, or ends at once with 0."""

    on_spawn: Callable[[FakeProcess], None] = lambda process: process.end(0)
    spawned: list[FakeProcess] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    refuse: SpawnError | None = None
    group: FakeGroup | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    deaf: bool = False
    left: list[FakeProcess] = field(default_factory=list)
    sock: socket.socket | None = None

    async def processes(self) -> list[FakeProcess]:
        """What an earlier agent left."""
        self.check_open()
        return list(self.left)

    async def spawn(self, spec: ProcessSpec, *, procs_fd: int | None = None) -> FakeProcess:
        """Start a process."""
        if self.refuse is not None:
            raise self.refuse
        process = FakeProcess(spec, self.group)
        self.spawned.append(process)
        self.on_spawn(process)
        return process

    def forget_later(self, process: FakeProcess) -> None:
        """Its result is safe."""
        self.forgotten.append(process.process_id)

    async def forget(self, process_id: str) -> None:
        """Its result is safe."""
        self.forgotten.append(process_id)

    async def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A ping: no answer from a deaf guest."""
        if self.deaf:
            await asyncio.Event().wait()
        if self.closed.is_set():
            raise LinkClosedError("gone")
        return {}

    async def file_op(self, op: Mapping[str, Any], *, procs_fd: int | None = None) -> dict[str, Any]:
        """Every operation succeeds and does nothing."""
        return {"created": True}

    def check_open(self) -> None:
        """Raise when it is closed."""
        if self.closed.is_set():
            raise LinkClosedError("closed")

    def close(self) -> None:
        """Let go of it, and of the socket it was made of."""
        self.closed.set()
        if self.sock is not None:
            self.sock.close()


class FakeCounter:
    """Counts what the memory limit killed."""

    def __init__(self) -> None:
        self.count = 0

    def read(self) -> int:
        """The count."""
        return self.count

    def close(self) -> None:
        """Nothing to close."""


class FakeRuntime:
    """Sandboxes in memory. `fail_starts`: the next so many starts fail."""

    def __init__(self) -> None:
        self.living: dict[str, Sandbox] = {}
        self.limits: dict[str, Limits] = {}
        self.frozen: set[str] = set()
        self.groups: dict[tuple[str, str], FakeGroup] = {}
        self.counters: dict[str, FakeCounter] = {}
        self.hits: dict[str, LimitsHit] = {}
        self.fail_starts = 0
        self.started = self.stopped = 0
        self.gate: asyncio.Event | None = None
        self._pids = itertools.count(1000)

    @property
    def disk_classes(self) -> tuple[int, ...]:
        """As the real ones."""
        return (256, 1024, 4096)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Make one; waits for `gate` when there is one."""
        if self.gate is not None:
            await self.gate.wait()
        if self.fail_starts:
            self.fail_starts -= 1
            raise StartFailed(spec.sandbox_id, "runc", "told to fail")
        self.started += 1
        sandbox = Sandbox(
            sandbox_id=spec.sandbox_id,
            pid=next(self._pids),
            sock=None,
            upper=Path("/nonexistent/upper"),
            merged=Path("/nonexistent/merged"),
            disk_class_mib=spec.resources.disk_mib,
            id_base=65_536,
            limits=spec.resources,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
        )
        self.living[spec.sandbox_id] = sandbox
        return sandbox

    async def stop(self, sandbox_id: str) -> None:
        """Remove it."""
        if self.living.pop(sandbox_id, None) is not None:
            self.stopped += 1

    async def set_limits(self, sandbox: Sandbox, limits: Limits) -> None:
        """Remember them."""
        self._check(sandbox)
        self.limits[sandbox.sandbox_id] = limits

    async def freeze(self, sandbox: Sandbox) -> None:
        """Freeze it."""
        self._check(sandbox)
        self.frozen.add(sandbox.sandbox_id)

    async def thaw(self, sandbox: Sandbox) -> None:
        """Thaw it."""
        self.frozen.discard(sandbox.sandbox_id)

    def usage(self, sandbox: Sandbox) -> Usage:
        """A little of everything."""
        self._check(sandbox)
        return Usage(
            cpu_usec=1000, memory_bytes=1 << 20, memory_peak_bytes=1 << 20, pids=1, disk_bytes=0, oom_kills=0
        )

    def limits_hit(self, sandbox: Sandbox) -> LimitsHit:
        """What the test says; nothing until then."""
        self._check(sandbox)
        return self.hits.get(sandbox.sandbox_id, LimitsHit(oom_kills=0, forks_refused=0, disk_full=False))

    def oom_counter(self, sandbox: Sandbox) -> FakeCounter:
        """Its counter."""
        return self.counters.setdefault(sandbox.sandbox_id, FakeCounter())

    def kill_group(self, sandbox: Sandbox, name: str) -> FakeGroup:
        """Make or find one."""
        self._check(sandbox)
        return self.groups.setdefault((sandbox.sandbox_id, name), FakeGroup(name))

    def alive(self, sandbox: Sandbox) -> bool:
        """Whether it is there."""
        return sandbox.sandbox_id in self.living

    async def adopt(self) -> list[Sandbox]:
        """Those that live."""
        return list(self.living.values())

    async def sweep(self, keep: set[str]) -> list[str]:
        """Remove the others."""
        gone = sorted(set(self.living) - keep)
        for name in gone:
            await self.stop(name)
        return gone

    def _check(self, sandbox: Sandbox) -> None:
        if sandbox.sandbox_id not in self.living:
            raise SandboxGone(sandbox.sandbox_id)


class MemoryStore:
    """Keeps duplicates of descriptors, as the holder does."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def put(self, name: str, fd: int) -> None:
        """Keep a copy; replaces what was there."""
        self.drop(name)
        self.kept[name] = os.dup(fd)

    def get_all(self) -> dict[str, int]:
        """Copies."""
        return {name: os.dup(fd) for name, fd in self.kept.items()}

    def drop(self, name: str) -> None:
        """Keep it no longer."""
        if name in self.kept:
            os.close(self.kept.pop(name))


class FakeControl:
    """A control plane that says what it is told to say; `down` makes it unreachable."""

    def __init__(self, reply: HeartbeatReply, registered: Registered) -> None:
        self.reply = reply
        self.registered = registered
        self.down = False
        self.refuse: ShoalError | None = None
        self.beats: list[Heartbeat] = []
        self.registrations: list[Register] = []
        self.resumed: tuple[str, str] | None = None
        self.asked: list[UrlAsked] = []
        self.place: Callable[[UrlAsked], Url] = lambda item: Url(url="file:///nonexistent")

    async def register(self, register: Register) -> Registered:
        """Take the host."""
        self._check()
        self.registrations.append(register)
        return self.registered

    def resume(self, host: str, token: str) -> None:
        """Remember it."""
        self.resumed = (host, token)

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Take it, and reply."""
        self._check()
        self.beats.append(beat)
        return self.reply

    async def urls(self, items: Sequence[UrlAsked]) -> list[Url]:
        """Where things are."""
        self._check()
        self.asked += items
        return [self.place(item) for item in items]

    async def leave(self) -> None:
        """Noted by nobody."""

    async def close(self) -> None:
        """Nothing to close."""

    def _check(self) -> None:
        if self.refuse is not None:
            raise self.refuse
        if self.down:
            raise ShoalError(ErrorCode.UNAVAILABLE, "down")
