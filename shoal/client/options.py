"""Keyword options of the SDK's methods, as typed dictionaries: one definition for both twins.

What None and leaving out mean is the contract's: the service's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from shoal.contract.actions import Encoding, File
from shoal.contract.sessions import Network, Resources, ResourcesAsked

NetworkLike = Network | Sequence[str] | Literal["none"]
ResourcesLike = Resources | ResourcesAsked | Mapping[str, int]


class CreateOptions(TypedDict, total=False):
    """Options of a new session.

    Attributes:
        run: The training or evaluation job it belongs to.
        resources: Hard limits, such as `{"cpu_millis": 500, "memory_mib": 512}`.
        network: "none", or the list of what it may reach.
        on_start: Shell commands run after the start and after every restore, before the first action.
        ttl_s: Seconds from creation to the session's end.
        idle_pause_s: Seconds without activity until it pauses; None never.
        idle_timeout_s: Seconds without activity until it ends; None never.
        on_host_loss: Whether to end (`fail`) or to go on from the last snapshot (`restore`).
        snapshot_every: Seconds between automatic snapshots; None takes none.
        queue: Whether to wait for capacity; False raises `NoCapacity` instead.
    """

    run: str | None
    substrate: str
    pool: str | None
    labels: Mapping[str, str]
    resources: ResourcesLike
    env: Mapping[str, str]
    workdir: str | None
    user: str | None
    on_start: Sequence[str]
    network: NetworkLike
    ttl_s: int
    idle_pause_s: int | None
    idle_timeout_s: int | None
    on_host_loss: Literal["fail", "restore"]
    snapshot_every: int | None
    durability: Literal["host", "remote"]
    queue: bool


class StepOptions(TypedDict, total=False):
    """Options of any action.

    Attributes:
        step: The step's own id; without it the handle counts (see shoal.client.steps).
        epoch: The incarnation you believe in; another one raises `EpochMismatch`.
        parallel: Do not wait for the session's actions before it.
        wait_timeout_s: Seconds until `WaitTimeout` when there is no result; the action goes on. None waits on.
    """

    step: str | None
    epoch: int | None
    parallel: bool
    wait_timeout_s: float | None


class ProcessOptions(StepOptions, total=False):
    """Options of what runs as a process.

    Attributes:
        cwd: Relative to the session's workdir.
        env: Added to the session's environment.
        user: Another user than the session's.
        stdin: What it reads; None is empty. Bytes arrive exactly.
        timeout_s: Seconds of its life (120 by default); then its whole process tree is killed.
        output_limit_bytes: Bytes kept of each stream, head and tail.
        encoding: "base64" makes `stdout_raw` and `stderr_raw` exact where the output is not UTF-8.
    """

    cwd: str | None
    env: Mapping[str, str]
    user: str | None
    stdin: str | bytes | None
    timeout_s: float
    output_limit_bytes: int
    encoding: Encoding


class ExecOptions(ProcessOptions, total=False):
    """Options of a command.

    Attributes:
        shell: The name of a persistent shell: cwd, variables and functions live on in it.
        login: Run the shell as a login shell.
    """

    shell: str | None
    login: bool


class CodeOptions(ProcessOptions, total=False):
    """Options of a program given as text.

    Attributes:
        files: Files beside it: `{"data.txt": "..."}` or contract `File`s.
        args: Its arguments.
        context: The name of a Python interpreter whose state lives on between calls.
    """

    language: Literal["python", "bash", "sh", "c", "c++"]
    files: Mapping[str, str | bytes] | Sequence[File]
    args: Sequence[str]
    context: str | None


class ExecuteOptions(TypedDict, total=False):
    """Options of one stateless call (`POST /v1/execute`).

    Attributes:
        id: Makes it run once: the same id joins it, or gives its result again.
        output_files: Paths whose content comes back with the result.
        wait_timeout_s: Seconds until `WaitTimeout`; None waits on.
    """

    id: str | None
    files: Mapping[str, str | bytes] | Sequence[File]
    args: Sequence[str]
    stdin: str | bytes | None
    env: Mapping[str, str]
    resources: ResourcesLike
    network: NetworkLike
    substrate: str
    pool: str | None
    run: str | None
    timeout_s: float
    output_limit_bytes: int
    encoding: Encoding
    output_files: Sequence[str]
    wait_timeout_s: float | None
