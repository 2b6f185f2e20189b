"""Errors of the link.

    LinkError
        SpawnError              nothing was started; the link is fine
        OperationError          a request was refused by the guest; the link is fine
            WorkerKilledError   a file operation was killed: by its kill group, or out of memory
        FileError               a file could not be opened or written; the link is fine
        LinkClosedError         the guest, or the link to it, is gone
            LinkViolationError  closed by us: the guest broke the protocol, do not trust it again

A process that fails, a file that is missing, are results and not errors.
"""

from __future__ import annotations

import errno as _errno


class LinkError(Exception):
    """Anything that goes wrong between agent and guest."""


class SpawnError(LinkError):
    """The process could not be started.

    Attributes:
        errno: the system's number, 0 when there is none.
        errno_name: its name, as "ENOENT"; "" when there is none.
        message: for people.
        stage: where: "fork" (EAGAIN: the pids limit), "group", "limits", "user", "cwd", "command",
            "shell", "context" or "request".
    """

    def __init__(self, errno: int, message: str, stage: str) -> None:
        super().__init__(f"{stage}: {message}")
        self.errno = errno
        self.errno_name = _errno.errorcode.get(errno, "")
        self.message = message
        self.stage = stage


class OperationError(LinkError):
    """The guest refused a request; fields as in `SpawnError`."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno
        self.errno_name = _errno.errorcode.get(errno, "")
        self.message = message
        self.stage = "request"


class WorkerKilledError(OperationError):
    """The helper of a file operation was killed by `signal` before it was done."""

    def __init__(self, signal: int) -> None:
        super().__init__(0, f"the operation was killed by signal {signal}")
        self.signal = signal


class FileError(LinkError):
    """What a user sees as a file error.

    Attributes:
        errno_name: as "ENOENT".
        message: for people; comes from the sandbox.
    """

    def __init__(self, errno_name: str, message: str) -> None:
        super().__init__(f"{errno_name}: {message}")
        self.errno_name = errno_name
        self.message = message


class LinkClosedError(LinkError):
    """There is no guest behind the link any more."""


class LinkViolationError(LinkClosedError):
    """The guest sent what the protocol does not allow. The sandbox is to be replaced."""
