"""Everything countable that sandboxes take from a machine, counted for one server's home."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.e2e.leftovers import cgroup_names, loops

#: Descriptors of namespaces that wait for a sandbox, and the most of them that an agent keeps.
MADE_AHEAD = ("net", "user")
MOST_MADE_AHEAD = 64


def agent_pids(home: Path) -> list[int]:
    """Pids of a home's agents, their holders not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            is_agent = b"runtime_image.agent" in words and b"runtime_image.agent.holder" not in words
            if is_agent and str(home).encode() in b" ".join(words):
                found.append(int(entry.name))
    return found


def _descriptors(pid: int) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        kind = target.split(":")[0] if ":" in target and not target.startswith("/") else "file"
        kinds[kind] += 1
    return kinds


def _cgroup_directories(names: frozenset[str]) -> int:
    # os.walk passes over what goes meanwhile; before Python 3.12, Path.glob raises.
    roots = [root / name for root in Path("/sys/fs/cgroup").iterdir() for name in names]
    return sum(1 for root in roots for _ in os.walk(root))


def _entries_of(root: Path, name: str) -> int:
    """How many entries directories of that name hold; passes over what goes meanwhile."""
    found = 0
    for place, directories, files in os.walk(root):
        if Path(place).name == name:
            found += len(directories) + len(files)
            directories.clear()
    return found


def census(home: Path) -> dict[str, int]:
    """Counts by kind: guests, mounts, loop devices, cgroups, network namespaces, descriptors, keys, sandbox files.

    A connection more or less between server and agent says nothing, so sockets are left to the guests' own count;
    namespaces are made ahead in batches, so that `MADE_AHEAD` kinds of descriptors are bounded and not counted.
    """
    names = cgroup_names(home)
    counts: Counter[str] = Counter()
    namespaces: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            cgroups = (entry / "cgroup").read_text()
            space = os.readlink(entry / "ns" / "net")
        except OSError:
            continue
        if any(f"/{name}/" in cgroups for name in names):
            counts["processes inside"] += 1
            namespaces.add(space)
    counts["network namespaces"] = len(namespaces)
    counts["mounts"] = sum(
        str(home) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()
    )
    counts["loop devices"] = len(loops(str(home)))
    counts["cgroups"] = _cgroup_directories(names)
    counts["keys"] = len(Path("/proc/keys").read_text().splitlines())
    counts["sandbox directories"] = _entries_of(home / "hosts", "sandboxes")
    counts["runc states"] = _entries_of(home / "hosts", "runc")
    for pid in agent_pids(home):
        for kind, number in _descriptors(pid).items():
            if kind in MADE_AHEAD:
                assert number <= MOST_MADE_AHEAD, (kind, number)
            elif kind != "socket":
                counts[f"descriptors: {kind}"] += number
    return dict(counts)
