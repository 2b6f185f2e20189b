"""`POST /v1/execute`: one stateless call, made of a session that nobody has to manage.

A call is a session with one program run in it. The call's id names the session (by its idempotency key) and the
program has a fixed action id in it, so that a repeat on any replica finds the same and nothing runs twice. When the
program has ended the session is ended too; from then on the call is answered from the session's journal. A call that
nobody asks for again ends by its session's TTL.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from provisioner.auth import Principal
from provisioner.clock import Clock
from provisioner.sessions import Created
from shoal.contract import sessions as wire
from shoal.contract.actions import (
    Action,
    ActionRecord,
    ActionRequest,
    Exec,
    ExecObservation,
    ReadFile,
    ReadFileObservation,
    RunCode,
    RunCodeObservation,
    WriteFile,
)
from shoal.contract.base import MAX_WAIT_S, SessionId, TenantId
from shoal.contract.errors import ErrorCode, Next, ShoalError, invalid
from shoal.contract.execute import Execute, Executed, OutputFile
from shoal.contract.states import ActionStatus, SessionState

#: The program's action id in its session; input files are `in.0`, ..., output files `out.0`, ...
PROGRAM = "run"
LABEL = "shoal.execute"
#: What a session lives longer than its program may run: for waiting in the queue, and for reading the result.
SPARE_S = 3600
_MAX_FILE_BYTES = 16_777_216


class SessionUse(Protocol):
    """What a call needs of the session use cases."""

    async def create(
        self,
        who: Principal,
        body: wire.SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> Created:
        """See `provisioner.sessions`."""

    async def get(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> wire.Session:
        """See `provisioner.sessions`."""

    async def delete(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> wire.Session:
        """See `provisioner.sessions`."""


class Actor(Protocol):
    """Acts in sessions."""

    async def act(self, who: Principal, session: SessionId, request: ActionRequest) -> ActionRecord:
        """Run one action, once for its id; `running` when it has not ended in `request.wait_s`."""

    async def record(
        self, who: Principal, session: SessionId, action: str, *, wait_s: float = 0.0
    ) -> ActionRecord:
        """The record of an action, from the host or from the journal.

        Raises:
            ShoalError: NOT_FOUND when it was never made.
        """


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call under way in this replica."""

    body_hash: str
    task: asyncio.Task[Executed]


