"""From fork to exec: what a child does before it becomes the program that was asked for."""

from __future__ import annotations

import fcntl
import os
import resource
from errno import EACCES, ENOENT, ENOEXEC, ENOTDIR
from struct import Struct

from .accounts import Account

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
    spec: dict[str, Any],
    account: Account,
    stdio: tuple[int, int, int],
    extra: dict[int, int],
    procs_fd: int | None,
) -> tuple[int, int]:
    """Fork; the child execs `spec` as `account` with `stdio` as 0, 1, 2 and `extra` in its places.

    What the child does before it execs is little, as each page it touches is copied first.

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
        _become(spec, account, stdio, extra, procs_fd, write_end)
    os.close(write_end)
    return pid, read_end


def read_failure(data: bytes) -> tuple[int, str, str]:
    """Errno, stage and message of a start that failed."""
    number, stage = _FAILURE.unpack_from(data)
    message = data[_FAILURE.size :].decode("utf-8", "replace")
    return number, stage.rstrip(b"\0").decode("ascii", "replace"), message


def _become(
    spec: dict[str, Any],
    account: Account,
    stdio: tuple[int, int, int],
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
        if spec.get("tty"):
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


# Ignored by Python for itself; what it handles exec sets back.
_IGNORED = (_signal.SIGPIPE, _signal.SIGXFSZ)


def _reset_signals() -> None:
    for number in _IGNORED:
        _signal.signal(number, _signal.SIG_DFL)


def _arrange(stdio: tuple[int, int, int], extra: dict[int, int], failure_fd: int) -> int:
    # Whatever is passed is above 2, as the guest's own three are always open.
    if extra:
        # Out of the way of the places first; these copies close on exec.
        low = max(extra) + 1
        stdio = (_copy(stdio[0], low), _copy(stdio[1], low), _copy(stdio[2], low))
        extra = {place: _copy(fd, low) for place, fd in extra.items()}
        failure_fd = _copy(failure_fd, low)
        for place, fd in extra.items():
            os.dup2(fd, place)
    os.dup2(stdio[0], 0)
    os.dup2(stdio[1], 1)
    os.dup2(stdio[2], 2)
    return failure_fd


def _copy(fd: int, low: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)


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
