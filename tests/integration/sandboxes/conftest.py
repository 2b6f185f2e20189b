"""Real sandboxes for tests: a busybox image, a layer with the machine's own Python, the real guest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from runtime_image.agent.guest_runtime import build_guest_runtime
from runtime_image.agent.link import GuestLink, ProcessExit, ProcessSpec
from runtime_image.agent.sandboxes import (
    Defences,
    Limits,
    RuntimeSettings,
    Sandbox,
    SandboxRuntime,
    SandboxSpec,
)
from runtime_image.agent.sandboxes.leftovers import loops_below


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs root and runc."""
    for item in items:
        if "integration/sandboxes" in str(item.path):
            item.add_marker(pytest.mark.root)


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a command in a sandbox did."""

    exit: ProcessExit
    stdout: str
    stderr: str

    @property
    def code(self) -> int | None:
        return self.exit.exit_code

    def json(self) -> Any:
        assert self.code == 0, f"{self.exit}\n{self.stdout}\n{self.stderr}"
        return json.loads(self.stdout)


class Box:
    """A running sandbox and the link to its guest."""

    def __init__(self, runtime: SandboxRuntime, sandbox: Sandbox, link: GuestLink) -> None:
        self.runtime = runtime
        self.sandbox = sandbox
        self.link = link

    async def run(self, *argv: str, group: str | None = None, stdin: bytes | None = None) -> Ran:
        name = group or f"t{secrets.token_hex(6)}"
        kill_group = self.runtime.kill_group(self.sandbox, name)
        try:
            process = await self.link.spawn(
                ProcessSpec(process_id=name, argv=argv, stdin="empty" if stdin is None else stdin),
                procs_fd=kill_group.procs_fd,
            )
            ended = await process.wait()
            out, err = process.stdout.snapshot().data, process.stderr.snapshot().data
            await self.link.forget(name)
        finally:
            if group is None:
                kill_group.kill()
            kill_group.remove()
        return Ran(ended, out.decode(errors="replace"), err.decode(errors="replace"))

    async def sh(self, command: str) -> Ran:
        return await self.run("/bin/sh", "-c", command)

    async def py(self, code: str) -> Ran:
        """Runs Python in the sandbox; the code must print one line of JSON."""
        return await self.run("/usr/bin/python3", "-I", "-c", code)


MakeBox = Callable[..., Awaitable[Box]]


@dataclasses.dataclass(frozen=True)
class Images:
    """Unpacked layers."""

    busybox: Path
    python: Path


@pytest.fixture(scope="session")
def guest_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_guest_runtime(tmp_path_factory.mktemp("guest"))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    root = tmp_path_factory.mktemp("images")
    busybox = root / "busybox"
    for name in ("bin", "etc", "root", "usr/bin", "tmp"):
        (busybox / name).mkdir(parents=True)
    (busybox / "tmp").chmod(0o1777)
    program = shutil.which("busybox")
    assert program is not None, "busybox-static is not installed: run `make setup`"
    shutil.copy(program, busybox / "bin" / "busybox")
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout
    for applet in listed.split():
        if applet != "busybox":
            (busybox / "bin" / applet).symlink_to("busybox")
    (busybox / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    (busybox / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    return Images(busybox, _python_layer(root / "python"))


def _python_layer(layer: Path) -> Path:
    """The machine's /usr/bin/python3 with what it needs, at the same paths."""
    program = Path("/usr/bin/python3").resolve()
    modules = Path("/usr/lib") / program.name
    files = [program, *(modules / "lib-dynload").glob("_ctypes.*")]
    wanted = set()
    for file in files:
        listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
        wanted |= {Path(found) for found in re.findall(r"(/\S+) \(0x", listed)}
    for source in {program, *wanted}:
        target = layer / source.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.resolve(), target)
    (layer / "usr/bin/python3").symlink_to(program.name)
    shutil.copytree(
        modules,
        layer / modules.relative_to("/"),
        symlinks=True,
        ignore=shutil.ignore_patterns("test", "__pycache__", "idlelib", "config-*", "ensurepip", "lib2to3"),
    )
    return layer


