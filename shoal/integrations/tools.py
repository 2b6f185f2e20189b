"""A session as the tools of a language model: definitions for its prompt, and calls that answer text.

    tools = SessionTools(box)
    model.generate(messages, tools=tools.openai())            # or tools.anthropic()
    text = tools.call(call.name, call.arguments, step=call.id)

A tool's failure (a non-zero exit, a missing file, an edit without its match, bad arguments) is text for the model to
read. A failure of the platform is raised as ShoalError and never becomes text: it is not the model's doing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.client import building
from shoal.client.async_session import AsyncSession
from shoal.client.results import (
    EditResult,
    ExecResult,
    ListResult,
    ReadResult,
    Result,
    SearchResult,
    WriteResult,
)
from shoal.client.sync_session import Session
from shoal.contract import actions
from shoal.contract.base import Wire


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Bash(_Arguments):
    """Run a command in a shell that keeps its directory and variables between calls."""

    command: str = Field(description="The command line.")
    timeout_s: float = Field(default=120, gt=0, le=3600, description="Seconds until it is killed.")


class ReadFile(_Arguments):
    """Read a file, or some of its lines."""

    path: str = Field(description="Absolute, or relative to the working directory.")
    first_line: int = Field(default=1, ge=1, description="From which line on, counted from 1.")
    last_line: int = Field(default=-1, ge=-1, description="To which line, included; -1 is the end.")


class WriteFile(_Arguments):
    """Write a whole file, making directories as needed."""

    path: str = Field(description="Absolute, or relative to the working directory.")
    content: str = Field(description="All of its content.")


class EditFile(_Arguments):
    """Replace a text that occurs exactly once in a file."""

    path: str = Field(description="Absolute, or relative to the working directory.")
    old: str = Field(min_length=1, description="The exact text, with enough around it to be unique.")
    new: str = Field(description="What stands in its place.")


class ListFiles(_Arguments):
    """List a directory."""

    path: str = Field(default=".", description="Absolute, or relative to the working directory.")
    depth: int = Field(default=1, ge=1, le=10, description="How many levels down.")


class SearchFiles(_Arguments):
    """Search files for a regular expression."""

    pattern: str = Field(min_length=1, description="A Python regular expression, matched line by line.")
    path: str = Field(default=".", description="A file or a directory.")
    glob: str | None = Field(default=None, description="Only files of this name, such as *.py.")


@dataclass(frozen=True, kw_only=True)
class _Tool:
    name: str
    arguments: type[_Arguments]
    result: type[Result]

    def action(self, given: _Arguments, shell: str) -> tuple[Wire, type[Result]]:
        """What the session is asked."""
        fields: dict[str, Any]
        values: dict[str, Any]
        match given:
            case Bash():
                fields = {"command": given.command, "shell": shell, "timeout_s": given.timeout_s}
                return building.model(actions.Exec, {"type": "exec", **fields}), self.result
            case ReadFile():
                fields = {"path": given.path}
                if (given.first_line, given.last_line) != (1, -1):
                    fields["lines"] = (given.first_line, given.last_line)
                return building.model(actions.ReadFile, {"type": "read_file", **fields}), self.result
            case WriteFile():
                values = {"type": "write_file", "path": given.path, "content": given.content}
                return building.model(actions.WriteFile, values), self.result
            case EditFile():
                values = {"type": "edit_file", "path": given.path, "old": given.old, "new": given.new}
                return building.model(actions.EditFile, values), self.result
            case ListFiles():
                values = {"type": "list_files", "path": given.path, "depth": given.depth}
                return building.model(actions.ListFiles, values), self.result
            case SearchFiles():
                values = {"type": "search", "path": given.path, "pattern": given.pattern, "glob": given.glob}
                return building.model(actions.Search, building.given(values)), self.result
        raise TypeError(f"{type(given).__name__} is no tool")


_TOOLS = {
    tool.name: tool
    for tool in (
        _Tool(name="bash", arguments=Bash, result=ExecResult),
        _Tool(name="read_file", arguments=ReadFile, result=ReadResult),
        _Tool(name="write_file", arguments=WriteFile, result=WriteResult),
        _Tool(name="edit_file", arguments=EditFile, result=EditResult),
        _Tool(name="list_files", arguments=ListFiles, result=ListResult),
        _Tool(name="search", arguments=SearchFiles, result=SearchResult),
    )
}


class _BadCall(Exception):
    """What the model called does not exist or does not fit; the message is for it to read."""


class _Tools:
    def __init__(self, names: Sequence[str] | None, shell: str, limit: int) -> None:
        unknown = set(names or []) - set(_TOOLS)
        if unknown:
            raise ValueError(f"no such tool: {', '.join(sorted(unknown))}; there are {', '.join(_TOOLS)}")
        self._tools = {name: _TOOLS[name] for name in names or _TOOLS}
        self._shell = shell
        self._limit = limit

    def definitions(self) -> list[dict[str, Any]]:
        """Name, description and JSON Schema of the arguments, for each tool."""
        found = []
        for tool in self._tools.values():
            schema = tool.arguments.model_json_schema()
            for key in ("title", "description"):
                schema.pop(key, None)
            found.append(
                {"name": tool.name, "description": tool.arguments.__doc__ or "", "parameters": schema}
            )
        return found

    def openai(self) -> list[dict[str, Any]]:
        """The definitions in the form of OpenAI-like chat APIs."""
        return [{"type": "function", "function": one} for one in self.definitions()]

    def anthropic(self) -> list[dict[str, Any]]:
        """The definitions in the form of Anthropic's messages API."""
        return [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
            for one in self.definitions()
        ]

    def _asked(self, name: str, arguments: Mapping[str, Any] | str) -> tuple[Wire, type[Result]]:
        tool = self._tools.get(name)
        if tool is None:
            raise _BadCall(f"error: there is no tool {name!r}; there are {', '.join(self._tools)}")
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            given = tool.arguments.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
            )
            raise _BadCall(f"error: bad arguments for {name}: {problems}") from None
        except ValueError as error:
            raise _BadCall(f"error: the arguments of {name} are not JSON: {error}") from None
        return tool.action(given, self._shell)


