"""Looks whether this machine can run sandboxes, by trying; says what to do where it cannot.

Nothing here is a guess by version where a trial is possible, and no check is optional: a machine that
fails one runs no sandbox at all rather than a weaker one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import resource
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from runtime_image.agent.sandboxes import disks, identities, overlay, seccomp, syscalls
from runtime_image.agent.sandboxes.cgroups import CgroupLayout
from runtime_image.agent.sandboxes.identities import Identity
from runtime_image.agent.sandboxes.model import DISK_CLASSES_MIB, Defences, NotSupported, SandboxRuntimeError

_MIN_RUNC: Final = (1, 1)
_MIN_FREE_BYTES: Final = 4 << 30
_MIN_OPEN_FILES: Final = 1024
# Above every default range of an agent, below the last ids that mean "nobody".
_TRIAL_ID_BASE: Final = 4_000_000_000
_CAP_SYS_ADMIN: Final = 21


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at. `remedy` is a sentence with what to do, empty when it is fine."""

    name: str
    ok: bool
    found: str
    remedy: str


def doctor(home: Path, *, runc: str = "runc") -> list[Check]:
    """Every check, in the order in which to mend things. Blocking, about 0.1 s; leaves nothing.

    `home` is where the agent keeps its disks; it is made when absent. Never raises for what it finds.
    """
    tries: tuple[tuple[str, Callable[[], str], str], ...] = (
        ("root", _root, "run it as root (sudo), in a container with CAP_SYS_ADMIN and the host's /dev"),
        ("processor", _processor, "use an x86_64 or aarch64 machine"),
        ("runc", lambda: _runc(runc), "run: apt-get install runc (1.1 or later)"),
        ("programs", _programs, "run: apt-get install e2fsprogs util-linux"),
        (
            "cgroup v2",
            _unified,
            "use Linux 5.14 or later and mount it: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none "
            "/sys/fs/cgroup/unified",
        ),
        (
            "resource limits",
            _controllers,
            "boot with the cpu, memory and pids cgroup controllers on (cgroup_enable=memory)",
        ),
        ("seccomp", _seccomp, "use a kernel with CONFIG_SECCOMP_FILTER"),
        (
            "user namespaces",
            _user_namespaces,
            "set sysctl user.max_user_namespaces above 0; where unprivileged ones are restricted, root must be real",
        ),
        ("loop devices", _loop, "run: modprobe loop; in a container pass /dev and CAP_SYS_ADMIN"),
        (
            "overlay over idmapped layers",
            lambda: _overlay(home),
            "use Linux 5.19 or later with overlayfs, and keep the home on ext4, xfs or btrfs",
        ),
        (
            "free space",
            lambda: _space(home),
            f"free {_MIN_FREE_BYTES >> 30} GiB below the home, or move it (--home)",
        ),
        ("open files", _open_files, f"raise the limit: ulimit -Hn {_MIN_OPEN_FILES * 16}"),
    )
    return [_checked(name, attempt, remedy) for name, attempt, remedy in tries]


class _Missing(Exception):
    """A check failed; the message is what was found."""


def _checked(name: str, attempt: Callable[[], str], remedy: str) -> Check:
    try:
        found = attempt()
    except (_Missing, OSError, SandboxRuntimeError, subprocess.SubprocessError) as error:
        return Check(name=name, ok=False, found=str(error), remedy=remedy)
    return Check(name=name, ok=True, found=found, remedy="")


