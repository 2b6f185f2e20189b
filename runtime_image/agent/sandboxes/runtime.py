"""`SandboxRuntime`: starts, limits, freezes, measures, adopts and removes the sandboxes of one host."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from runtime_image.agent.sandboxes import cgroups, disks, host, launch, leftovers, records
from runtime_image.agent.sandboxes.cgroups import CgroupLayout, KillGroup, OomCounter
from runtime_image.agent.sandboxes.identities import IdentityPool
from runtime_image.agent.sandboxes.machinery import Machinery
from runtime_image.agent.sandboxes.model import (
    DISK_CLASSES_MIB,
    Limits,
    LimitsHit,
    RuntimeSettings,
    Sandbox,
    SandboxGone,
    SandboxRuntimeError,
    SandboxSpec,
    Usage,
)
from runtime_image.agent.sandboxes.teardown import teardown

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# runc is short bursts of CPU; more starts at once than this only make each of them slower.
_STARTS_AT_ONCE: Final = 4
_THREADS: Final = 12
_FREEZE_TIMEOUT_S: Final = 10.0


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclasses.dataclass
class _CountedLock:
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    users: int = 0


class SandboxRuntime:
    """The sandboxes of one agent on this machine.

    An async context manager. Leaving it stops nothing: sandboxes live on for the next agent, which
    calls `adopt` and then `sweep` before its first `start`. One runtime at a time per home; raises
    SandboxRuntimeError on a second.
    """

    def __init__(self, settings: RuntimeSettings, *, now: Callable[[], datetime] = _utc_now) -> None:
        self._settings = settings
        self._now = now
        self._locks: dict[str, _CountedLock] = {}
        self._machinery: Machinery | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._starts = asyncio.Semaphore(_STARTS_AT_ONCE)
        self._home_lock = -1

    @property
    def disk_classes(self) -> tuple[int, ...]:
        """Sizes a disk can have, MiB; a request is rounded up."""
        return DISK_CLASSES_MIB

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sandbox")
        try:
            self._machinery = await self._in_thread(self._open)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._in_thread(self._ready().identities.close)
        self._close()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Makes and starts a sandbox; its guest runs, and has not been spoken to.

        Raises StartFailed, NoIdRange, or SandboxRuntimeError when the id is in use; cancelled or failed,
        nothing of it is left.
        """
        machinery = self._ready()
        async with self._lock(spec.sandbox_id), self._starts:
            if machinery.places(spec.sandbox_id).directory.exists():
                raise SandboxRuntimeError(f"sandbox {spec.sandbox_id} is already here")
            work = self._submit(launch.Launch(machinery, spec, self._now()).run)
            try:
                sandbox = await asyncio.shield(work)
            except asyncio.CancelledError:
                # A thread cannot be interrupted: let it finish, then take back what it made.
                with contextlib.suppress(Exception):
                    made = await work
                    if made.sock is not None:
                        made.sock.close()
                    await self._in_thread(teardown, machinery, spec.sandbox_id)
                raise
        self._submit(self._refill)
        return sandbox

    async def stop(self, sandbox_id: str) -> None:
        """Kills a sandbox and removes everything of it. Repeatable, from any half-made state."""
        async with self._lock(sandbox_id):
            await self._in_thread(teardown, self._ready(), sandbox_id)

    async def set_limits(self, sandbox: Sandbox, limits: Limits) -> None:
        """Sets cpu, memory and pids of a running sandbox; disk, shm and open files stay as started."""
        cgroup = self._ready().cgroup(sandbox.sandbox_id)
        await self._on_cgroup(sandbox, lambda: cgroup.set_limits(limits))

    async def freeze(self, sandbox: Sandbox) -> None:
        """Returns when every process stands still. Raises TimeoutError, thawed again."""
        cgroup = self._ready().cgroup(sandbox.sandbox_id)
        await self._on_cgroup(sandbox, lambda: cgroup.freeze(timeout_s=_FREEZE_TIMEOUT_S))

    async def thaw(self, sandbox: Sandbox) -> None:
        """Lets a frozen sandbox go on."""
        cgroup = self._ready().cgroup(sandbox.sandbox_id)
        await self._on_cgroup(sandbox, lambda: cgroup.thaw(timeout_s=_FREEZE_TIMEOUT_S))

    def usage(self, sandbox: Sandbox) -> Usage:
        """What the sandbox has used so far. Well under a millisecond; raises SandboxGone."""
        machinery = self._ready()
        try:
            cpu, memory, peak, pids, kills = machinery.cgroup(sandbox.sandbox_id).usage()
            disk = disks.used_bytes(machinery.places(sandbox.sandbox_id).disk)
        except (FileNotFoundError, OSError) as error:
            raise SandboxGone(sandbox.sandbox_id) from error
        return Usage(
            cpu_usec=cpu,
            memory_bytes=memory,
            memory_peak_bytes=peak,
            pids=pids,
            disk_bytes=disk,
            oom_kills=kills,
        )

    def limits_hit(self, sandbox: Sandbox) -> LimitsHit:
        """Which limits the sandbox has run into. Well under a millisecond; raises SandboxGone."""
        machinery = self._ready()
        try:
            kills, refused = machinery.cgroup(sandbox.sandbox_id).hits()
            full = disks.is_full(machinery.places(sandbox.sandbox_id).disk)
        except OSError as error:
            raise SandboxGone(sandbox.sandbox_id) from error
        return LimitsHit(oom_kills=kills, forks_refused=refused, disk_full=full)

    def oom_counter(self, sandbox: Sandbox) -> OomCounter:
        """Counts the processes that the memory limit has killed; the caller closes it. Raises SandboxGone."""
        try:
            return self._ready().cgroup(sandbox.sandbox_id).oom_counter()
        except OSError as error:
            raise SandboxGone(sandbox.sandbox_id) from error

    def kill_group(self, sandbox: Sandbox, name: str) -> KillGroup:
        """Makes (or finds) the kill group `name`: letters, digits, '_', '-'. Raises SandboxGone."""
        if not name or len(name) > 128 or not all(c.isascii() and (c.isalnum() or c in "_-") for c in name):
            raise ValueError("a kill group's name is 1 to 128 letters, digits, '_' or '-'")
        try:
            return self._ready().cgroup(sandbox.sandbox_id).group(name)
        except FileNotFoundError as error:
            raise SandboxGone(sandbox.sandbox_id) from error

    def alive(self, sandbox: Sandbox) -> bool:
        """Whether the guest runs (frozen or not): the check at hand-over."""
        record = records.read(self._ready().places(sandbox.sandbox_id))
        return record is not None and record.lives()

    async def adopt(self) -> list[Sandbox]:
        """Sandboxes of an earlier agent that still live, without their sockets."""
        machinery = self._ready()

        def look() -> list[Sandbox]:
            found = (launch.adopted(machinery, name) for name in sorted(self._recorded()))
            return [sandbox for sandbox in found if sandbox is not None]

        return await self._in_thread(look)

    async def sweep(self, keep: set[str]) -> list[str]:
        """Stops and removes everything of ours but `keep`; returns what was removed, sorted.

        Only things below our home, our run directory and our cgroup are touched, whether or not a record
        names them. Errors are logged, and raised as one ExceptionGroup after the rest was swept.
        """
        machinery = self._ready()
        found = await self._in_thread(leftovers.sandbox_ids, machinery)
        removed: list[str] = []
        errors: list[Exception] = []

        async def remove(name: str) -> None:
            try:
                await self.stop(name)
            except Exception as error:  # noqa: BLE001 - one that resists must not keep the others
                _log.warning("sweep.failed", extra={"sandbox_id": name, "error": str(error)})
                errors.append(error)
            else:
                removed.append(name)

        async with asyncio.TaskGroup() as group:
            for name in found - keep:
                group.create_task(remove(name))
        await self._in_thread(leftovers.detach_loops, machinery, keep)
        if errors:
            raise ExceptionGroup("some sandboxes could not be removed", errors)
        return sorted(removed)

    def _open(self) -> Machinery:
        settings = self._settings
        for directory in (settings.home, settings.home / "sandboxes", settings.home / "runc"):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._home_lock = os.open(settings.home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._home_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SandboxRuntimeError(f"another runtime uses {settings.home}") from None
        _make_passable(settings.run_dir, settings.cgroup_name)
        layout = CgroupLayout.detect()
        host.raise_ceilings()
        host.favour_quick_moves(layout)
        host.keep_room_for_the_host(layout, settings.cgroup_name)
        machinery = Machinery(
            settings=settings,
            layout=layout,
            identities=IdentityPool(
                id_base=settings.id_base,
                id_count=settings.id_count,
                defences=settings.defences,
            ),
            disk_store=disks.DiskStore(settings.home / "templates"),
            skeleton=_make_skeleton(settings.home / "skeleton", settings.guest_mount),
        )
        for name in records.sandbox_ids(settings.home / "sandboxes"):
            record = records.read(machinery.places(name))
            if record is not None:
                machinery.identities.mark_leased(name, record.id_base)
        return machinery

    def _recorded(self) -> set[str]:
        return records.sandbox_ids(self._settings.home / "sandboxes")

    def _close(self) -> None:
        if self._home_lock >= 0:
            os.close(self._home_lock)
            self._home_lock = -1
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self._machinery is not None:
            # Only where no sandbox is left in them.
            cgroups.remove_top(self._machinery.layout, self._settings.cgroup_name)
            with contextlib.suppress(OSError):
                (self._settings.run_dir / self._settings.cgroup_name).rmdir()
                self._settings.run_dir.rmdir()
            self._machinery = None

    def _refill(self) -> None:
        try:
            self._ready().identities.refill()
        except SandboxRuntimeError as error:
            _log.warning("identities.refill_failed", extra={"error": str(error)})

    async def _on_cgroup(self, sandbox: Sandbox, work: Callable[[], None]) -> None:
        try:
            await self._in_thread(work)
        except FileNotFoundError as error:
            raise SandboxGone(sandbox.sandbox_id) from error

    @contextlib.asynccontextmanager
    async def _lock(self, sandbox_id: str) -> AsyncIterator[None]:
        counted = self._locks.setdefault(sandbox_id, _CountedLock())
        counted.users += 1
        try:
            async with counted.lock:
                yield
        finally:
            counted.users -= 1
            if not counted.users:
                del self._locks[sandbox_id]

    def _ready(self) -> Machinery:
        if self._machinery is None:
            raise SandboxRuntimeError("the runtime is not open")
        return self._machinery

    def _submit(self, work: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _in_thread(self, work: Callable[..., _T], *arguments: object) -> _T:
        future = self._submit(work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be interrupted, and what it works on must not be worked on by another.
            await asyncio.wait([future])
            raise


def _make_passable(run_dir: Path, name: str) -> None:
    # Another agent that ends at this moment may remove the shared directory while it is still empty.
    while True:
        with contextlib.suppress(FileNotFoundError):
            run_dir.mkdir(parents=True, exist_ok=True, mode=0o711)
            (run_dir / name).mkdir(exist_ok=True, mode=0o711)
            return


def _make_skeleton(directory: Path, guest_mount: str) -> Path:
    """The lowest layer: mount points and a hosts file for images that have none."""
    aside = directory.with_suffix(".new")
    shutil.rmtree(aside, ignore_errors=True)
    for name in ("proc", "sys", "dev", "etc", guest_mount.lstrip("/")):
        (aside / name).mkdir(parents=True, mode=0o755)
    tmp = aside / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    (aside / "etc" / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    if not directory.exists():
        aside.rename(directory)
    else:
        shutil.rmtree(aside)
    return directory
