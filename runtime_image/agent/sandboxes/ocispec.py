"""The OCI runtime configuration of a sandbox: pure, from a spec to a JSON-able dict.

DESIGN.md "Isolation, by default" in the words runc understands. Every defence can be left out by
`Defences`, for the positive controls of the attack tests and for nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from runtime_image.agent.sandboxes.cgroups import CPU_PERIOD_USEC, cpu_quota_usec, cpu_shares
from runtime_image.agent.sandboxes.model import ID_RANGE_SIZE, Defences, Limits

# The OCI default set less MKNOD, NET_RAW and AUDIT_WRITE (useless without devices, network and audit).
# SETPCAP lets the guest drop a child's; no SYS_ADMIN, SYS_PTRACE, NET_ADMIN, SYS_MODULE, SYS_RESOURCE ...
CAPABILITIES: Final = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
)  # fmt: skip
# What a root process has where capabilities are not dropped (a positive control only).
_MORE_CAPABILITIES: Final = (
    "CAP_DAC_READ_SEARCH", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_RAW",
    "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_MODULE", "CAP_SYS_NICE", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO",
    "CAP_SYS_TTY_CONFIG",
)  # fmt: skip

MASKED_PATHS: Final = (
    "/proc/acpi", "/proc/asound", "/proc/config.gz", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore",
    "/proc/key-users", "/proc/keys", "/proc/kmsg", "/proc/kpagecgroup", "/proc/kpagecount",
    "/proc/kpageflags", "/proc/latency_stats", "/proc/modules", "/proc/pagetypeinfo", "/proc/sched_debug",
    "/proc/scsi", "/proc/slabinfo", "/proc/sysrq-trigger", "/proc/timer_list", "/proc/timer_stats",
    "/proc/vmallocinfo",
)  # fmt: skip
READONLY_PATHS: Final = ("/proc/bus", "/proc/driver", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/tty")

# Above the agent's 0: the host kills sandboxes first. The guest raises its children further.
_OOM_SCORE_ADJ: Final = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """Everything the configuration of one sandbox depends on."""

    rootfs: Path
    argv: tuple[str, ...]
    hostname: str
    env: Mapping[str, str]
    limits: Limits
    cgroup_path: str
    id_base: int
    userns_path: str
    netns_path: str
    guest_dir: Path
    guest_mount: str
    swap_is_counted: bool
    seccomp: Mapping[str, Any]
    defences: Defences


def build(bundle: Bundle) -> dict[str, Any]:
    """The `config.json` of a bundle."""
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(bundle.rootfs), "readonly": False},
        "hostname": bundle.hostname,
        "process": _process(bundle),
        "mounts": _mounts(bundle),
        "linux": _linux(bundle),
    }


def _process(bundle: Bundle) -> dict[str, Any]:
    defences = bundle.defences
    held = list(CAPABILITIES)
    if not defences.drop_capabilities:
        held += _MORE_CAPABILITIES
    return {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": list(bundle.argv),
        "env": [f"{name}={value}" for name, value in bundle.env.items()],
        "cwd": "/",
        # Nothing inheritable or ambient: another user inside starts with none at all.
        "capabilities": {"bounding": held, "effective": held, "permitted": held},
        "noNewPrivileges": defences.no_new_privileges,
        "oomScoreAdj": _OOM_SCORE_ADJ,
    }


def _mounts(bundle: Bundle) -> list[dict[str, Any]]:
    guest_options = ["bind", "nosuid", "nodev"]
    guest_options.append("ro" if bundle.defences.read_only_guest else "rw")
    mounts = [
        _tmpfs("/dev", "mode=755", "size=1m", "nr_inodes=4096", "nosuid", "noexec"),
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        },
        _tmpfs("/dev/shm", "mode=1777", f"size={bundle.limits.shm_mib}m", "nosuid", "nodev", "noexec"),
        _plain("/proc", "proc", "nosuid", "noexec", "nodev"),
        {
            "destination": bundle.guest_mount,
            "type": "bind",
            "source": str(bundle.guest_dir),
            "options": guest_options,
        },
    ]
    if bundle.defences.ipc_namespace:
        mounts.append(_plain("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"))
    if bundle.defences.mask_paths:
        # sysfs tells of every block device, its backing file and neighbours; what programs look for is
        # the processor and memory topology, so only that is there.
        mounts += [
            _tmpfs("/sys", "mode=755", "size=64k", "nosuid", "noexec", "nodev", "ro"),
            {
                "destination": "/sys/devices/system",
                "type": "bind",
                "source": "/sys/devices/system",
                "options": ["bind", "ro", "nosuid", "noexec", "nodev"],
            },
        ]
    else:
        mounts.append(_plain("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"))
    return mounts


def _linux(bundle: Bundle) -> dict[str, Any]:
    limits, defences = bundle.limits, bundle.defences
    memory = limits.memory_mib << 20
    resources: dict[str, Any] = {
        "devices": [{"allow": not defences.device_list, "access": "rwm"}],
        "cpu": {
            "shares": cpu_shares(limits.cpu_millis),
            "quota": cpu_quota_usec(limits.cpu_millis),
            "period": CPU_PERIOD_USEC,
        },
        # `swap` counts memory and swap together: equal to the limit, it means no swap at all.
        "memory": {"limit": memory, **({"swap": memory} if bundle.swap_is_counted else {})},
    }
    if defences.pids_limit:
        resources["pids"] = {"limit": limits.pids}
    namespaces = [{"type": "mount"}, {"type": "uts"}, {"type": "cgroup"}]
    if defences.network_namespace:
        namespaces.append({"type": "network", "path": bundle.netns_path})
    if defences.pid_namespace:
        namespaces.append({"type": "pid"})
    if defences.ipc_namespace:
        namespaces.append({"type": "ipc"})
    linux: dict[str, Any] = {
        "cgroupsPath": bundle.cgroup_path,
        "namespaces": namespaces,
        "resources": resources,
        "rootfsPropagation": "private",
        "maskedPaths": list(MASKED_PATHS) if defences.mask_paths else [],
        "readonlyPaths": list(READONLY_PATHS) if defences.readonly_paths else [],
    }
    if defences.user_namespace:
        namespaces.append({"type": "user", "path": bundle.userns_path})
        # The joined namespace has this mapping already; runc wants to know it.
        linux["uidMappings"] = linux["gidMappings"] = [
            {"containerID": 0, "hostID": bundle.id_base, "size": ID_RANGE_SIZE}
        ]
    if defences.seccomp:
        linux["seccomp"] = dict(bundle.seccomp)
    return linux


def _tmpfs(destination: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "tmpfs", "source": "tmpfs", "options": list(options)}


def _plain(destination: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": kind, "options": list(options)}
