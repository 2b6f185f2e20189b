"""What goes through the link, as the agent sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

DEFAULT_OUTPUT_LIMIT_BYTES = 1 << 20
MAX_OUTPUT_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class GuestHello:
    """How the guest introduced itself."""

    version: int
    """Of the protocol."""
    pid: int
    """The guest's pid in its own namespace: 1 in a sandbox."""
    shells: tuple[str, ...]
    """Of "bash" and "sh" what the default PATH of the image has now, best first."""
    greeted: int
    """How many agents the guest has met, this one included."""
    processes: int
    """How many processes it still keeps from before (see `GuestLink.processes`)."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to start. Exactly one of `argv` and `command`."""

    process_id: str
    """The caller's name for it, unique in the sandbox until forgotten; at most 256 bytes."""
    argv: tuple[str, ...] | None = None
    command: str | None = None
    """A command line, run by bash, or by sh where there is no bash."""
    shell_kind: str | None = None
    """Path or name of another shell to run `command`; None: bash, else sh."""
    cwd: str | None = None
    """None: `/`. A directory that is not there is a `SpawnError` of stage "cwd"."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Over the defaults PATH, HOME, USER, LOGNAME, LANG=C.UTF-8, TZ=UTC, TERM=dumb."""
    user: str | None = None
    """`name`, `uid`, `name:group` or `uid:gid` by the sandbox's own files; None: root (inside)."""
    stdin: bytes | Literal["empty", "open"] = "empty"
    """Bytes are fed in the background and then closed; "open": `GuestProcess.write_stdin`."""
    output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES
    """Per stream: head half and tail half are kept, the middle is counted."""
    login: bool = False
    """Run the shell of `command` as a login shell."""
    tty: tuple[int, int] | None = None
    """(rows, columns): a terminal; all output is then on stdout, and stdin is open unless it is bytes."""
    shell: str | None = None
    """Run `command` in the persistent shell of this name, started when needed. `cwd`, `env`, `user`,
    `login`, `shell_kind`, `open_files` count when the shell starts, not later. The shell itself joins
    the kill group of each command, so killing that ends the shell too."""
    open_files: int | None = None
    """RLIMIT_NOFILE; None: what the runtime set."""


@dataclass(frozen=True, kw_only=True)
class CodeSpec:
    """Code for a context. Fields as in `ProcessSpec`; `cwd`, `env`, `user`, `python` count when the
    context starts, not later."""

    process_id: str
    context: str
    """Its name."""
    code: str
    python: str | None = None
    """The interpreter; None: `python3` on the PATH."""
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | Literal["empty", "open"] = "empty"
    output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """How a process ended."""

    exit_code: int | None
    """None when a signal ended it."""
    signal: str | None
    """Its name without SIG, as "KILL"; None when the process exited."""
    duration_ms: float
    """From the fork to the leader's end, by the guest's monotonic clock."""
    cpu_ms: float | None
    """User and system time of the leader and of its children it waited for; None: not known."""
    max_rss_mib: float | None
    """Largest resident set among them, never below that of the guest (some 8 MiB), which a child
    is a copy of before it execs; None: not known."""
    shell_restarted: bool = False
    """The named shell was new although one of that name had run before: its state is lost."""
    shell_ended: bool = False
    """The command ended its named shell (`exit`, `exec`, a signal); the next one starts anew."""
    context_restarted: bool = False
    """As `shell_restarted`, for a code context."""
    context_ended: bool = False
    """As `shell_ended`, for a code context."""
