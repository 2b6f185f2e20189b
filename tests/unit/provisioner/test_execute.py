"""Stateless calls: one program, once for its id, its session gone afterwards and its result still there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from provisioner.auth import Principal
from provisioner.clock import SystemClock
from provisioner.execute import Executions
from provisioner.sessions import Created
from shoal.contract.actions import (
    ActionRecord,
    ActionRequest,
    Exec,
    ExecObservation,
    FileError,
    ReadFile,
    ReadFileObservation,
    RunCode,
    RunCodeObservation,
    WriteFile,
    WriteFileObservation,
)
from shoal.contract.base import KeyId, SessionId, TenantId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.execute import Execute
from shoal.contract.sessions import End, Network, Resources, Session, SessionCreate
from shoal.contract.states import ActionStatus, EndReason, Scope, SessionState, Substrate

WHO = Principal(tenant=TenantId("ten_1"), key=KeyId("key_1"), scopes=frozenset((Scope.SESSIONS,)))


@dataclass
class World:
    """Sessions and sandboxes in one: creates by idempotency key, acts at once, keeps a journal.

    Attributes:
        runs: How often each action really ran.
        gate: Programs end when it is set.
        starts: The states a new session goes through.
    """

    sessions: dict[str, Session] = field(default_factory=dict)
    keys: dict[str, tuple[str, SessionCreate]] = field(default_factory=dict)
    journal: dict[tuple[str, str], ActionRecord] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[ShoalError] = field(default_factory=list)
    killed: bool = False
    deleted: asyncio.Event = field(default_factory=asyncio.Event)
    starts: list[SessionState] = field(default_factory=lambda: [SessionState.RUNNING])
    numbers: Any = field(default_factory=lambda: count(1))

    async def create(
        self,
        who: Principal,
        body: SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> Created:
        assert idempotency_key is not None
        if idempotency_key in self.keys:
            id, before = self.keys[idempotency_key]
            if before != body:
                raise ShoalError(ErrorCode.IDEMPOTENCY_CONFLICT, "another body")
            return Created(session=self.sessions[id], created=False)
        id = f"ses_{next(self.numbers)}"
        now = datetime.now(UTC)
        self.keys[idempotency_key] = (id, body)
        self.sessions[id] = Session.model_validate(
            {
                "id": id,
                "state": self.starts[0],
                "epoch": 1,
                "substrate": Substrate.CONTAINER,
                "pool": "default",
                "resources": Resources(),
                "network": Network(),
                "created_at": now,
                "ready_at": now,
                "expires_at": now + timedelta(seconds=body.ttl_s),
                "labels": body.labels,
            }
        )
        return Created(session=self.sessions[id], created=True)

    async def get(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Session:
        await asyncio.sleep(0)
        if len(self.starts) > 1:
            self.starts.pop(0)
            self.set_state(id, self.starts[0])
        return self.sessions[id]

    async def delete(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Session:
        self.set_state(id, SessionState.ENDED, EndReason.DELETED)
        self.deleted.set()
        return self.sessions[id]

    def set_state(self, id: str, state: SessionState, reason: EndReason | None = None) -> None:
        end = End(reason=reason) if reason is not None else None
        self.sessions[id] = self.sessions[id].model_copy(update={"state": state, "end": end})

    async def act(self, who: Principal, session: SessionId, request: ActionRequest) -> ActionRecord:
        if self.refusals:
            raise self.refusals.pop(0)
        if self.sessions[session].state is not SessionState.RUNNING:
            raise ShoalError(ErrorCode.SESSION_ENDED, "ended")
        assert request.id is not None
        known = self.journal.get((session, request.id))
        if known is not None:
            return known.model_copy(update={"replayed": True})
        self.runs[request.id] = self.runs.get(request.id, 0) + 1
        action = request.action
        assert action is not None
        observation: Any
        if isinstance(action, WriteFile):
            self.files[action.path] = action.content
            observation = WriteFileObservation()
        elif isinstance(action, ReadFile):
            content = self.files.get(action.path)
            observation = (
                ReadFileObservation(error=FileError(errno="ENOENT", message="no such file"))
                if content is None
                else ReadFileObservation(content=content, size_bytes=len(content))
            )
        else:
            await self.gate.wait()
            shape = RunCodeObservation if isinstance(action, RunCode) else ExecObservation
            observation = shape(exit_code=None if self.killed else 3, stdout="out", killed=self.killed)
        record = ActionRecord(
            id=request.id,
            seq=len(self.journal) + 1,
            epoch=1,
            status=ActionStatus.DONE,
            action=action,
            observation=observation,
        )
        self.journal[(session, request.id)] = record
        return record

    async def record(
        self, who: Principal, session: SessionId, action: str, *, wait_s: float = 0.0
    ) -> ActionRecord:
        try:
            return self.journal[(session, action)]
        except KeyError:
            raise ShoalError(ErrorCode.NOT_FOUND, "no such action") from None


@pytest.fixture
def world() -> World:
    world = World()
    world.gate.set()
    return world


def executions(world: World) -> Executions:
    return Executions(sessions=world, actor=world, clock=SystemClock(), new_id=lambda kind: f"{kind}_new")


def call(**fields: Any) -> Execute:
    return Execute.model_validate(
        {"id": "c1", "image": "code:1", "language": "python", "code": "print(1)", **fields}
    )


async def test_a_call_answers_its_observation_and_leaves_no_session(world: World) -> None:
    """The program's own failing is an observation; its session is ended without being waited for."""
    answer = await executions(world).execute(WHO, call())
    assert answer.status is ActionStatus.DONE
    assert answer.observation is not None
    assert (answer.observation.exit_code, answer.observation.stdout) == (3, "out")
    await asyncio.wait_for(world.deleted.wait(), 1)
    assert all(session.state is SessionState.ENDED for session in world.sessions.values())


