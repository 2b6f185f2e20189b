"""Processes of this machine, named so that a pid is never mistaken for another: pid, start time, boot."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: In the environment of everything that belongs to a host: how its processes are found again.
MARK = "SHOAL_HOST_ID"


@dataclass(frozen=True, kw_only=True)
class ProcessName:
    """A process. `started`: its start time in clock ticks since boot; `boot`: the machine's boot id."""

    pid: int
    started: int
    boot: str


def boot_id() -> str:
    """This boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def name_of(pid: int) -> ProcessName | None:
    """The process that has this pid now; None when there is none, or only its zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return ProcessName(pid=pid, started=int(fields[19]), boot=boot_id())


def is_alive(process: ProcessName) -> bool:
    """Whether that very process still runs. A zombie of ours is reaped on the way."""
    try:
        os.waitpid(process.pid, os.WNOHANG)
    except (ChildProcessError, ProcessLookupError):
        pass
    return name_of(process.pid) == process


def spawn(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Start a process in a session of its own, stdin empty, output to the end of a log; gives its pid.

    It is not tied to this one's life: hosts outlive a control plane that is killed.

    Raises:
        OSError: The program cannot be started.
    """
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return os.posix_spawnp(
            argv[0],
            list(argv),
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out, 1),
                (os.POSIX_SPAWN_DUP2, out, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(out)


def marked(host: str) -> list[ProcessName]:
    """All living processes of a host, by the mark in their environment (sandboxes do not carry it)."""
    mark = f"{MARK}={host}".encode()
    found: list[ProcessName] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            name = name_of(int(entry))
            if name is not None:
                found.append(name)
    return found


def send(process: ProcessName, number: signal.Signals) -> None:
    """Signal that very process, if it still runs."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor names one process: compared after it was opened, the name cannot change hands any more.
        if name_of(process.pid) == process:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