def _root() -> str:
    if os.geteuid() != 0:
        raise _Missing(f"uid {os.geteuid()}")
    status = Path("/proc/self/status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if effective is None or not int(effective[1], 16) >> _CAP_SYS_ADMIN & 1:
        raise _Missing("uid 0 without CAP_SYS_ADMIN")
    return "uid 0"


def _processor() -> str:
    machine = platform.machine()
    try:
        seccomp.profile(machine)
    except KeyError:
        raise _Missing(f"no system call list for {machine}") from None
    return machine


def _runc(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise _Missing(f"{program} is not there")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    version = re.search(r"version (\d+)\.(\d+)(\S*)", said)
    if version is None or (int(version[1]), int(version[2])) < _MIN_RUNC:
        raise _Missing(said.splitlines()[0] if said else "it says no version")
    return f"{path} {version[1]}.{version[2]}{version[3]}"


def _programs() -> str:
    missing = [name for name in ("mkfs.ext4", "prlimit") if shutil.which(name) is None]
    if missing:
        raise _Missing(f"{', '.join(missing)} not there")
    return "mkfs.ext4, prlimit"


def _unified() -> str:
    layout = CgroupLayout.detect()
    with _trial_cgroup(layout.unified) as trial:
        missing = [name for name in ("cgroup.kill", "cgroup.freeze") if not (trial / name).exists()]
    if missing:
        raise _Missing(f"{layout.unified} without {', '.join(missing)}")
    return f"{layout.unified} ({layout.kind})"


def _controllers() -> str:
    layout = CgroupLayout.detect()
    if layout.kind == "v2":
        there = set((layout.unified / "cgroup.controllers").read_text().split())
    else:
        there = set(layout.controllers)
    missing = sorted({"cpu", "memory", "pids"} - there)
    if missing:
        raise _Missing(f"no controller for {', '.join(missing)}")
    return f"cpu, memory, pids by cgroup {'v2' if layout.kind == 'v2' else 'v1'}"


def _seccomp() -> str:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    if "errno" not in actions:
        raise _Missing("no seccomp filters")
    return "filters"


def _user_namespaces() -> str:
    with _trial_identity():
        return "one made, with a network namespace and limits of its own"


def _loop() -> str:
    with tempfile.NamedTemporaryFile(prefix="shoal-doctor-") as image:
        image.truncate(1 << 20)
        device, loop = syscalls.attach_loop(image.name)
        os.close(loop)
    return device


def _overlay(home: Path) -> str:
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (
        _trial_identity() as identity,
        tempfile.TemporaryDirectory(prefix=".doctor-", dir=home) as work,
        contextlib.ExitStack() as stack,
    ):
        places = {name: Path(work) / name for name in ("layer", "disk", "merged", "scratch")}
        for place in places.values():
            place.mkdir(mode=0o755)
        (places["layer"] / "below").write_text("below")
        store = disks.DiskStore(Path(work) / "templates")
        store.create(Path(work) / "disk.img", DISK_CLASSES_MIB[0])
        disks.mount_disk(Path(work) / "disk.img", places["disk"])
        stack.callback(syscalls.unmount, str(places["disk"]), syscalls.MNT_DETACH)
        overlay.mount_overlay(
            layers=(places["layer"],),
            disk=places["disk"],
            target=places["merged"],
            scratch=places["scratch"],
            identity=identity,
        )
        stack.callback(syscalls.unmount, str(places["merged"]), syscalls.MNT_DETACH)
        if (places["merged"] / "below").stat().st_uid != identity.id_base:
            raise _Missing("layers are mounted without their ids mapped")
        os.chown(places["merged"] / "below", identity.id_base + 7, identity.id_base + 7)
        if (places["disk"] / "upper" / "below").stat().st_uid != 7:
            raise _Missing("the upper does not keep unshifted ids")
    return "layers and upper mapped"


def _space(home: Path) -> str:
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(home).free
    if free < _MIN_FREE_BYTES:
        raise _Missing(f"{free >> 20} MiB free in {home}")
    return f"{free >> 30} GiB free in {home}"


def _open_files() -> str:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < _MIN_OPEN_FILES:
        raise _Missing(f"at most {hard}")
    return "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard}"


@contextlib.contextmanager
def _trial_cgroup(root: Path) -> Iterator[Path]:
    trial = root / f"shoal-doctor-{secrets.token_hex(4)}"
    trial.mkdir()
    try:
        yield trial
    finally:
        trial.rmdir()


@contextlib.contextmanager
def _trial_identity() -> Iterator[Identity]:
    for identity in identities.make_namespaces([_TRIAL_ID_BASE], Defences()):
        try:
            yield identity
        finally:
            identity.close()
        return
    raise NotSupported("no user namespace was made", "see the kernel's log")
