"""What is written about each sandbox before it is made: how a restarted agent finds what it has.

One directory per sandbox under `<home>/sandboxes`; the record is there before anything else exists and
its directory is removed last. Everything else about a sandbox (paths, cgroup, runc id) follows from its
id, so that teardown works from any half-made state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from datetime import datetime
from pathlib import Path

from runtime_image.agent.sandboxes.model import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One sandbox as last written. `pid` is None until it runs."""

    sandbox_id: str
    id_base: int
    disk_class_mib: int
    limits: Limits
    created_at: datetime
    pid: int | None = None
    pid_started: int | None = None
    """Field 22 of /proc/<pid>/stat: tells the process from a later one with its pid."""

    def lives(self) -> bool:
        """Whether the guest still runs."""
        return self.pid is not None and process_started(self.pid) == self.pid_started


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Every path that belongs to one sandbox."""

    directory: Path
    merged: Path
    """Where the root filesystem is mounted for as long as runc needs it; a path that root inside may
    traverse, unlike the home."""
    runc_state: Path

    @property
    def record(self) -> Path:
        """The record file."""
        return self.directory / "record.json"

    @property
    def running(self) -> Path:
        """Which process it is, written when it runs."""
        return self.directory / "running.json"

    @property
    def image(self) -> Path:
        """The disk image."""
        return self.directory / "disk.img"

    @property
    def disk(self) -> Path:
        """Where the disk is mounted; `upper` is in it."""
        return self.directory / "disk"

    @property
    def upper(self) -> Path:
        """The private layer."""
        return self.disk / "upper"

    @property
    def scratch(self) -> Path:
        """An empty directory for passing mounts."""
        return self.directory / "lower"

    @property
    def bundle(self) -> Path:
        """runc's bundle."""
        return self.directory / "bundle"

    @property
    def runc_log(self) -> Path:
        """runc's own words."""
        return self.directory / "runc.log"

    @property
    def pid_file(self) -> Path:
        """Written by runc."""
        return self.directory / "pid"


def write(places: Places, record: Record) -> None:
    """Writes a record atomically, before anything else of the sandbox is made."""
    fields = dataclasses.asdict(record)
    del fields["pid"], fields["pid_started"]
    fields["created_at"] = record.created_at.isoformat()
    _write_new(places.record, json.dumps(fields))


def write_running(places: Places, *, pid: int, pid_started: int) -> None:
    """Adds the process. A second file: ext4 flushes a file to disk when a rename replaces another."""
    _write_new(places.running, json.dumps({"pid": pid, "pid_started": pid_started}))


def _write_new(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.rename(path)


def read(places: Places) -> Record | None:
    """A record, or None when there is none or it was never completed."""
    try:
        fields = json.loads(places.record.read_text())
        fields["limits"] = Limits(**fields["limits"])
        fields["created_at"] = datetime.fromisoformat(fields["created_at"])
        with contextlib.suppress(FileNotFoundError):
            fields |= json.loads(places.running.read_text())
        return Record(**fields)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def process_started(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when it is gone or a zombie."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name may contain anything, also a closing parenthesis.
            fields = stat.read().rpartition(b")")[2].split()
        return None if fields[0] in {b"Z", b"X"} else int(fields[19])
    return None


def sandbox_ids(directory: Path) -> set[str]:
    """Names of the sandbox directories below `directory`."""
    with contextlib.suppress(FileNotFoundError):
        return {entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)}
    return set()
