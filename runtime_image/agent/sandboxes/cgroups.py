"""The two cgroup layouts of the field behind one interface.

*hybrid*: limits by v1 controllers, each its own hierarchy, plus a v2 hierarchy without controllers
(`/sys/fs/cgroup/unified`). *pure v2*: one hierarchy does both. runc sets the limits at start on
either; grouping, freezing and killing always use the v2 interface.

A sandbox's cgroup is `/<cgroup_name>/<sandbox_id>` in every hierarchy. The guest sits in it; each
kill group is a child of it in the v2 hierarchy that enables no controller, so that processes may be
in parent and child at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from runtime_image.agent.sandboxes.model import Limits, NotSupported

CPU_PERIOD_USEC: Final = 100_000
_GROUP_PREFIX: Final = "group-"
# What runc may create on a v1 machine; the sandbox's directory is removed from each that has it.
_LIMIT_CONTROLLERS: Final = ("cpu", "memory", "pids", "cpuacct")


def cpu_shares(cpu_millis: int) -> int:
    """v1 shares: 1024 for a whole CPU; the kernel's floor is 2."""
    return max(2, cpu_millis * 1024 // 1000)


def cpu_weight(cpu_millis: int) -> int:
    """v2 weight of the same share, by runc's conversion (libcontainer `ConvertCPUSharesToCgroupV2Value`)."""
    return 1 + ((min(cpu_shares(cpu_millis), 262_144) - 2) * 9999) // 262_142


def cpu_quota_usec(cpu_millis: int) -> int:
    """CPU time per period; the kernel refuses less than 1 ms."""
    return max(1000, cpu_millis * CPU_PERIOD_USEC // 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CgroupLayout:
    """Where this machine's hierarchies are mounted."""

    kind: Literal["hybrid", "v2"]
    unified: Path
    controllers: dict[str, Path]
    """v1 controller (or `name=...`) to its mount; empty on pure v2."""

    @classmethod
    def detect(cls, mountinfo: str | None = None) -> CgroupLayout:
        """Reads the mount table. Raises NotSupported without a v2 hierarchy."""
        text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
        unified: Path | None = None
        controllers: dict[str, Path] = {}
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            fields, kind = left.split(), right.split()
            if len(fields) < 5 or len(kind) < 3:
                continue
            mount_point = Path(fields[4])
            if kind[0] == "cgroup2" and unified is None:
                unified = mount_point
            elif kind[0] == "cgroup":
                for option in kind[2].split(","):
                    if option.startswith("name=") or (
                        option not in {"rw", "ro", "xattr"} and "=" not in option
                    ):
                        controllers[option] = mount_point
        if unified is None:
            raise NotSupported(
                "no cgroup v2 hierarchy is mounted",
                "run: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified",
            )
        return cls(
            kind="hybrid" if "memory" in controllers else "v2", unified=unified, controllers=controllers
        )

    def counts_swap(self) -> bool:
        """Whether a limit on memory and swap together can be set."""
        if self.kind == "v2":
            return True  # runc ignores a kernel that does not when the allowance is zero
        return (self.controllers["memory"] / "memory.memsw.limit_in_bytes").exists()

    def hierarchies(self) -> list[Path]:
        """Every hierarchy once, the v2 one first: killing by it empties the others."""
        return [self.unified, *dict.fromkeys(self.controllers.values())]


class SandboxCgroup:
    """The cgroup of one sandbox across the hierarchies. Blocking; each call takes microseconds."""

    def __init__(self, layout: CgroupLayout, cgroup_name: str, sandbox_id: str) -> None:
        self._layout = layout
        self.relative = f"{cgroup_name}/{sandbox_id}"
        self.unified = layout.unified / self.relative

    def _of(self, controller: str) -> Path:
        if self._layout.kind == "v2":
            return self.unified
        return self._layout.controllers[controller] / self.relative

    def join_unified(self, pid: int) -> None:
        """Puts a process into the v2 cgroup, for a runc that in v1 mode does not do it itself."""
        self.unified.mkdir(parents=True, exist_ok=True)
        mine = f"0::/{self.relative}"
        if mine not in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            (self.unified / "cgroup.procs").write_text(str(pid))

    def set_limits(self, limits: Limits) -> None:
        """Sets cpu, memory and pids. A memory limit under what is used reclaims, or kills for it."""
        quota = cpu_quota_usec(limits.cpu_millis)
        memory = limits.memory_mib << 20
        if self._layout.kind == "v2":
            _write(self.unified / "cpu.max", f"{quota} {CPU_PERIOD_USEC}")
            _write(self.unified / "cpu.weight", str(cpu_weight(limits.cpu_millis)))
            _write(self.unified / "memory.max", str(memory))
            _write(self.unified / "pids.max", str(limits.pids))
            return
        cpu = self._of("cpu")
        _write(cpu / "cpu.cfs_period_us", str(CPU_PERIOD_USEC))
        _write(cpu / "cpu.cfs_quota_us", str(quota))
        _write(cpu / "cpu.shares", str(cpu_shares(limits.cpu_millis)))
        _write(self._of("pids") / "pids.max", str(limits.pids))
        self._set_v1_memory(memory)

    def _set_v1_memory(self, memory: int) -> None:
        names = ["memory.limit_in_bytes"]
        if (self._of("memory") / "memory.memsw.limit_in_bytes").exists():
            names.append("memory.memsw.limit_in_bytes")
            # memory+swap may never be below memory: grow it first, shrink it last.
            if memory > int((self._of("memory") / names[1]).read_text()):
                names.reverse()
        for name in names:
            _write(self._of("memory") / name, str(memory))

    def usage(self) -> tuple[int, int, int | None, int, int]:
        """(cpu_usec, memory_bytes, memory_peak_bytes, pids, oom_kills)."""
        if self._layout.kind == "v2":
            peak = self.unified / "memory.peak"
            return (
                _field(self.unified / "cpu.stat", "usage_usec"),
                _number(self.unified / "memory.current"),
                _number(peak) if peak.exists() else None,
                _number(self.unified / "pids.current"),
                _field(self.unified / "memory.events", "oom_kill"),
            )
        memory = self._of("memory")
        return (
            _number(self._of("cpuacct") / "cpuacct.usage") // 1000,
            _number(memory / "memory.usage_in_bytes"),
            _number(memory / "memory.max_usage_in_bytes"),
            _number(self._of("pids") / "pids.current"),
            _field(memory / "memory.oom_control", "oom_kill"),
        )

    def hits(self) -> tuple[int, int]:
        """(processes killed for memory, processes not started for the limit on their number)."""
        if self._layout.kind == "v2":
            kills = _field(self.unified / "memory.events", "oom_kill")
        else:
            kills = _field(self._of("memory") / "memory.oom_control", "oom_kill")
        return kills, _field(self._of("pids") / "pids.events", "max")

    def oom_counter(self) -> OomCounter:
        """How often the memory limit has killed a process, to be read often."""
        if self._layout.kind == "v2":
            return OomCounter(self.unified / "memory.events")
        return OomCounter(self._of("memory") / "memory.oom_control")

    def freeze(self, *, timeout_s: float) -> None:
        """Returns when every process is really frozen; raises TimeoutError (and thaws) otherwise."""
        _write(self.unified / "cgroup.freeze", "1")
        try:
            _wait_event(self.unified / "cgroup.events", "frozen", 1, timeout_s=timeout_s)
        except TimeoutError:
            _write(self.unified / "cgroup.freeze", "0")
            raise

    def thaw(self, *, timeout_s: float) -> None:
        """Returns when the processes run again."""
        _write(self.unified / "cgroup.freeze", "0")
        _wait_event(self.unified / "cgroup.events", "frozen", 0, timeout_s=timeout_s)

    def kill(self) -> None:
        """SIGKILL to everything in it, frozen or not; nothing when it is gone."""
        with contextlib.suppress(FileNotFoundError):
            _write(self.unified / "cgroup.kill", "1")

    def wait_empty(self, *, timeout_s: float) -> None:
        """Returns when no process is left in it."""
        with contextlib.suppress(FileNotFoundError):
            _wait_event(self.unified / "cgroup.events", "populated", 0, timeout_s=timeout_s)

    def stray_pids(self) -> set[int]:
        """Processes in any hierarchy: what `kill` missed because it never joined the v2 cgroup."""
        found: set[int] = set()
        for root in self._layout.hierarchies():
            with contextlib.suppress(FileNotFoundError):
                found.update(int(p) for p in (root / self.relative / "cgroup.procs").read_text().split())
        return found

    def remove(self, *, timeout_s: float) -> None:
        """Removes the empty cgroup with its kill groups from every hierarchy."""
        for root in self._layout.hierarchies():
            _remove_tree(root / self.relative, timeout_s=timeout_s)

    def exists(self) -> bool:
        """Whether any hierarchy still has it."""
        return any((root / self.relative).exists() for root in self._layout.hierarchies())

    def group(self, name: str) -> KillGroup:
        """Makes (or finds) the kill group of one action."""
        path = self.unified / f"{_GROUP_PREFIX}{name}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        return KillGroup(path)


class OomCounter:
    """The memory controller's count of killed processes; one system call a reading."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        """The count; raises OSError when the cgroup is gone."""
        for line in os.pread(self._fd, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line[9:])
        return 0

    def close(self) -> None:
        """Repeatable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class KillGroup:
    """A v2 cgroup below the sandbox's own; the processes of one action.

    `procs_fd` is an open `cgroup.procs`, to be sent to the guest: a child writes `0` to it before
    exec, and then neither a new session nor a double fork lets it or its descendants out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.procs_fd = os.open(path / "cgroup.procs", os.O_RDWR | os.O_CLOEXEC)

    def kill(self) -> None:
        """SIGKILL to the whole tree; nothing when it is gone."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _write(self.path / "cgroup.kill", "1")

    def alive(self) -> bool:
        """Whether a process is left in it (a zombie is not)."""
        try:
            return _field(self.path / "cgroup.events", "populated") == 1
        except (FileNotFoundError, ProcessLookupError):
            return False

    def remove(self) -> bool:
        """Closes the descriptor and removes the cgroup; False while processes are in it. Repeatable."""
        if self.procs_fd >= 0:
            os.close(self.procs_fd)
            self.procs_fd = -1
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise
        return True


def bound_processes(layout: CgroupLayout, cgroup_name: str, most: int) -> None:
    """Makes an agent's top cgroup and bounds what all its sandboxes together may have of processes."""
    (layout.unified / cgroup_name).mkdir(exist_ok=True)
    if layout.kind == "v2":
        # What runc does as well for its first container: limits need the controllers on in the parent.
        for parent in (layout.unified, layout.unified / cgroup_name):
            _write(parent / "cgroup.subtree_control", "+cpu +memory +pids")
        pids = layout.unified / cgroup_name
    else:
        pids = layout.controllers["pids"] / cgroup_name
        pids.mkdir(exist_ok=True)
    _write(pids / "pids.max", str(most))


def remove_top(layout: CgroupLayout, cgroup_name: str) -> None:
    """Removes an agent's own top cgroup where it is empty."""
    for root in layout.hierarchies():
        with contextlib.suppress(OSError):
            (root / cgroup_name).rmdir()


def sandbox_ids_with_cgroups(layout: CgroupLayout, cgroup_name: str) -> set[str]:
    """Names below an agent's top cgroup in any hierarchy."""
    found: set[str] = set()
    for root in layout.hierarchies():
        with contextlib.suppress(FileNotFoundError):
            found.update(entry.name for entry in os.scandir(root / cgroup_name) if entry.is_dir())
    return found


def _write(path: Path, value: str) -> None:
    # Not Path.write_text: a control file must see one write, and must never be created.
    handle = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)


def _number(path: Path) -> int:
    return int(path.read_text())


def _field(path: Path, name: str) -> int:
    # Read often, of every sandbox: about half of what Path.read_text takes.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(handle, 4096)
    finally:
        os.close(handle)
    for line in text.decode().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _wait_event(path: Path, name: str, wanted: int, *, timeout_s: float) -> None:
    """Waits for a key of a `cgroup.events` file; the kernel wakes pollers when one changes."""
    deadline = time.monotonic() + timeout_s
    with open(path) as events:
        poller = select.poll()
        poller.register(events, select.POLLPRI)
        while True:
            events.seek(0)
            if dict(_pairs(events.read())).get(name) == wanted:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{path} did not reach {name} {wanted} within {timeout_s} s")
            poller.poll(left * 1000)


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        yield key, int(value)


def _remove_tree(path: Path, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    pause = 0.0005
    while True:
        try:
            children = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
            for child in children:
                _remove_tree(Path(child), timeout_s=max(0.0, deadline - time.monotonic()))
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            # A process that was killed leaves its cgroup a moment after it is reported dead.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        else:
            return
