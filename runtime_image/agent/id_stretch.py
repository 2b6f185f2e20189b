"""Which host ids are this agent's: agents of one machine never share one, however they end.

Each home claims a stretch of 1,024 ranges in a directory that lives as long as the machine runs. The claim is by home,
not by process: sandboxes may outlive their agent. It is given up when the agent ends with nothing left, or taken over
by another home once its own is gone from the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

#: Ids below belong to people and services.
_FIRST_ID = 1 << 27
_RANGE_SIZE = 65_536
RANGES = 1024
#: As many as fit below the last id, which means "none".
_STRETCHES = ((1 << 32) - _FIRST_ID) // (RANGES * _RANGE_SIZE) - 1
REGISTRY = Path("/run/shoal-ids")


class NoStretchError(Exception):
    """Every stretch of ids of this machine is claimed by a home that exists."""


def claim(home: Path, registry: Path = REGISTRY) -> int:
    """The first id of this home's stretch; the same one for as long as it is not given up.

    Raises:
        NoStretchError: None is free.
    """
    name = str(home.resolve())
    with _locked(registry):
        free: Path | None = None
        for number in range(_STRETCHES):
            path = registry / str(number)
            owner = _owner(path)
            if owner == name:
                return _first(number)
            if free is None and (owner is None or not Path(owner).exists()):
                free = path
        if free is None:
            raise NoStretchError(f"all {_STRETCHES} stretches of ids are claimed in {registry}")
        free.write_text(name)
        return _first(int(free.name))


def give_up(home: Path, registry: Path = REGISTRY) -> None:
    """This home has no sandboxes any more. Harmless when repeated."""
    name = str(home.resolve())
    with contextlib.suppress(FileNotFoundError), _locked(registry):
        for path in registry.iterdir():
            if _owner(path) == name:
                path.unlink()


def _first(number: int) -> int:
    return _FIRST_ID + number * RANGES * _RANGE_SIZE


def _owner(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(registry: Path) -> Iterator[None]:
    registry.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(registry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
