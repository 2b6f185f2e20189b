"""What is kept of large steps once a session's journal is full: enough to tell what was done, not every byte of it."""

from __future__ import annotations

from shoal.contract.actions import (
    Action,
    EditFile,
    Exec,
    ExecObservation,
    Observation,
    ReadFileObservation,
    RunCode,
    WriteFile,
)

#: How large a session's journal may get with every output in full, bytes on the disk.
JOURNAL_LIMIT_BYTES = 1 << 30
#: Records up to this size are kept as they are, also then.
SMALL_BYTES = 16_384
_KEPT_CHARS = 1024


def shrink_action(action: Action) -> Action:
    """The action with its long texts cut."""
    if isinstance(action, Exec | RunCode):
        changes: dict[str, object] = {"stdin": _head(action.stdin)}
        if isinstance(action, RunCode):
            changes |= {"code": _head(action.code), "files": []}
        elif isinstance(action.command, str):
            changes["command"] = _head(action.command)
        else:
            changes["command"] = [_head(argument) for argument in action.command[:64]]
        return action.model_copy(update=changes)
    if isinstance(action, WriteFile):
        return action.model_copy(update={"content": _head(action.content)})
    if isinstance(action, EditFile):
        return action.model_copy(update={"old": _head(action.old), "new": _head(action.new)})
    return action


def shrink_observation(observation: Observation) -> Observation:
    """The observation with its long texts cut: what is dropped counts as dropped by the output's cap."""
    if isinstance(observation, ExecObservation):
        stdout, stderr = _head(observation.stdout), _head(observation.stderr)
        assert stdout is not None
        assert stderr is not None
        return observation.model_copy(
            update={
                "stdout": stdout,
                "stderr": stderr,
                "stdout_dropped_bytes": max(0, observation.stdout_bytes - len(stdout.encode())),
                "stderr_dropped_bytes": max(0, observation.stderr_bytes - len(stderr.encode())),
                "truncated": True,
            }
        )
    if isinstance(observation, ReadFileObservation):
        return observation.model_copy(update={"content": _head(observation.content), "truncated": True})
    return observation


def _head(text: str | None) -> str | None:
    # A multiple of four, so that base64 stays base64.
    return text if text is None else text[:_KEPT_CHARS]
