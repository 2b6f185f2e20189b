"""Starting the process of an `exec`."""

from __future__ import annotations

import os

from . import wire
from .launch import fork_child, read_failure
from .loop import IN
from .process import Input, Process, set_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from resource import struct_rusage
    from typing import Any

    from .init import Guest

    Reply = Callable[[dict[str, Any]], None]


def failure(number: int, message: str, stage: str) -> dict[str, Any]:
    """A reply that says why nothing was started."""
    return {"errno": number, "message": message, "stage": stage}


def start_exec(
    guest: Guest, spec: dict[str, Any], process: Process, procs_fd: int | None, reply: Reply
) -> None:
    """Fork and exec; replies once the program runs, or with the reason why it does not."""
    opened: list[int] = []
    kept: list[int] = []
    limit = int(spec["limit"])
    tty = spec.get("tty")

    def pipe(flags: int = 0) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC | flags)
        opened.extend(ends)
        return ends

    stage = "user"
    try:
        account = guest.accounts.find(spec.get("user"))
        stage = "fork"
        if tty:
            master, slave = os.openpty()
            opened += (master, slave)
            set_size(master, int(tty[0]), int(tty[1]))
            stdio = (slave, slave, slave)
            process.tty_fd = master
            # The loop watches each direction by its own descriptor.
            reading, writing = os.dup(master), os.dup(master)
            opened += (reading, writing)
            kept = [master, reading, writing]
            outputs = {wire.STDOUT: reading}
        else:
            stdin, writing = guest.devnull, -1
            if spec["stdin"] != "empty":
                stdin, writing = pipe()
                kept.append(writing)
            out, child_out = pipe()
            err, child_err = pipe()
            stdio = (stdin, child_out, child_err)
            kept += (out, err)
            outputs = {wire.STDOUT: out, wire.STDERR: err}
        pid, failure_fd = fork_child(spec, account, stdio, {}, procs_fd)
    except OSError as err:
        for fd in opened:
            os.close(fd)
        reply(failure(err.errno or 0, err.strerror or str(err), stage))
        return
    for fd in opened:
        if fd not in kept:
            os.close(fd)
    process.pid = pid
    for number, fd in outputs.items():
        process.add_output(number, fd, limit)
    if writing >= 0:
        process.stdin = Input(process, writing, at_end=b"\x04" if tty else b"")
        data = spec.get("stdin_data")
        if data is not None:
            process.stdin.feed(data)
            process.stdin.end()

    def decided(failed: dict[str, Any] | None) -> None:
        if failed is not None:
            process.forget()
            guest.drop(process)
        reply(failed or {"pid": pid})

    watch_start(guest, pid, failure_fd, decided, process.leader_exited)


def watch_start(
    guest: Guest,
    pid: int,
    failure_fd: int,
    decided: Callable[[dict[str, Any] | None], None],
    exited: Callable[[int, struct_rusage], None],
) -> None:
    """Tell when a fork has become a program (`decided(None)`) or why it could not, then its exit."""
    started = False

    def decide(events: int = 0) -> None:
        nonlocal started
        try:
            data = os.read(failure_fd, 4096)
        except BlockingIOError:
            return
        guest.loop.unwatch(failure_fd)
        os.close(failure_fd)
        started = True
        if data:
            number, stage, message = read_failure(data)
            decided(failure(number, message, stage))
        else:
            decided(None)

    def ended(status: int, usage: struct_rusage) -> None:
        if not started:
            decide()
        exited(status, usage)

    guest.loop.watch(failure_fd, IN, decide)
    guest.reaper.expect(pid, ended)
