"""From fork to exec: what a child does before it becomes the program that was asked for."""

from __future__ import annotations

import fcntl
import os
import resource
from errno import EACCES, ENOENT, ENOEXEC, ENOTDIR
from struct import Struct

from .accounts import Account, find_account

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from typing import Any, NoReturn
else:
    import _signal

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The longest single string execve takes (MAX_ARG_STRLEN of Linux, 32 pages), its NUL included.
ARG_STRLEN = 131072
_SHELLS = ("bash", "sh")
_TIOCSCTTY = 0x540E
_FAILURE = Struct("<i16s")


class Stage:
    """Where a start failed; sent to the agent beside the errno."""

    GROUP = "group"
    LIMITS = "limits"
    USER = "user"
    CWD = "cwd"
    COMMAND = "command"


def fork_child(
    spec: dict[str, Any], stdio: tuple[int, int, int], tty: bool, extra: dict[int, int], procs_fd: int | None
) -> tuple[int, int]:
    """Fork; the child execs `spec` with `stdio` as 0, 1, 2 and `extra` in its places.

    Returns:
        The child's pid, and a pipe that reads empty once it has become the program, or what
        `read_failure` understands.

    Raises:
        OSError: no process could be made (EAGAIN at the pids limit, ENOMEM, EMFILE).
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:
        _become(spec, stdio, tty, extra, procs_fd, write_end)
    os.close(write_end)
    return pid, read_end


def read_failure(data: bytes) -> tuple[int, str, str]:
    """Errno, stage and message of a start that failed."""
    number, stage = _FAILURE.unpack_from(data)
    message = data[_FAILURE.size :].decode("utf-8", "replace")
    return number, stage.rstrip(b"\0").decode("ascii", "replace"), message


def _become(
    spec: dict[str, Any],
    stdio: tuple[int, int, int],
    tty: bool,
    extra: dict[int, int],
    procs_fd: int | None,
    failure_fd: int,
) -> NoReturn:
    stage = Stage.GROUP
    try:
        os.setsid()
        enter_group(procs_fd)
        stage = Stage.LIMITS
        _reset_signals()
        failure_fd = _arrange(stdio, extra, failure_fd)
        os.umask(0o022)
        die_first()
        _limit(spec.get("open_files"))
        stage = Stage.USER
        account = find_account(spec.get("user"))
        if tty:
            fcntl.ioctl(0, _TIOCSCTTY, 0)
            os.fchown(0, account.uid, -1)
        become_user(account)
        env = environment(spec.get("env") or {}, account)
        stage = Stage.CWD
        os.chdir(spec.get("cwd") or "/")
        stage = Stage.COMMAND
        argv = command_argv(spec, env)
        _exec(argv, env)
    except OSError as err:
        number, text = err.errno or 0, err.strerror or str(err)
        if err.filename is not None:
            text = f"{text}: {os.fsdecode(err.filename)}"
    except BaseException as err:  # noqa: BLE001 - a forked child never returns
        number, text = 0, repr(err)
    try:
        head = _FAILURE.pack(number, stage.encode())
        os.write(failure_fd, head + text.encode("utf-8", "replace")[:2048])
    finally:
        os._exit(127)


def enter_group(procs_fd: int | None) -> None:
    """Join the kill group, so that one write of the agent's ends this process and all it starts."""
    if procs_fd is not None:
        os.write(procs_fd, b"0")


def die_first() -> None:
    """When the sandbox is out of memory the kernel shall take its processes, never the guest."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"1000")
    finally:
        os.close(fd)


def become_user(account: Account) -> None:
    """Take on the account's ids, for good."""
    os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)


def environment(given: dict[str, str], account: Account) -> dict[str, str]:
    """`given`, over what every process has."""
    return {
        "PATH": DEFAULT_PATH,
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        **given,
    }


def command_argv(spec: dict[str, Any], env: dict[str, str]) -> list[str | bytes]:
    """The argument list: as given, or a shell with the command string."""
    argv = spec.get("argv")
    if argv is not None:
        return list(argv)
    command: str | bytes = spec["command"]
    raw = command.encode("utf-8", "surrogateescape") if isinstance(command, str) else command
    if b"\0" in raw:
        raise OSError(22, "the command has a NUL byte in it")
    shell = spec.get("shell_kind") or find_shell(env["PATH"])
    login = ["-l"] if spec.get("login") else []
    if len(raw) < ARG_STRLEN:
        return [shell, *login, "-c", raw]
    # Too long for one argument: the shell reads it as a script from memory.
    fd = os.memfd_create("command", 0)
    raw = f"exec {fd}<&-\n".encode() + raw
    while raw:
        raw = raw[os.write(fd, raw) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return [shell, *login, f"/proc/self/fd/{fd}"]


def find_shell(path: str) -> str:
    """bash when the PATH has it, else sh.

    Raises:
        OSError: ENOENT, the image has neither.
    """
    for name in _SHELLS:
        for directory in path.split(":"):
            file = f"{directory or '.'}/{name}"
            if os.access(file, os.X_OK):
                return file
    raise OSError(ENOENT, "the image has no shell: give the command as a list")


def _reset_signals() -> None:
    _signal.set_wakeup_fd(-1)
    for number in _signal.valid_signals():
        if number not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _arrange(stdio: tuple[int, int, int], extra: dict[int, int], failure_fd: int) -> int:
    wanted = {0: stdio[0], 1: stdio[1], 2: stdio[2], **extra}
    # First out of the way of each other, then to their places; the copies close on exec.
    low = max(wanted) + 1
    copies = {place: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low) for place, fd in wanted.items()}
    failure_fd = fcntl.fcntl(failure_fd, fcntl.F_DUPFD_CLOEXEC, low)
    for place, fd in copies.items():
        os.dup2(fd, place)
    return failure_fd


def _limit(open_files: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if open_files is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        bound = open_files if hard == resource.RLIM_INFINITY else min(open_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (bound, bound))


def _exec(argv: list[str | bytes], env: dict[str, str]) -> NoReturn:
    if not argv or not argv[0]:
        raise OSError(ENOENT, "no command")
    program = os.fsencode(argv[0])
    if b"/" in program:
        paths = [program]
    else:
        # execvp's order and its choice of error: "not allowed" says more than "not there".
        path = os.fsencode(env["PATH"])
        paths = [(directory or b".") + b"/" + program for directory in path.split(b":")]
    failure: OSError | None = None
    for path in paths:
        try:
            os.execve(path, argv, env)
        except OSError as err:
            if err.errno == ENOEXEC:
                os.execve(b"/bin/sh", [b"/bin/sh", path, *argv[1:]], env)
            if err.errno not in (ENOENT, ENOTDIR) and (failure is None or err.errno != EACCES):
                failure = err
            if err.errno not in (ENOENT, ENOTDIR, EACCES):
                break
    if failure is None:
        raise OSError(ENOENT, "no such command", program.decode("utf-8", "replace"))
    raise failure
