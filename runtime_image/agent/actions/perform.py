"""From an action to the code that performs it."""

from __future__ import annotations

from collections.abc import Callable

from runtime_image.agent.actions.code import run_code
from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.diff import run_diff
from runtime_image.agent.actions.files import edit_file, list_files, read_file, search, write_file
from runtime_image.agent.actions.processes import fill, finish, process_id, run_exec, timeout_of
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.link import GuestProcess
from shoal.contract.actions import (
    Action,
    Diff,
    EditFile,
    Exec,
    ExecObservation,
    Http,
    ListFiles,
    Observation,
    ReadFile,
    RunCode,
    RunCodeObservation,
    Search,
    WriteFile,
)
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.text import to_bytes


def check_action(action: Action) -> None:
    """Refuse what can be refused before a step is taken.

    Raises:
        ShoalError: `not_implemented` for what the contract names and this version does not do; `invalid_request` for
            a text that says it is base64 and is not.
    """
    if isinstance(action, Exec | RunCode):
        if action.stdin is not None and action.stdin_encoding == "base64":
            _check_base64("stdin", action.stdin)
        if isinstance(action, RunCode):
            for n, file in enumerate(action.files):
                if file.encoding == "base64":
                    _check_base64(f"files.{n}.content", file.content)
    elif isinstance(action, WriteFile):
        if action.encoding == "base64":
            _check_base64("content", action.content)
    elif isinstance(action, Http):
        raise ShoalError(ErrorCode.NOT_IMPLEMENTED, "The action `http` is not implemented in this version.")


def _check_base64(field: str, text: str) -> None:
    try:
        to_bytes(text, "base64")
    except ValueError:
        raise invalid(f"action.{field}", "is not base64") from None


async def perform(bench: Bench, run: ActionRun, started: Callable[[], None]) -> Observation:
    """Perform a step in its sandbox.

    Raises:
        LinkClosedError, SandboxGone: The sandbox went away; how far the step got is not known.
        ShoalError: The platform refuses or fails, in words for the caller.
    """
    action = run.action
    if isinstance(action, Exec):
        return await run_exec(bench, run, action, started)
    if isinstance(action, RunCode):
        return await run_code(bench, run, action)
    if isinstance(action, ReadFile):
        return await read_file(bench, run, action)
    if isinstance(action, WriteFile):
        return await write_file(bench, run, action)
    if isinstance(action, EditFile):
        return await edit_file(bench, run, action)
    if isinstance(action, ListFiles):
        return await list_files(bench, run, action)
    if isinstance(action, Search):
        return await search(bench, run, action)
    if isinstance(action, Diff):
        return await run_diff(bench, action)
    check_action(action)
    raise AssertionError(action.type)


async def resume(bench: Bench, run: ActionRun, process: GuestProcess, age_s: float) -> Observation:
    """Go on with a step whose process was found in the guest by a new agent: `exec`, and the program of `run_code`."""
    action = run.action
    assert run.entry is not None
    run.group = bench.group(process_id(run.entry.seq))
    run.attach(process)
    limit = timeout_of(action) if isinstance(action, Exec) else getattr(action, "timeout_s", None)
    left = None if limit is None else max(0.0, limit - age_s)
    ended = await finish(bench, run, process, timeout_s=left, ooms_before=bench.oom_kills())
    if isinstance(action, RunCode):
        return fill(RunCodeObservation(), ended, action.encoding)
    encoding = action.encoding if isinstance(action, Exec) else "utf-8"
    return fill(ExecObservation(), ended, encoding)
