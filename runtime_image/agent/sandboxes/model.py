"""Records of the sandbox runtime, and its errors.

SandboxRuntimeError
├── NotSupported     this machine lacks something; `remedy` says what to do
├── StartFailed      a sandbox did not come up; `step` says where, everything was undone
├── NoIdRange        every id range of the host is leased
└── SandboxGone      the sandbox is not (or no longer) there
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from runtime_image.agent.guest_runtime import GUEST_ENV, GUEST_MOUNT, guest_argv

# Ids a sandbox has for itself: what a Linux image expects (0 to 65,535).
ID_RANGE_SIZE: Final = 65_536

# Sizes of a sandbox's disk, MiB. Few, so that a warm sandbox fits many requests.
DISK_CLASSES_MIB: Final = (256, 1024, 4096, 16_384, 65_536)


class SandboxRuntimeError(Exception):
    """Anything that went wrong on our side, never a command's own failure."""


class NotSupported(SandboxRuntimeError):
    """The machine lacks something; nothing falls back to weaker isolation."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}; {remedy}")
        self.remedy = remedy


class StartFailed(SandboxRuntimeError):
    """A sandbox did not come up; what was made of it has been undone."""

    def __init__(self, sandbox_id: str, step: str, detail: str) -> None:
        super().__init__(f"sandbox {sandbox_id} failed at {step}: {detail}")
        self.sandbox_id = sandbox_id
        self.step = step
        self.detail = detail


class NoIdRange(SandboxRuntimeError):
    """Every id range of this host is leased: the host is full."""


class SandboxGone(SandboxRuntimeError):
    """The sandbox is not here, or was stopped meanwhile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Hard limits of one sandbox. `disk_mib`, `shm_mib` and `open_files` are fixed at start."""

    cpu_millis: int = 1000
    memory_mib: int = 1024
    disk_mib: int = 4096
    pids: int = 512
    shm_mib: int = 64
    open_files: int = 4096

    def __post_init__(self) -> None:
        floors = {
            "cpu_millis": 10,
            "memory_mib": 16,
            "disk_mib": 1,
            "pids": 16,
            "shm_mib": 1,
            "open_files": 64,
        }
        for name, floor in floors.items():
            if getattr(self, name) < floor:
                raise ValueError(f"{name} must be at least {floor}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defences:
    """Which defences are up. All of them, except in an attack test's positive control."""

    user_namespace: bool = True
    user_namespace_limits: bool = True
    own_accounts: bool = True
    """The namespace is made by an id of the sandbox's own, so that the kernel's per-user accounts are its
    own as well."""
    root_mount_flags: bool = True
    """No device nodes and no set-uid programs on the root filesystem."""
    seccomp: bool = True
    drop_capabilities: bool = True
    no_new_privileges: bool = True
    mask_paths: bool = True
    readonly_paths: bool = True
    device_list: bool = True
    network_namespace: bool = True
    pid_namespace: bool = True
    ipc_namespace: bool = True
    read_only_guest: bool = True
    pids_limit: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """What to start. `layers` are unpacked directories with unshifted ids, bottom first."""

    sandbox_id: str
    layers: tuple[Path, ...]
    resources: Limits = Limits()
    hostname: str = "sandbox"

    def __post_init__(self) -> None:
        if not self.sandbox_id or not all(
            c.isascii() and (c.isalnum() or c in "_-") for c in self.sandbox_id
        ):
            raise ValueError("sandbox_id must be ASCII letters, digits, '_' and '-'")
        if len(self.sandbox_id) > 64:
            raise ValueError("sandbox_id is longer than 64 characters")
        if not self.layers:
            raise ValueError("a sandbox needs at least one layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """One live sandbox on this host."""

    sandbox_id: str
    pid: int
    """Host pid of the guest, PID 1 inside."""
    sock: socket.socket | None
    """Our end of the guest's SOCK_SEQPACKET pair; None after `adopt`, the holder has it then."""
    upper: Path
    """The private writable layer: unshifted ids, overlayfs form. Written by the sandbox: never follow
    a symlink in it."""
    merged: Path
    """The whole tree as the sandbox sees it, through /proc; same warning."""
    disk_class_mib: int
    id_base: int
    limits: Limits
    created_at: datetime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a sandbox has used so far; None where this kernel does not count it."""

    cpu_usec: int
    memory_bytes: int
    memory_peak_bytes: int | None
    pids: int
    disk_bytes: int
    oom_kills: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsHit:
    """How often a sandbox's hard limits have stopped it since it was made; of its disk, whether it is full now."""

    oom_kills: int
    forks_refused: int
    disk_full: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Where a runtime keeps its things and what it may use."""

    home: Path
    """One runtime at a time per home; holds records, disks and runc's state."""
    guest_dir: Path
    """The built guest runtime, mounted read-only at `guest_mount`; its files belong to root, readable by all."""
    cgroup_name: str
    """Top cgroup of this agent; unique on the machine, so that a sweep touches only what is ours."""
    id_base: int = 1_000_000 * 1024
    id_count: int = 1024
    """How many ranges of 65,536 ids start at `id_base`: the most sandboxes this host can have."""
    runc: str = "runc"
    run_dir: Path = Path("/run/shoal")
    """Where root filesystems are mounted while runc starts, below the cgroup's name. Others must be able
    to traverse it: the starting process is nobody outside by then."""
    guest_argv: tuple[str, ...] = tuple(guest_argv())
    guest_env: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(GUEST_ENV))
    guest_mount: str = GUEST_MOUNT
    start_timeout_s: float = 60.0
    defences: Defences = Defences()
