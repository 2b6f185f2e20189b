"""What the profile may leave on a machine, found by the names it gave: nothing, after `down`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from scripts.localstack.places import Places

_CGROUPS = Path("/sys/fs/cgroup")
#: Docker's own parent of all its containers' cgroups, which it leaves.
_DOCKER = "docker"


def leftovers(places: Places) -> list[str]:
    """Processes, mounts, loop devices, cgroups: a sentence for each."""
    marks = (str(places.state), str(places.cache))
    return [
        *(f"process {each}" for each in _processes(marks)),
        *(
            f"mount {line}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if _has(line, marks)
        ),
        *(f"loop device {each}" for each in _loops()),
        *(f"cgroup {path}" for path in _cgroups(places)),
    ]


def remove_empty_cgroups(places: Places) -> None:
    """Those of a Docker daemon that has ended. One that is not empty is not ours, or is told of by `leftovers`."""
    for path in _of_docker(places):
        with contextlib.suppress(OSError):
            path.rmdir()


def _has(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)


def _processes(marks: tuple[str, ...]) -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                temporary = next(
                    (
                        part
                        for part in (entry / "environ").read_bytes().split(b"\0")
                        if part.startswith(b"TMPDIR=")
                    ),
                    b"",
                )
            except OSError:
                continue
            if _has(command, marks) or _has(temporary.decode(errors="replace"), marks):
                yield f"{entry.name} {command[:200]}"


def _loops() -> Iterator[str]:
    """Loop devices over files of a host's home, as its container names them."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            name = backing.read_text().strip()
            if name.startswith("/var/lib/shoal/hosts/") or "/instances/i-" in name:
                yield f"{backing.parts[3]} {name}"


def _cgroups(places: Places) -> Iterator[Path]:
    seen = places.state / "cgroups"
    names = set(seen.read_text().split()) if seen.exists() else set()
    for hierarchy in _CGROUPS.iterdir():
        for name in sorted(names):
            yield from hierarchy.glob(f"{name}*")


def _of_docker(places: Places) -> Iterator[Path]:
    if not (places.state / "dockerd.json").exists():
        return
    roots = [_CGROUPS, *_CGROUPS.iterdir()]
    for root in roots:
        directory = root / _DOCKER
        if directory.is_dir():
            yield from (path for path in directory.iterdir() if path.is_dir())
            yield directory
