"""Actions and observations: one step an agent takes in a session, and what the environment answers.

Bytes are bytes. A text field holds UTF-8; where bytes were not UTF-8 they are replaced and `<field>_lossy` is true.
`encoding: "base64"` on a request makes `content`, `stdout`, `stderr` exact.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shoal.contract.base import ActionId, Answer, Name, SessionId, Time, WaitSeconds, Wire
from shoal.contract.errors import ErrorDetail
from shoal.contract.sessions import EnvName, EnvValue
from shoal.contract.states import ActionStatus

#: Bytes of one output stream that are kept unless the action says otherwise.
DEFAULT_OUTPUT_LIMIT_BYTES = 1_048_576
MAX_OUTPUT_LIMIT_BYTES = 16_777_216
DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 86_400.0
#: Bytes of one action's JSON body; larger content goes by the files routes or `POST .../stdin`.
MAX_ACTION_BYTES = 80 * 1_048_576

Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
Encoding = Literal["utf-8", "base64"]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
OutputLimit = Annotated[int, Field(ge=0, le=MAX_OUTPUT_LIMIT_BYTES)]
Argument = Annotated[str, Field(max_length=1_048_576, pattern=r"^[^\x00]*$")]


class Tty(Wire):
    """The size of a terminal, in characters."""

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)


class _Process(Wire):
    cwd: Path | None = None
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, max_length=500)
    user: str | None = Field(default=None, min_length=1, max_length=64)
    timeout_s: Timeout = DEFAULT_TIMEOUT_S
    output_limit_bytes: OutputLimit = DEFAULT_OUTPUT_LIMIT_BYTES
    encoding: Encoding = "utf-8"


class Exec(_Process):
    """Run a command: a string by bash (sh where there is none), a list as it is.

    Attributes:
        stdin: What the command reads; None is empty. `stdin_encoding` says how it is written here.
        stdin_open: Keep stdin open after `stdin`, for `POST .../stdin`.
        background: Answer at once with status `running`; no default time-out applies.
        shell: The name of a persistent shell; cwd, variables and functions live on in it.
        login: Run the shell as a login shell.
        tty: Give the command a terminal; stdout and stderr are then one stream, in `stdout`.
    """

    type: Literal["exec"] = "exec"
    command: Argument | Annotated[list[Argument], Field(min_length=1, max_length=20_000)]
    stdin: str | None = None
    stdin_encoding: Encoding = "utf-8"
    stdin_open: bool = False
    background: bool = False
    shell: Name | None = None
    login: bool = False
    tty: Tty | None = None

    @model_validator(mode="after")
    def _shells_take_strings(self) -> Exec:
        if self.shell is not None and not isinstance(self.command, str):
            raise ValueError("a named shell runs a string, not an argument list")
        if self.shell is not None and (self.tty is not None or self.background or self.stdin_open):
            raise ValueError("a named shell takes no tty, background or stdin_open")
        if self.shell is not None and self.user is not None:
            raise ValueError("a named shell belongs to the session's user")
        return self


class File(Wire):
    """A file that code needs beside it; `path` is relative to the directory the code runs in, or absolute."""

    path: Path
    content: str
    encoding: Encoding = "utf-8"
    mode: int = Field(default=0o644, ge=0, le=0o7777)


class RunCode(_Process):
    """Run a program given as text. With `context`, Python state lives on between calls of that name."""

    type: Literal["run_code"] = "run_code"
    language: Literal["python", "bash", "sh", "c", "c++"] = "python"
    code: str
    files: list[File] = Field(default_factory=list, max_length=1000)
    args: list[Argument] = Field(default_factory=list, max_length=10_000)
    stdin: str | None = None
    stdin_encoding: Encoding = "utf-8"
    context: Name | None = None

    @model_validator(mode="after")
    def _contexts_are_python(self) -> RunCode:
        if self.context is not None and (self.language != "python" or self.args or self.stdin is not None):
            raise ValueError("`context` is for python, without `args` and `stdin`")
        return self


class ReadFile(Wire):
    """Read a file, or a part of it: by bytes with `offset` and `limit`, or by lines with `lines` = [first, last]
    (from 1, both included; -1 is the end)."""

    type: Literal["read_file"] = "read_file"
    path: Path
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=1_048_576, ge=0, le=16_777_216)
    lines: tuple[int, int] | None = None
    encoding: Encoding = "utf-8"


class WriteFile(Wire):
    """Write a whole file: aside, then renamed. `mode` None keeps that of the file there is, else 0644."""

    type: Literal["write_file"] = "write_file"
    path: Path
    content: str
    encoding: Encoding = "utf-8"
    mode: int | None = Field(default=None, ge=0, le=0o7777)
    create_parents: bool = True


class EditFile(Wire):
    """Replace `old` by `new`, if `old` occurs exactly `occurrences` times; else nothing is written."""

    type: Literal["edit_file"] = "edit_file"
    path: Path
    old: str = Field(min_length=1)
    new: str
    occurrences: int = Field(default=1, ge=1)


class ListFiles(Wire):
    """List a directory: `depth` 1 is its entries alone. `glob` matches names, or paths where it has a slash."""

    type: Literal["list_files"] = "list_files"
    path: Path
    depth: int = Field(default=1, ge=1, le=100)
    glob: str | None = Field(default=None, max_length=1000)
    max_entries: int = Field(default=10_000, ge=1, le=100_000)


class Search(Wire):
    """Search files for a regular expression (Python's `re`), line by line."""

    type: Literal["search"] = "search"
    path: Path
    pattern: str = Field(min_length=1, max_length=10_000)
    glob: str | None = Field(default=None, max_length=1000)
    max_results: int = Field(default=200, ge=1, le=10_000)
    timeout_s: Timeout = 30.0


class Diff(Wire):
    """What changed on the disk since the session's start or since a snapshot of it."""

    type: Literal["diff"] = "diff"
    since: str = Field(default="start", max_length=200)


class Http(Wire):
    """A request to a port inside the sandbox."""

    type: Literal["http"] = "http"
    port: int = Field(ge=1, le=65535)
    method: str = Field(default="GET", pattern=r"^[A-Z]{1,16}$")
    path: str = Field(default="/", pattern=r"^/")
    headers: dict[str, str] = Field(default_factory=dict)
    body: str | None = None
    encoding: Encoding = "utf-8"
    timeout_s: Timeout = 30.0


Action = Annotated[
    Exec | RunCode | ReadFile | WriteFile | EditFile | ListFiles | Search | Diff | Http,
    Field(discriminator="type"),
]


class ActionRequest(Wire):
    """`POST .../actions` with one action, or with a list of them.

    Attributes:
        id: The caller's own id of the step: the same id never runs twice. None lets the service choose one.
            The items of a list are `<id>.0`, `<id>.1`, ...
        epoch: The incarnation the caller believes in; another one answers `epoch_mismatch`.
        parallel: Do not wait for the actions before it.
        keep_going: For a list: go on after a failure.
        wait_s: Seconds to wait for the end; an action still running then answers 202.
    """

    id: ActionId | None = None
    epoch: int | None = Field(default=None, ge=1)
    action: Action | None = None
    actions: list[Action] | None = Field(default=None, min_length=1, max_length=1000)
    keep_going: bool = False
    parallel: bool = False
    wait_s: WaitSeconds = 25.0

    @model_validator(mode="after")
    def _one_kind(self) -> ActionRequest:
        if (self.action is None) == (self.actions is None):
            raise ValueError("give exactly one of `action` and `actions`")
        return self


class FileError(Answer):
    """A file operation that the sandbox's system refused, such as ENOENT: an observation, not an error."""

    errno: str
    message: str


class _Observation(Answer):
    error: FileError | None = None

    @property
    def failed(self) -> bool:
        """Whether a list of actions stops here."""
        return self.error is not None


class ExecObservation(_Observation):
    """How a command ended. `exit_code` is None when a signal ended it (`signal` without SIG). `error` is set when the
    command could not be started. Sizes count all that was printed, also what was dropped from the middle."""

    type: Literal["exec"] = "exec"
    exit_code: int | None = None
    signal: str | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_lossy: bool = False
    stderr_lossy: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    truncated: bool = False
    encoding: Encoding = "utf-8"
    timed_out: bool = False
    killed: bool = False
    oom_killed: bool = False
    shell_restarted: bool = False
    duration_ms: float = 0.0
    cpu_ms: float = 0.0
    peak_memory_mib: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a list of actions stops here."""
        return self.error is not None or self.exit_code != 0


class CompileStep(Answer):
    """How the compiler ended; `output` is its standard error."""

    exit_code: int | None
    output: str
    duration_ms: float


class RunCodeObservation(ExecObservation):
    """As exec. `result` is the last expression of a context's cell: its JSON value where it has one, else its repr
    (`result_repr` has the repr in any case)."""

    type: Literal["run_code"] = "run_code"  # type: ignore[assignment]
    compile: CompileStep | None = None
    result: Any = None
    result_repr: str | None = None
    context_restarted: bool = False


class ReadFileObservation(_Observation):
    """`content` from `offset`; `size_bytes` is the whole file's; `truncated` when there is more after it."""

    type: Literal["read_file"] = "read_file"
    content: str = ""
    content_lossy: bool = False
    encoding: Encoding = "utf-8"
    size_bytes: int = 0
    truncated: bool = False
    total_lines: int | None = None
    mode: int = 0
    mtime: Time | None = None


class WriteFileObservation(_Observation):
    """What was written; `sha256` in hex."""

    type: Literal["write_file"] = "write_file"
    size_bytes: int = 0
    sha256: str = ""


class NearLine(Answer):
    """A line that resembles what was looked for; `line` counts from 1."""

    line: int
    text: str


class EditFileObservation(_Observation):
    """`replacements` is 0 when nothing was written: `found` then tells how often `old` occurs and `near` which lines
    resemble it, so that a model can correct itself."""

    type: Literal["edit_file"] = "edit_file"
    replacements: int = 0
    diff: str = ""
    found: int = 0
    near: list[NearLine] = Field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a list of actions stops here."""
        return self.error is not None or self.replacements == 0


class FileEntry(Answer):
    """One entry of a directory; `path` is relative to the directory listed."""

    path: str
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "device"]
    size_bytes: int
    mode: int
    mtime: Time
    link_target: str | None = None


class ListFilesObservation(_Observation):
    """Entries sorted by path."""

    type: Literal["list_files"] = "list_files"
    entries: list[FileEntry] = Field(default_factory=list)
    truncated: bool = False


class Match(Answer):
    """One matching line, at most 1,000 characters of it."""

    path: str
    line: int
    text: str


class SearchObservation(_Observation):
    """Matches in order of path and line."""

    type: Literal["search"] = "search"
    matches: list[Match] = Field(default_factory=list)
    truncated: bool = False
    timed_out: bool = False


class DiffObservation(_Observation):
    """Paths from the writable layer, sorted."""

    type: Literal["diff"] = "diff"
    added: list[str] = Field(default_factory=list)
    changed: list[str] = Field(default_factory=list)
    removed: list[str] = Field(default_factory=list)
    truncated: bool = False


class HttpObservation(_Observation):
    """What the server inside answered."""

    type: Literal["http"] = "http"
    status: int = 0
    headers: dict[str, str] = Field(default_factory=dict)
    body: str = ""
    body_lossy: bool = False
    encoding: Encoding = "utf-8"
    truncated: bool = False


Observation = Annotated[
    ExecObservation
    | RunCodeObservation
    | ReadFileObservation
    | WriteFileObservation
    | EditFileObservation
    | ListFilesObservation
    | SearchObservation
    | DiffObservation
    | HttpObservation,
    Field(discriminator="type"),
]


class ActionRecord(Answer):
    """A step and what is known of it. `seq` orders the steps of a session from 1; it is never used again. `error` is
    set instead of an observation when the platform failed (`status: "unknown"`), never when the command did.
    `stdout_offset`, `stderr_offset`: while running, where to ask on; `observation` then has what was printed so far."""

    id: str
    session: SessionId | None = None
    seq: int | None = None
    epoch: int
    status: ActionStatus
    action: Action
    observation: Observation | None = None
    error: ErrorDetail | None = None
    started_at: Time | None = None
    finished_at: Time | None = None
    replayed: bool = False
    stdout_offset: int | None = None
    stderr_offset: int | None = None


class ActionList(Answer):
    """What a list of actions answers: the steps made, in order; `skipped` of them did not run after a failure."""

    id: str
    status: ActionStatus
    actions: list[ActionRecord]
    skipped: int = 0


class ActionsWait(Wire):
    """`POST /v1/actions:wait`: one poll for many steps."""

    ids: list[tuple[SessionId, str]] = Field(min_length=1, max_length=10_000)
    mode: Literal["any", "all"] = "any"
    wait_s: WaitSeconds = 25.0


class WaitItem(Answer):
    """Where one of the steps waited for is; `error` when its session cannot tell."""

    session: SessionId
    action: str
    status: ActionStatus | None = None
    error: ErrorDetail | None = None


class ActionsWaited(Answer):
    """Every id asked for, in the order asked; `satisfied` tells whether `mode` was reached in time."""

    satisfied: bool
    items: list[WaitItem]


class StdinWrite(Wire):
    """`POST .../actions/{id}/stdin`."""

    data: str = ""
    encoding: Encoding = "utf-8"
    close: bool = False


class TtyResize(Tty):
    """`POST .../actions/{id}/resize`."""