@dataclasses.dataclass(frozen=True)
class Left:
    """What of an agent is on the machine."""

    mounts: tuple[str, ...]
    loops: tuple[str, ...]
    cgroups: tuple[str, ...]
    processes: tuple[str, ...]


def look_for(home: Path, cgroup_name: str) -> Left:
    """Looks in the kernel's own lists, by the home's path and the cgroup's name."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                # A zombie is only a number that the machine's init has not read yet.
                dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if not dead and f"/{cgroup_name}" in (entry / "cgroup").read_text():
                    processes.append(entry.name)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    top = Path("/sys/fs/cgroup")
    return Left(
        mounts=tuple(line for line in mounts if str(home) in line or f"/{cgroup_name}/" in line),
        loops=tuple(sorted(loops_below(home))),
        cgroups=tuple(
            str(found)
            for root in (top, *top.glob("*"))
            for found in root.glob(f"{cgroup_name}/*")
            if found.is_dir() and not found.is_symlink()
        ),
        processes=tuple(processes),
    )


NOTHING = Left((), (), (), ())


@pytest.fixture
def left_of() -> Callable[[Path, str], Left]:
    """What of an agent with this home and cgroup is still on the machine."""
    return look_for


@pytest.fixture
def settings(tmp_path: Path, guest_dir: Path) -> RuntimeSettings:
    return RuntimeSettings(
        home=tmp_path / "home",
        run_dir=Path("/run") / f"shoal-test-{secrets.token_hex(4)}",
        guest_dir=guest_dir,
        cgroup_name=f"shoal-test-{secrets.token_hex(4)}",
        # Away from the default ranges, so that a test runs beside a real agent.
        id_base=3_000_000_000 + secrets.randbelow(1000) * 65_536 * 16,
        id_count=16,
    )


@pytest.fixture
async def runtime(settings: RuntimeSettings) -> AsyncIterator[SandboxRuntime]:
    """A runtime; afterwards everything it made is gone, or the test fails."""
    async with SandboxRuntime(settings) as opened:
        try:
            yield opened
        finally:
            await opened.sweep(set())
    assert look_for(settings.home, settings.cgroup_name) == NOTHING
    assert not settings.run_dir.exists()


@pytest.fixture
async def make_box(
    settings: RuntimeSettings, runtime: SandboxRuntime, images: Images, tmp_path: Path
) -> AsyncIterator[MakeBox]:
    """Starts sandboxes. `defences` other than the default get a runtime of their own."""
    async with contextlib.AsyncExitStack() as stack:
        weak: dict[Defences, SandboxRuntime] = {Defences(): runtime}

        async def make(
            *,
            limits: Limits | None = None,
            defences: Defences | None = None,
            sandbox_id: str | None = None,
            python: bool = False,
        ) -> Box:
            wanted = defences or Defences()
            if wanted not in weak:
                number = len(weak)
                other = dataclasses.replace(
                    settings,
                    home=tmp_path / f"home{number}",
                    cgroup_name=f"{settings.cgroup_name}-{number}",
                    id_base=settings.id_base + number * 65_536 * 16,
                    defences=wanted,
                )
                weak[wanted] = await stack.enter_async_context(SandboxRuntime(other))
                stack.push_async_callback(weak[wanted].sweep, set())
            chosen = weak[wanted]
            sandbox = await chosen.start(
                SandboxSpec(
                    sandbox_id=sandbox_id or f"box-{secrets.token_hex(4)}",
                    layers=(images.busybox, images.python) if python else (images.busybox,),
                    resources=limits or Limits(memory_mib=256, disk_mib=256),
                )
            )
            assert sandbox.sock is not None
            link = await GuestLink.connect(sandbox.sock, timeout_s=20)
            stack.callback(link.close)
            return Box(chosen, sandbox, link)

        yield make