class SessionTools(_Tools):
    """The tools of a session.

    Args:
        names: Which ones; None is all: bash, read_file, write_file, edit_file, list_files, search.
        shell: The name of the persistent shell behind `bash`.
        limit: Characters of one answer; head and tail are kept.
    """

    def __init__(
        self, box: Session, names: Sequence[str] | None = None, *, shell: str = "agent", limit: int = 16_000
    ) -> None:
        super().__init__(names, shell, limit)
        self._box = box

    def call(self, name: str, arguments: Mapping[str, Any] | str, *, step: str | None = None) -> str:
        """Runs a tool call; what the model reads.

        Args:
            arguments: A mapping, or JSON as the model wrote it.
            step: The step's id, such as the call's own id; None counts up.

        Raises:
            ShoalError: The platform failed.
        """
        try:
            action, kind = self._asked(name, arguments)
        except _BadCall as bad:
            return str(bad)
        result = self._box._run(self._box._core.do(action, {"step": step}, kind))
        return describe(result, self._limit)


class AsyncSessionTools(_Tools):
    """SessionTools for asyncio."""

    def __init__(
        self,
        box: AsyncSession,
        names: Sequence[str] | None = None,
        *,
        shell: str = "agent",
        limit: int = 16_000,
    ) -> None:
        super().__init__(names, shell, limit)
        self._box = box

    async def call(self, name: str, arguments: Mapping[str, Any] | str, *, step: str | None = None) -> str:
        """As SessionTools.call, awaited."""
        try:
            action, kind = self._asked(name, arguments)
        except _BadCall as bad:
            return str(bad)
        result = await self._box._run(self._box._core.do(action, {"step": step}, kind))
        return describe(result, self._limit)


def describe(result: Result, limit: int = 16_000) -> str:
    """A result as text for a model; at most `limit` characters, with what was left out told."""
    return _shortened(_text(result), limit)


def _text(result: Result) -> str:
    match result:
        case ReadResult(error=None):
            return result.content + ("\n[the file goes on]" if result.truncated else "")
        case WriteResult(error=None):
            return f"wrote {result.size_bytes} bytes"
        case EditResult(error=None, replacements=0):
            near = "\n".join(f"{line.line}: {line.text}" for line in result.near)
            hint = f"; lines that resemble it:\n{near}" if near else ""
            return (
                f"error: nothing was changed: the text occurs {result.found} times, it must occur once{hint}"
            )
        case EditResult(error=None):
            return result.diff or "changed"
        case ListResult(error=None):
            lines = [entry.path + ("/" if entry.kind == "directory" else "") for entry in result.entries]
            return "\n".join(lines) + ("\n[there are more]" if result.truncated else "") or "(empty)"
        case SearchResult(error=None):
            lines = [f"{match.path}:{match.line}: {match.text}" for match in result.matches]
            return "\n".join(lines) + ("\n[there are more]" if result.truncated else "") or "(no matches)"
        case ExecResult(error=None):
            return _command(result)
    error = getattr(result, "error", None)
    return f"error: {error.errno}: {error.message}" if error is not None else "error"


def _command(result: ExecResult) -> str:
    parts = [result.stdout.rstrip("\n")]
    if result.stderr.strip():
        parts.append(f"[stderr]\n{result.stderr.rstrip()}")
    if result.timed_out:
        parts.append(f"[timed out after {result.duration_ms / 1000:.0f} s and was killed]")
    elif result.oom_killed:
        parts.append("[ran out of memory and was killed]")
    elif result.exit_code != 0:
        ended = f"exit code {result.exit_code}" if result.exit_code is not None else f"signal {result.signal}"
        parts.append(f"[{ended}]")
    if result.truncated:
        parts.append("[the output was longer; its middle is left out]")
    return "\n".join(part for part in parts if part) or "(no output)"


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
