"""The agent's side of the link to a guest; `runtime_image/guest` is the other side.

link = await GuestLink.connect(sock, timeout_s=5)
process = await link.spawn(ProcessSpec(process_id="a1", command="echo hi"), procs_fd=fd)
ended = await process.wait()
process.stdout.snapshot().data
await link.forget("a1")
"""

from .errors import (
    FileError,
    LinkClosedError,
    LinkError,
    LinkViolationError,
    OperationError,
    SpawnError,
    WorkerKilledError,
)
from .files import FileInfo, FileReader, FileWriter
from .link import GuestLink
from .process import GuestProcess
from .records import CodeSpec, GuestHello, ProcessExit, ProcessSpec
from .tap import OutputTap, Snapshot

__all__ = [
    "CodeSpec",
    "FileError",
    "FileInfo",
    "FileReader",
    "FileWriter",
    "GuestHello",
    "GuestLink",
    "GuestProcess",
    "LinkClosedError",
    "LinkError",
    "LinkViolationError",
    "OperationError",
    "OutputTap",
    "ProcessExit",
    "ProcessSpec",
    "Snapshot",
    "SpawnError",
    "WorkerKilledError",
]