async def test_the_same_id_reads_the_result_and_runs_nothing(world: World) -> None:
    """Also on another replica, after the session has ended: from its journal."""
    world.files["/out.txt"] = "aGk="
    body = call(output_files=["/out.txt", "/none"])
    first = await executions(world).execute(WHO, body)
    await asyncio.wait_for(world.deleted.wait(), 1)
    again = await executions(world).execute(WHO, body)
    assert again.replayed
    assert again.observation == first.observation
    assert [(file.path, file.content) for file in again.files] == [("/out.txt", "aGk="), ("/none", None)]
    assert again.files == first.files
    assert world.runs["run"] == 1


async def test_the_same_id_joins_the_call_under_way(world: World) -> None:
    """202 while it runs; asking again waits for the same program."""
    world.gate.clear()
    calls = executions(world)
    first = await calls.execute(WHO, call(wait_s=0))
    assert first.status is ActionStatus.RUNNING
    joined = asyncio.create_task(calls.execute(WHO, call(wait_s=10)))
    await asyncio.sleep(0)
    world.gate.set()
    assert (await joined).status is ActionStatus.DONE
    assert world.runs["run"] == 1


async def test_the_same_id_with_another_program_is_refused(world: World) -> None:
    """While it runs, and after; `wait_s` is no part of the call."""
    world.gate.clear()
    calls = executions(world)
    await calls.execute(WHO, call(wait_s=0))
    with pytest.raises(ShoalError) as refused:
        await calls.execute(WHO, call(code="print(2)"))
    assert refused.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    world.gate.set()
    await calls.execute(WHO, call(wait_s=5))
    with pytest.raises(ShoalError) as refused:
        await executions(world).execute(WHO, call(code="print(2)"))
    assert refused.value.code is ErrorCode.IDEMPOTENCY_CONFLICT


async def test_a_queued_call_waits_for_its_session(world: World) -> None:
    """Pending and starting are phases of the call, not failures."""
    world.starts = [SessionState.PENDING, SessionState.STARTING, SessionState.RUNNING]
    assert (await executions(world).execute(WHO, call())).status is ActionStatus.DONE


async def test_what_passes_is_repeated_under_the_same_action_id(world: World) -> None:
    """A host that does not answer for a moment costs a repeat, not the call."""
    world.refusals = [ShoalError(ErrorCode.HOST_UNREACHABLE, "not now", retry_after_s=0.001)] * 2
    assert (await executions(world).execute(WHO, call())).status is ActionStatus.DONE
    assert world.runs["run"] == 1


async def test_argv_gets_its_files_first(world: World) -> None:
    """Files are written before the program runs; its observation has the shape of a program's."""
    body = call(
        language=None, code=None, argv=["cat", "in.txt"], files=[{"path": "in.txt", "content": "hello"}]
    )
    answer = await executions(world).execute(WHO, body)
    assert world.files["in.txt"] == "hello"
    assert isinstance(answer.observation, RunCodeObservation)
    assert isinstance(world.journal[("ses_1", "run")].action, Exec)


async def test_a_call_that_cannot_be_carried_out_leaves_no_session_either(world: World) -> None:
    """What is refused for good is not kept until its TTL."""
    world.refusals = [ShoalError(ErrorCode.INVALID_REQUEST, "no such thing")]
    with pytest.raises(ShoalError):
        await executions(world).execute(WHO, call())
    await asyncio.wait_for(world.deleted.wait(), 1)


async def test_a_session_that_ended_before_its_program_is_told_as_such(world: World) -> None:
    """The outcome is unknown: never a second run under the same id, never an empty success."""
    world.starts = [SessionState.PENDING, SessionState.ENDED]
    with pytest.raises(ShoalError) as refused:
        await executions(world).execute(WHO, call())
    assert refused.value.code is ErrorCode.ACTION_OUTCOME_UNKNOWN


async def test_a_program_whose_sandbox_was_ended_under_it_has_no_result(world: World) -> None:
    """A killed program is the platform's failing, never an observation to be scored; also when it is asked again."""
    world.killed = True
    calls = executions(world)
    for _ in range(2):
        with pytest.raises(ShoalError) as refused:
            await calls.execute(WHO, call())
        assert refused.value.code is ErrorCode.SANDBOX_LOST
    assert world.runs["run"] == 1


async def test_the_idempotency_key_is_an_id_where_the_body_has_none(world: World) -> None:
    """The same key reads the same result; without either the service makes an id."""
    calls = executions(world)
    first = await calls.execute(WHO, call(id=None), idempotency_key="k 1")
    await asyncio.wait_for(world.deleted.wait(), 1)
    again = await executions(world).execute(WHO, call(id=None), idempotency_key="k 1")
    assert again.id == first.id
    assert world.runs["run"] == 1
    assert (await calls.execute(WHO, call(id=None))).id == "exe_new"
