"""`shoal run`, `exec`, `shell`: commands in sessions, live, with their own exit codes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from shoal.cli import asking, terminal
from shoal.cli.output import OURS, Fail, Json, phases, print_json, stderr
from shoal.client.errors import from_detail
from shoal.client.results import ExecResult, result_of
from shoal.client.sync_session import Session

Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND...", help="One argument is a shell's line; several are a program and its arguments."
    ),
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")]
TimeoutS = Annotated[
    float | None, typer.Option(help="Seconds until its process tree is killed; none unless said.")
]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", help="Where it starts.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="As whom it runs.")]

#: As GNU timeout, and as shells and docker for programs that cannot be started.
TIMED_OUT, CANNOT_RUN, NOT_FOUND = 124, 126, 127
_SHELL = ["/bin/sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash -i; fi; exec sh -i"]


def exit_code(result: ExecResult) -> int:
    """The exit code that tells how a command ended: its own, 128 + n for a signal, 124 for a time-out."""
    if result.error is not None:
        return NOT_FOUND if result.error.errno == "ENOENT" else CANNOT_RUN
    if result.timed_out:
        return TIMED_OUT
    if result.exit_code is not None:
        return result.exit_code
    number = getattr(signal.Signals, f"SIG{result.signal}", None) if result.signal else None
    return 128 + int(number) if number is not None else OURS


def _note(result: ExecResult) -> None:
    """Says on stderr what an exit code alone does not."""
    if result.error is not None:
        told = f"cannot run it: {result.error.message} ({result.error.errno})"
    elif result.oom_killed:
        told = "it ran out of memory (--memory-mib of the session)"
    elif result.timed_out:
        told = "it ran into --timeout-s, and its whole process tree was killed"
    elif result.signal is not None:
        told = f"it was ended by signal {result.signal}"
    else:
        return
    stderr().print(f"shoal: {told}", highlight=False, markup=False)


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that the command is killed and an unnamed session ended."""

    def stop(number: int, frame: Any) -> None:
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except _Stopped as stopped:
        raise typer.Exit(128 + stopped.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_in(box: Session, command: list[str], *, tty: bool, as_json: bool, options: dict[str, Any]) -> int:
    if command[0] == "--":
        command = command[1:]
    if not command:
        raise typer.BadParameter("no command after --")
    line: str | list[str] = command[0] if len(command) == 1 else command
    options = {key: value for key, value in options.items() if value}
    with _signals_raise():
        if as_json:
            result = terminal.collect(box, line, options)
            print_json(result)
            return exit_code(result)
        result = (terminal.interact if tty else terminal.pipe)(box, line, options)
        _note(result)
        return exit_code(result)


def exec_(
    session: asking.SessionArg,
    command: Command,
    run: asking.RunOption = None,
    tty: Tty = False,
    env: asking.Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout_s: TimeoutS = None,
    json: Json = False,
) -> None:
    """Run a command in a session and exit with its code; 125 is a failure of ours.

    stdin is passed on where it is not a terminal. Options stand before SESSION.
    """
    options = {"env": asking.pairs(env, "--env"), "cwd": cwd, "user": user, "timeout_s": timeout_s}
    with asking.connected() as shoal:
        code = _run_in(asking.find(shoal, session, run), command, tty=tty, as_json=json, options=options)
    raise typer.Exit(code)


def run(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="name:tag, or a snapshot's id.")],
    command: Command,
    run: asking.RunOption = None,
    tty: Tty = False,
    env: asking.Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout_s: TimeoutS = None,
    cpu: asking.Cpu = None,
    memory_mib: asking.Memory = None,
    disk_mib: asking.Disk = None,
    pids: asking.Pids = None,
    json: Json = False,
) -> None:
    """Run one command in a new session, which ends with it; exit with its code. Options stand before IMAGE."""
    options = {"env": asking.pairs(env, "--env"), "cwd": cwd, "user": user, "timeout_s": timeout_s}
    limits = asking.resources(cpu, memory_mib, disk_mib, pids)
    with asking.connected() as shoal:
        with phases() as watch:
            box = shoal.session(
                **asking.source(image), run=run, resources=limits, steps=asking.step_prefix(), watch=watch
            )
        with box:
            code = _run_in(box, command, tty=tty, as_json=json, options=options)
    raise typer.Exit(code)


def shell(
    session: Annotated[
        str | None,
        typer.Argument(metavar="[SESSION]", help="A session's id, or its name.", show_default=False),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Instead of SESSION: a new session of it, which ends with the shell.")
    ] = None,
    run: asking.RunOption = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Open an interactive shell in a session."""
    if (session is None) == (image is None):
        raise Fail("give a SESSION, or --image for a new one")
    if not sys.stdin.isatty():
        raise Fail("a shell needs a terminal; use `shoal exec` to pipe commands")
    options = {"user": user}
    with asking.connected() as shoal:
        if session is not None:
            box = asking.find(shoal, session, run)
            code = _run_in(box, _SHELL, tty=True, as_json=False, options=options)
        else:
            with phases() as watch:
                box = shoal.session(image, run=run, steps=asking.step_prefix(), watch=watch)
            with box:
                code = _run_in(box, _SHELL, tty=True, as_json=False, options=options)
    raise typer.Exit(code)


def result_from(payload: dict[str, object]) -> ExecResult:
    """The result in a stream's last event.

    Raises:
        ServiceError: The platform lost the action.
    """
    from shoal.contract.actions import ActionRecord

    record = ActionRecord.model_validate(payload)
    if record.observation is None:
        if record.error is not None:
            raise from_detail(record.error)
        raise Fail(f"the action ended as {record.status}, without a result")
    result = result_of(record)
    if not isinstance(result, ExecResult):
        raise Fail("the action was not a command")
    return result
