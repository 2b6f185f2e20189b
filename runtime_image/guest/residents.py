"""Programs that outlive the action that started them: named shells and code contexts.

A resident takes one command after another. Each command is a `Process` with streams of its own; the
resident reports its end, or ends itself and the command with it. A name whose resident is gone gets
a new one, and the next command is told that the old one's state is lost.
"""

from __future__ import annotations

import os
from errno import EBUSY
from time import monotonic

from .launch import fork_child
from .loop import IN
from .process import Process
from .spawn import failure, watch_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from resource import struct_rusage
    from typing import Any

    from .init import Guest

    Reply = Callable[[dict[str, Any]], None]


class Resident:
    """One resident; subclasses say how a command gets in."""

    # What the exit of a command says, before "_restarted" and "_ended"; also the stage of failures.
    kind = ""

    def __init__(self, guest: Guest, *, restarted: bool) -> None:
        self.guest = guest
        self.pid = 0
        self.alive = False
        # It became what was asked for, and may have state that its end loses.
        self.lived = False
        self.process: Process | None = None
        self.restarted = restarted
        self._ticks = 0
        # Of ours: what the resident reports on. Closed with it.
        self.report_fd = -1

    def launch(self, spec: dict[str, Any], procs_fd: int | None, reply: Reply) -> None:
        """Start it, for the first command's `spec`; `reply` is told when it runs, or why not.

        Raises:
            OSError: no process could be made.
        """
        raise NotImplementedError

    def start(self, spec: dict[str, Any], places: dict[int, int], procs_fd: int | None, reply: Reply) -> None:
        """Fork `spec` with `places` as descriptors and nothing as 0, 1, 2.

        Raises:
            OSError: no process could be made.
        """
        null = self.guest.devnull
        account = self.guest.accounts.find(spec.get("user"))
        self.pid, failure_fd = fork_child(
            {**spec, "tty": None}, account, (null, null, null), places, procs_fd
        )
        self.alive = True

        def decided(failed: dict[str, Any] | None) -> None:
            if failed is None:
                self.lived = True
                reply({"pid": self.pid})
                return
            # Its exit is still to come, but nothing is to be sent to it any more.
            self.alive = False
            self.cleanup()
            process, self.process = self.process, None
            if process is not None:
                process.forget()
            reply(failed)

        watch_start(self.guest, self.pid, failure_fd, decided, self._exited)
        os.set_blocking(self.report_fd, False)
        self.guest.loop.watch(self.report_fd, IN, self._report)

    def run(self, process: Process, spec: dict[str, Any]) -> None:
        """Hand over a command; its streams become those of `process`.

        Raises:
            OSError: its streams could not be made.
        """
        raise NotImplementedError

    def read_report(self) -> None:
        """Something came on `report_fd`.

        Raises:
            OSError: and went wrong.
        """
        raise NotImplementedError

    def cleanup(self) -> None:
        """The resident is gone."""

    def take(self, process: Process) -> None:
        """`process` is the command at work now."""
        self.process = process
        process.pid = self.pid
        process.started = monotonic()
        self._ticks = self._cpu_ticks()

    def finish(self, code: int | None, signal: int | None = None, *, ended: bool = False) -> None:
        """The command is done."""
        process, self.process = self.process, None
        if process is None:
            return
        cpu_us = None
        if not ended:
            hertz = os.sysconf("SC_CLK_TCK")
            cpu_us = max(0, self._cpu_ticks() - self._ticks) * 1_000_000 // hertz
        info = {"code": code, "signal": signal, "cpu_us": cpu_us, "max_rss_kib": None}
        info[f"{self.kind}_restarted"] = self.restarted
        info[f"{self.kind}_ended"] = ended
        self.restarted = False
        process.finish(info)

    def _report(self, events: int) -> None:
        try:
            self.read_report()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self.guest.loop.unwatch(self.report_fd)

    def _exited(self, status: int, usage: struct_rusage) -> None:
        self.alive = False
        # A last word, such as that the command began.
        self._report(IN)
        self.cleanup()
        code = os.waitstatus_to_exitcode(status)
        self.guest.loop.unwatch(self.report_fd)
        os.close(self.report_fd)
        self.finish(code if code >= 0 else None, -code if code < 0 else None, ended=True)

    def _cpu_ticks(self) -> int:
        """User and system time, its own and of children it waited for; 0 when it is gone."""
        try:
            fd = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
        except OSError:
            return 0
        finally:
            os.close(fd)
        return sum(int(field) for field in fields[11:15])


class Residents:
    """All residents of one kind, by name."""

    def __init__(self, guest: Guest, make: Callable[..., Resident]) -> None:
        self._guest = guest
        self._make = make
        self._known: dict[str, Resident] = {}

    def run(
        self, name: str, spec: dict[str, Any], process: Process, procs_fd: int | None, reply: Reply
    ) -> None:
        """Run `spec`'s command in resident `name`; replies when it is handed over, or why not."""
        resident = self._known.get(name)
        try:
            if resident is not None and resident.alive:
                if resident.process is not None:
                    reply(failure(EBUSY, f"{resident.kind} {name!r} is at work", resident.kind))
                    return
                if procs_fd is not None:
                    # The kill group of this command takes the resident in; what earlier commands
                    # left running stays in theirs.
                    os.write(procs_fd, b"%d" % resident.pid)
                resident.take(process)
                resident.run(process, spec)
                reply({"pid": resident.pid})
                return
            lost = resident is not None and (resident.lived or resident.restarted)
            resident = self._make(self._guest, restarted=lost)
            self._known[name] = resident
            resident.process = process
            resident.launch(spec, procs_fd, reply)
            resident.take(process)
            resident.run(process, spec)
        except OSError as err:
            if resident is not None:
                resident.alive = False
                resident.cleanup()
                resident.process = None
            process.forget()
            reply(failure(err.errno or 0, err.strerror or str(err), "fork"))
