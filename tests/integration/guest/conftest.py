"""A real guest on its real runtime: a plain process, or PID 1 of namespaces and a root of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime_image.agent.guest_runtime import GUEST_ENV, build_guest_runtime, runtime_argv
from runtime_image.agent.link import GuestLink, GuestProcess, ProcessExit, ProcessSpec

pytestmark = pytest.mark.root


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these change users, and some make namespaces and cgroups."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guest's runtime directory."""
    base = tmp_path_factory.mktemp("guest-runtime")
    # Other users' processes must reach it, as they can in a sandbox.
    for directory in (base, *base.parents[:2]):
        directory.chmod(0o755)
    return build_guest_runtime(base)


@dataclass(kw_only=True)
class Done:
    """A process that has ended."""

    exit: ProcessExit
    stdout: bytes
    stderr: bytes
    process: GuestProcess


@dataclass(kw_only=True)
class Box:
    """A guest, the link to it, and our end of its socket as a holder would keep it."""

    link: GuestLink
    kept: socket.socket
    popen: subprocess.Popen[bytes]
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def spec(self, command: str | Sequence[str], **fields: object) -> ProcessSpec:
        """A spec with an id of its own."""
        what = {"command": command} if isinstance(command, str) else {"argv": tuple(command)}
        return ProcessSpec(process_id=f"p{next(self.ids)}", **what, **fields)  # type: ignore[arg-type]

    async def spawn(
        self, command: str | Sequence[str], procs_fd: int | None = None, **fields: object
    ) -> GuestProcess:
        """Start."""
        return await self.link.spawn(self.spec(command, **fields), procs_fd=procs_fd)

    async def run(self, command: str | Sequence[str], procs_fd: int | None = None, **fields: object) -> Done:
        """Start and wait."""
        return await self.done(await self.spawn(command, procs_fd, **fields))

    async def done(self, process: GuestProcess) -> Done:
        """Wait for a process and take its output."""
        ended = await process.wait()
        return Done(
            exit=ended,
            stdout=b"".join(process.stdout.kept()),
            stderr=b"".join(process.stderr.kept()),
            process=process,
        )

    async def reconnect(self) -> GuestLink:
        """A new agent takes over; the old link is left as a crash leaves it."""
        self.link = await GuestLink.connect(self.kept.dup())
        return self.link

    def read(self, name: str) -> str:
        """A file of the guest's own /proc directory."""
        return Path(f"/proc/{self.popen.pid}/{name}").read_text()

    def children(self) -> list[int]:
        """Processes whose parent is the guest."""
        return [int(pid) for pid in self.read(f"task/{self.popen.pid}/children").split()]

    def zombies(self) -> int:
        """Children of the guest that ended and were not reaped."""
        command = ["ps", "--ppid", str(self.popen.pid), "-o", "stat="]
        return subprocess.run(command, capture_output=True, text=True).stdout.count("Z")

    async def until(self, check: Callable[[], bool]) -> None:
        """Poll what the kernel announces to nobody until `check` is true; the test's timeout bounds it."""
        while not check():
            await asyncio.sleep(0.005)

    def rss_mib(self) -> float:
        """Its resident set."""
        return int(self.read("status").split("VmRSS:")[1].split()[0]) / 1024


Launch = Callable[..., "contextlib.AbstractAsyncContextManager[Box]"]


@pytest.fixture
def launch(runtime: Path) -> Launch:
    """Starts guests: `async with launch(prefix=[...]) as box`."""

    @contextlib.asynccontextmanager
    async def start(
        *,
        prefix: Sequence[str] = (),
        root: Path = runtime,
        before: Callable[[], None] | None = None,
    ) -> AsyncIterator[Box]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        popen = subprocess.Popen(
            [*prefix, *runtime_argv(root)],
            stdin=theirs,
            env={**GUEST_ENV, "PATH": os.defpath} if prefix else GUEST_ENV,
            cwd="/",
            preexec_fn=before,
        )
        theirs.close()
        kept = ours.dup()
        box = Box(link=await GuestLink.connect(ours), kept=kept, popen=popen)
        try:
            yield box
        finally:
            box.link.close()
            kept.close()
            try:
                popen.wait(10)
            except subprocess.TimeoutExpired:
                popen.send_signal(signal.SIGKILL)
                popen.wait(10)
                raise

    return start


@pytest.fixture
async def box(launch: Launch) -> AsyncIterator[Box]:
    """A guest as a plain process of this machine."""
    async with launch() as started:
        yield started
