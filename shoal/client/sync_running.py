"""What goes on in a session, for threads: background commands, persistent shells and interpreters.

The twin is shoal.client.async_running; a test holds them alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import httpx

from shoal.client import building
from shoal.client.effects import Reply, TransportFailed
from shoal.client.errors import ConnectionFailed, ServiceError
from shoal.client.options import CodeOptions, ExecOptions
from shoal.client.results import CodeResult, ExecResult
from shoal.client.retry import Patience, error_of
from shoal.client.sse import EventParser, StreamEvent, stream_request
from shoal.contract.actions import ActionRecord, StdinWrite, TtyResize
from shoal.contract.errors import ErrorCode
from shoal.contract.states import ActionStatus

if TYPE_CHECKING:
    from shoal.client.sync_session import Session


class Running:
    """A command that runs in the background of a session; survives pickling."""

    def __init__(self, box: Session, record: ActionRecord) -> None:
        self._box = box
        self._record = record

    @property
    def id(self) -> str:
        """The action's id."""
        return self._record.id

    @property
    def session_id(self) -> str:
        """The session it runs in."""
        return self._box.id

    def poll(self) -> ExecResult | None:
        """Its result; None while it runs."""
        self._record = self._box._run(self._box._core.read_action(self.id))
        if self._record.status in {ActionStatus.QUEUED, ActionStatus.RUNNING}:
            return None
        return self.wait()

    def wait(self, timeout_s: float | None = None) -> ExecResult:
        """Its result, when it has ended.

        Raises:
            WaitTimeout: `timeout_s` passed; it goes on.
            ActionOutcomeUnknown: Its host crashed while it ran.
        """
        self._record = self._box._run(self._box._core.until_done(self._record, timeout_s=timeout_s))
        return self._box._core.result(self._record, ExecResult)

    def output(self, stdout_offset: int = 0, stderr_offset: int = 0) -> ActionRecord:
        """What it printed so far, from the offsets on; the record says where to ask on."""
        offsets = (stdout_offset, stderr_offset)
        return self._box._run(self._box._core.read_action(self.id, offsets=offsets))

    def kill(self) -> None:
        """Ends its whole process tree."""
        self._box._run(self._box._core.kill(self.id))

    def write(self, data: str | bytes, *, close: bool = False) -> None:
        """Writes to its stdin (it must have been started with `stdin_open=True`). Not repeated when it may have
        arrived: a lost answer raises `ConnectionFailed`."""
        text, encoding = building.text(data)
        asked = building.model(StdinWrite, {"data": text, "encoding": encoding, "close": close})
        self._box._run(self._box._core.post(self.id, "stdin", asked, repeatable=False))

    def close_stdin(self) -> None:
        """Closes its stdin."""
        asked = building.model(StdinWrite, {"close": True})
        self._box._run(self._box._core.post(self.id, "stdin", asked, repeatable=True))

    def resize(self, rows: int, cols: int) -> None:
        """Says how large its terminal is, in characters."""
        asked = building.model(TtyResize, {"rows": rows, "cols": cols})
        self._box._run(self._box._core.post(self.id, "resize", asked, repeatable=True))

    def stream(self, last_id: str | None = None) -> Iterator[StreamEvent]:
        """Its output as it comes, to the `exit` event. A lost connection is taken up again where it broke off.

        Output that is not UTF-8 is exact when it was started with `encoding="base64"`; else only while it runs.
        """
        core, pool = self._box._core, self._box._shoal._pool
        patience = Patience(core.client.context, None)
        while True:
            parser = EventParser()
            failure: ServiceError
            try:
                with pool.stream(stream_request(core, self.id, last_id)) as response:
                    refusal: ServiceError | None = None
                    if response.status_code >= 400:
                        refusal = error_of(_whole(response))
                    if refusal is None:
                        for chunk in response.iter_bytes():
                            for event in parser.feed(chunk):
                                last_id = event.id or last_id
                                patience = Patience(core.client.context, None)
                                yield event
                                if event.kind == "exit":
                                    return
                        refusal = ConnectionFailed(
                            ErrorCode.UNAVAILABLE, "the stream ended before the action"
                        )
                    failure = refusal
            except TransportFailed as error:
                failure = ConnectionFailed(ErrorCode.UNAVAILABLE, f"the stream broke off: {error}")
            time.sleep(patience.delay_after(failure, repeatable=True))


def _whole(response: httpx.Response) -> Reply:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(status=response.status_code, headers=headers, content=response.read())


class Shell:
    """A persistent shell of a session: cwd, variables and functions live on between its commands."""

    def __init__(self, box: Session, name: str) -> None:
        self._box = box
        self.name = name

    def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """A command in this shell. A time-out or kill restarts the shell; the result then says `shell_restarted`."""
        options["shell"] = self.name
        return self._box.exec(command, **options)


class Python:
    """A persistent Python interpreter of a session."""

    def __init__(self, box: Session, name: str) -> None:
        self._box = box
        self.name = name

    def run(self, code: str, **options: Unpack[CodeOptions]) -> CodeResult:
        """Runs a cell; `result` is its last expression, where it is one."""
        options["context"], options["language"] = self.name, "python"
        return self._box.run_code(code, **options)
