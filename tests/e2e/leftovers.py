"""What a server and its hosts may leave on a machine: found by the server's home, so that others do not disturb."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from runtime_image.agent.host_runtime import cgroup_name_of


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What is there that belongs to a home."""

    processes: tuple[str, ...]
    mounts: tuple[str, ...]
    loops: tuple[str, ...]
    cgroups: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.processes or self.mounts or self.loops or self.cgroups)


def leftovers(home: Path, cgroup_names: frozenset[str] = frozenset()) -> Leftovers:
    """What is there of a home now.

    Args:
        home: The server's home; whatever names it in its command line, mount, or backing file is its.
        cgroup_names: Names of its hosts' cgroups.
    """
    marker = str(home)
    return Leftovers(
        processes=tuple(_processes(marker)),
        mounts=tuple(_lines_with(Path("/proc/self/mountinfo"), marker)),
        loops=tuple(loops(marker)),
        cgroups=tuple(_cgroups(cgroup_names)),
    )


def _processes(marker: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in command:
            found.append(f"{entry.name} {command[:200]}")
    return found


def _lines_with(path: Path, marker: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if marker in line]


def loops(marker: str) -> list[str]:
    """Loop devices over files that a home has."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = backing.read_text().strip()
        except OSError:
            continue
        if marker in name:
            found.append(f"{backing.parts[3]} {name}")
    return found


def _cgroups(names: frozenset[str]) -> list[str]:
    if not names:
        return []
    found = []
    for root in Path("/sys/fs/cgroup").iterdir():
        for name in names:
            found += [str(path) for path in root.glob(f"{name}*")]
    return found


def cgroup_names(home: Path) -> frozenset[str]:
    """The names of the cgroups that a home's hosts use: agents derive them from their own homes."""
    return frozenset(cgroup_name_of(host / "home") for host in home.glob("hosts/*"))
