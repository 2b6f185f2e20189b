"""What actions give back: the contract's observations, with the record they came in."""

from __future__ import annotations

import base64
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from shoal.client.errors import ActionFailed
from shoal.contract import actions
from shoal.contract.actions import ActionRecord

R = TypeVar("R", bound="Result")


class Result(BaseModel):
    """What every result has beside its observation's fields."""

    # Results are made from observations that are validated already: their own validators are hardly ever needed.
    model_config = ConfigDict(defer_build=True)

    _record: ActionRecord | None = PrivateAttr(default=None)

    @property
    def record(self) -> ActionRecord:
        """The step as the session's trajectory has it: id, seq, epoch, times, whether it was replayed."""
        if self._record is None:
            raise AttributeError("this result was not made by an action")
        return self._record

    @property
    def replayed(self) -> bool:
        """Whether this is the answer of an earlier run of the same step."""
        return self._record is not None and self._record.replayed

    def _failure(self) -> str | None:
        error = getattr(self, "error", None)
        return None if error is None else f"{error.errno}: {error.message}"

    @property
    def ok(self) -> bool:
        """Whether it did what it was asked for."""
        return self._failure() is None

    def check(self: R) -> R:
        """This result.

        Raises:
            ActionFailed: It failed: a non-zero exit, a signal, a time-out, a file error, an edit without its match.
        """
        failure = self._failure()
        if failure is not None:
            raise ActionFailed(failure, self)
        return self


def _bytes(text: str, encoding: str) -> bytes:
    return base64.b64decode(text) if encoding == "base64" else text.encode("utf-8", "surrogatepass")


class ExecResult(Result, actions.ExecObservation):
    """How a command ended."""

    @property
    def stdout_raw(self) -> bytes:
        """Standard output as bytes: exact with `encoding="base64"`, else where `stdout_lossy` is false."""
        return _bytes(self.stdout, self.encoding)

    @property
    def stderr_raw(self) -> bytes:
        """Standard error as bytes: exact with `encoding="base64"`, else where `stderr_lossy` is false."""
        return _bytes(self.stderr, self.encoding)

    def _failure(self) -> str | None:
        if self.error is not None:
            return f"{self.error.errno}: {self.error.message}"
        if self.exit_code == 0:
            return None
        tail = self.stderr[-2000:] or self.stdout[-2000:]
        if self.timed_out:
            head = f"timed out after {self.duration_ms / 1000:.1f} s"
        elif self.oom_killed:
            head = "ran out of memory"
        elif self.exit_code is None:
            head = f"ended by signal {self.signal}"
        else:
            head = f"exit code {self.exit_code}"
        return f"{head}\n{tail}" if tail and self.encoding == "utf-8" else head


class CodeResult(ExecResult, actions.RunCodeObservation):
    """How a program ended; `result` is the last expression of a context's cell."""


class ReadResult(Result, actions.ReadFileObservation):
    """A file's content, or a part of it."""

    @property
    def content_raw(self) -> bytes:
        """The content as bytes: exact with `encoding="base64"`, else where `content_lossy` is false."""
        return _bytes(self.content, self.encoding)


class WriteResult(Result, actions.WriteFileObservation):
    """What was written."""


class EditResult(Result, actions.EditFileObservation):
    """What was replaced, or why nothing was."""

    def _failure(self) -> str | None:
        if self.error is not None:
            return f"{self.error.errno}: {self.error.message}"
        return None if self.replacements else f"nothing replaced: the text occurs {self.found} times"


class ListResult(Result, actions.ListFilesObservation):
    """A directory's entries."""


class SearchResult(Result, actions.SearchObservation):
    """Matching lines."""


class DiffResult(Result, actions.DiffObservation):
    """Paths that changed."""


class HttpResult(Result, actions.HttpObservation):
    """What a server inside answered."""


_RESULTS: dict[type[BaseModel], type[Result]] = {
    actions.ExecObservation: ExecResult,
    actions.RunCodeObservation: CodeResult,
    actions.ReadFileObservation: ReadResult,
    actions.WriteFileObservation: WriteResult,
    actions.EditFileObservation: EditResult,
    actions.ListFilesObservation: ListResult,
    actions.SearchObservation: SearchResult,
    actions.DiffObservation: DiffResult,
    actions.HttpObservation: HttpResult,
}


def result_of(record: ActionRecord) -> Result:
    """The result in a record that has an observation.

    Raises:
        ValueError: The record has none.
    """
    if record.observation is None:
        raise ValueError(f"action {record.id} has no observation ({record.status})")
    kind = _RESULTS[type(record.observation)]
    values: dict[str, Any] = dict(record.observation)
    result = kind.model_construct(record.observation.model_fields_set, **values)
    result._record = record
    return result