class Executions:
    """Carries out calls. `close` leaves those under way to whoever is asked for them next, or to their TTL."""

    def __init__(
        self, *, sessions: SessionUse, actor: Actor, clock: Clock, new_id: Callable[[str], str]
    ) -> None:
        self._sessions = sessions
        self._actor = actor
        self._clock = clock
        self._new_id = new_id
        self._calls: dict[tuple[TenantId, str], _Call] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop watching what is under way."""
        tasks: list[asyncio.Task[object]] = [call.task for call in self._calls.values()]
        tasks += list(self._ending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self, within_s: float) -> None:
        """Wait for the ends of sessions whose calls are done, at most so many seconds."""
        if self._ending and within_s > 0:
            await asyncio.wait(set(self._ending), timeout=within_s)

    async def execute(self, who: Principal, body: Execute, *, idempotency_key: str | None = None) -> Executed:
        """Run a call, join one of the same id, or read its result; waits up to `body.wait_s` for its end.

        Raises:
            ShoalError: IDEMPOTENCY_CONFLICT for an id that was used with another body; whatever making the session
                is refused with.
        """
        id = body.id or (_id_of(idempotency_key) if idempotency_key else self._new_id("exe"))
        place = (who.tenant, id)
        body_hash = _hash_of(body)
        call = self._calls.get(place)
        if call is not None and call.body_hash != body_hash:
            raise _conflict(id)
        if call is None:
            task = asyncio.create_task(self._carry_out(who, id, body, body_hash))
            call = _Call(body_hash=body_hash, task=task)
            self._calls[place] = call
            task.add_done_callback(lambda done: self._drop(place, done))
        done, _ = await asyncio.wait({call.task}, timeout=body.wait_s)
        if done:
            return call.task.result()
        return Executed(id=id, status=ActionStatus.RUNNING)

    def _drop(self, place: tuple[TenantId, str], task: asyncio.Task[Executed]) -> None:
        self._calls.pop(place, None)
        if not task.cancelled():
            task.exception()  # whoever waits gets it; when nobody does, a later call of this id asks anew

    async def _carry_out(self, who: Principal, id: str, body: Execute, body_hash: str) -> Executed:
        created = await self._sessions.create(
            who, _session_of(id, body, body_hash), idempotency_key=f"execute:{id}", wait_s=MAX_WAIT_S
        )
        session = created.session
        while session.state not in (SessionState.RUNNING, SessionState.ENDING, SessionState.ENDED):
            session = await self._sessions.get(who, session.id, wait_s=MAX_WAIT_S)
        if session.state is not SessionState.RUNNING:
            return await self._read(who, id, body, session)
        try:
            record = await self._run(who, session.id, body)
            files = await self._output_files(who, session.id, body)
        except ShoalError as error:
            if error.code in (ErrorCode.SESSION_ENDED, ErrorCode.NOT_FOUND):
                session = await self._sessions.get(who, session.id)
                return await self._read(who, id, body, session)
            if error.next in (Next.FIX, Next.GIVE_UP):
                self._begin_end(who, session.id)
            raise
        self._begin_end(who, session.id)
        return _executed(id, session.id, record, files)

    def _begin_end(self, who: Principal, session: SessionId) -> None:
        ending = asyncio.create_task(self._end(who, session))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _run(self, who: Principal, session: SessionId, body: Execute) -> ActionRecord:
        if body.argv is not None:
            for number, file in enumerate(body.files):
                write = WriteFile(
                    path=file.path, content=file.content, encoding=file.encoding, mode=file.mode
                )
                record = await self._finish(who, session, f"in.{number}", write)
                if record.observation is not None and record.observation.failed:
                    error = record.observation.error
                    raise invalid(
                        f"files.{number}.path", error.message if error else "it could not be written"
                    )
        return await self._finish(who, session, PROGRAM, _program(body))

    async def _finish(self, who: Principal, session: SessionId, id: str, action: Action) -> ActionRecord:
        """Run one action to its end, however long it takes."""
        request = ActionRequest(id=id, action=action, wait_s=MAX_WAIT_S)
        attempts = 0
        while True:
            try:
                record = await self._actor.act(who, session, request)
            except ShoalError as error:
                attempts += 1
                if error.next not in (Next.RETRY, Next.WAIT) or attempts > 30:
                    raise
                await self._clock.sleep(error.retry_after_s or 1.0)
                continue
            if record.status not in (ActionStatus.QUEUED, ActionStatus.RUNNING):
                return record

    async def _output_files(self, who: Principal, session: SessionId, body: Execute) -> list[OutputFile]:
        found: list[OutputFile] = []
        for number, path in enumerate(body.output_files):
            read = ReadFile(path=path, limit=_MAX_FILE_BYTES, encoding="base64")
            found.append(_output_file(path, await self._finish(who, session, f"out.{number}", read)))
        return found

    async def _read(self, who: Principal, id: str, body: Execute, session: wire.Session) -> Executed:
        """The result of a call whose session has ended, from its journal."""
        deadline = self._clock.monotonic() + MAX_WAIT_S
        while session.state is SessionState.ENDING and self._clock.monotonic() < deadline:
            session = await self._sessions.get(who, session.id, wait_s=MAX_WAIT_S)
        try:
            record = await self._actor.record(who, session.id, PROGRAM)
        except ShoalError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            raise _never_ran(id, session) from None
        files = []
        for number, path in enumerate(body.output_files):
            try:
                files.append(_output_file(path, await self._actor.record(who, session.id, f"out.{number}")))
            except ShoalError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                files.append(OutputFile(path=path, content=None, size_bytes=0))
        return _executed(id, session.id, record, files, replayed=True)

    async def _end(self, who: Principal, session: SessionId) -> None:
        """End the session; when it cannot be done now, its TTL does it."""
        for _ in range(5):
            try:
                await self._sessions.delete(who, session)
            except ShoalError as error:
                if error.next not in (Next.RETRY, Next.WAIT):
                    return
                await self._clock.sleep(error.retry_after_s or 1.0)
            else:
                return


def _id_of(idempotency_key: str) -> str:
    return "key-" + hashlib.sha256(idempotency_key.encode()).hexdigest()[:40]


def _hash_of(body: Execute) -> str:
    asked = body.model_dump_json(exclude={"id", "wait_s"})
    return hashlib.sha256(asked.encode()).hexdigest()


def _session_of(id: str, body: Execute, body_hash: str) -> wire.SessionCreate:
    """The session of a call. The body's hash is among its labels, so that the session's own idempotency also refuses
    the same id with another program."""
    return wire.SessionCreate(
        image=body.image,
        substrate=body.substrate,
        pool=body.pool,
        run=body.run,
        labels={LABEL: id, f"{LABEL}.body": body_hash},
        resources=body.resources,
        env=body.env,
        network=body.network,
        ttl_s=int(body.timeout_s) + SPARE_S,
        idle_pause_s=None,
    )


def _program(body: Execute) -> Exec | RunCode:
    if body.argv is not None:
        return Exec(
            command=[*body.argv, *body.args],
            stdin=body.stdin,
            stdin_encoding=body.stdin_encoding,
            timeout_s=body.timeout_s,
            output_limit_bytes=body.output_limit_bytes,
            encoding=body.encoding,
        )
    assert body.code is not None, "the contract asks for argv or code"
    assert body.language is not None, "the contract asks for the code's language"
    return RunCode(
        language=body.language,
        code=body.code,
        files=body.files,
        args=body.args,
        stdin=body.stdin,
        stdin_encoding=body.stdin_encoding,
        timeout_s=body.timeout_s,
        output_limit_bytes=body.output_limit_bytes,
        encoding=body.encoding,
    )


def _output_file(path: str, record: ActionRecord) -> OutputFile:
    seen = record.observation
    if not isinstance(seen, ReadFileObservation) or seen.error is not None:
        return OutputFile(path=path, content=None, size_bytes=0)
    return OutputFile(path=path, content=seen.content, size_bytes=seen.size_bytes)


def _executed(
    id: str, session: SessionId, record: ActionRecord, files: list[OutputFile], *, replayed: bool = False
) -> Executed:
    if isinstance(record.observation, ExecObservation) and record.observation.killed:
        # Nobody kills the program of a call: its sandbox was ended under it, which is no result of the program.
        raise ShoalError(
            ErrorCode.SANDBOX_LOST,
            f"the sandbox of execute {id} was ended while its program ran; use another id to run it again",
            details={"session": session},
        )
    return Executed(
        id=id,
        status=record.status,
        session=session,
        observation=_observation(record),
        files=files,
        error=record.error,
        started_at=record.started_at,
        finished_at=record.finished_at,
        replayed=replayed or record.replayed,
    )


def _observation(record: ActionRecord) -> RunCodeObservation | None:
    seen = record.observation
    if isinstance(seen, RunCodeObservation) or seen is None:
        return seen
    if isinstance(seen, ExecObservation):
        return RunCodeObservation(**{**seen.model_dump(), "type": "run_code"})
    return None


def _conflict(id: str) -> ShoalError:
    return ShoalError(ErrorCode.IDEMPOTENCY_CONFLICT, f"the execute id {id} was used with another body")


def _never_ran(id: str, session: wire.Session) -> ShoalError:
    """The session ended before its program left a record."""
    end = session.end.model_dump(mode="json") if session.end is not None else {}
    if session.ready_at is None:
        return ShoalError(
            ErrorCode.SANDBOX_START_FAILED,
            f"execute {id} did not start ({end.get('detail') or end.get('reason')}); use another id to try again",
            details={"session": session.id, "end": end},
        )
    return ShoalError(
        ErrorCode.ACTION_OUTCOME_UNKNOWN,
        f"the session of execute {id} ended before its program left a result; use another id to run it again",
        details={"session": session.id, "end": end},
    )
