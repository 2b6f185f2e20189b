"""Steps of a session: sent, polled, streamed, fed and killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from runtime_image.agent import crash
from runtime_image.agent.actions.perform import check_action
from runtime_image.agent.actions.processes import ExecSoFar
from runtime_image.agent.actions.records import Replay
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.actions.runner import SessionActions
from runtime_image.agent.errors import error_response
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.http.guard import guarded, json_response, number, read_body, read_model, wait_s
from runtime_image.agent.http.streams import run_events
from runtime_image.agent.link import LinkClosedError, LinkError
from runtime_image.agent.tokens import require_session
from shoal.contract.actions import (
    MAX_ACTION_BYTES,
    Action,
    ActionRequest,
    StdinWrite,
    TtyResize,
)
from shoal.contract.base import new_id
from shoal.contract.errors import ErrorCode, ErrorDetail, ShoalError, invalid
from shoal.contract.states import ActionStatus
from shoal.contract.streams import replayed_events, resume_offsets
from shoal.contract.text import to_bytes

if TYPE_CHECKING:
    from runtime_image.agent.service import SandboxService
    from runtime_image.agent.tokens import TokenVerifier


#: How long input for a step waits for its process to start; one that is queued behind others may take longer.
_START_S = 10.0


class ActionRoutes:
    """`/v1/sessions/{session}/actions...`, for session tokens."""

    def __init__(self, service: SandboxService, tokens: TokenVerifier) -> None:
        self._service = service
        self._tokens = tokens

    def routes(self) -> list[Route]:
        """Its routes. Ids of actions may have slashes in them."""
        base = "/v1/sessions/{session}/actions"
        one = base + "/{action:path}"
        return [
            Route(base, guarded(self.post), methods=["POST"]),
            Route(one + "/stream", guarded(self.stream), methods=["GET"]),
            Route(one + "/stdin", guarded(self.stdin), methods=["POST"]),
            Route(one + "/resize", guarded(self.resize), methods=["POST"]),
            Route(one, guarded(self.get), methods=["GET"]),
            Route(one, guarded(self.kill), methods=["DELETE"]),
        ]

    def hosted(self, request: Request, *, write: bool) -> Hosted:
        """The sandbox that the token is for."""
        return session_of(request, self._service, self._tokens, write=write)

    async def post(self, request: Request) -> Response:
        """Take one step, or a list of them."""
        hosted = self.hosted(request, write=True)
        asked = ActionRequest.model_validate_json(await read_body(request, MAX_ACTION_BYTES))
        if asked.epoch is not None and asked.epoch != hosted.epoch:
            raise ShoalError(
                ErrorCode.EPOCH_MISMATCH,
                f"The session is in epoch {hosted.epoch}, not {asked.epoch}.",
                details={"epoch": hosted.epoch},
            )
        id = asked.id or new_id("act")
        if asked.action is not None:
            check_action(asked.action)
            return await self._post_one(hosted, id, asked.action, asked)
        assert asked.actions is not None
        for action in asked.actions:
            check_action(action)
        return await self._post_list(hosted, id, asked.actions, asked)

    async def _post_one(self, hosted: Hosted, id: str, action: Action, asked: ActionRequest) -> Response:
        try:
            actions = actions_of(hosted)
        except ShoalError:
            # What was recorded is answered also when nothing new can run.
            replay = await _recorded(hosted, id, action)
            if replay is None:
                raise
            return json_response(replay.record)
        joined = actions.get(id) is not None
        run = await actions.submit(id, action, parallel=asked.parallel)
        if isinstance(run, Replay):
            return json_response(run.record)
        await _wait(run, asked.wait_s)
        return _answer(hosted, run, replayed=joined)

    async def _post_list(
        self, hosted: Hosted, id: str, wanted: Sequence[Action], asked: ActionRequest
    ) -> Response:
        try:
            actions = actions_of(hosted)
        except ShoalError:
            told = await _recorded_list(hosted, id, wanted, keep_going=asked.keep_going)
            if told is None:
                raise
            return json_response(_list(id, ActionStatus.DONE, told, len(wanted) - len(told)))
        taken = await actions.submit_list(id, wanted, parallel=asked.parallel, keep_going=asked.keep_going)
        deadline = asyncio.get_running_loop().time() + asked.wait_s
        for run in taken:
            if isinstance(run, ActionRun):
                await _wait(run, max(0.0, deadline - asyncio.get_running_loop().time()))
                if not run.answerable.is_set():
                    break
        records: list[bytes] = []
        finished = True
        for run in taken:
            if isinstance(run, Replay):
                records.append(run.record)
            elif run.entry is not None:
                records.append(_record(hosted, run))
                finished = finished and run.answerable.is_set()
            elif not run.skipped:
                finished = False
        skipped = len(wanted) - len(records) if finished else 0
        status = ActionStatus.DONE if finished else ActionStatus.RUNNING
        crash.passing("before_reply")
        return json_response(_list(id, status, records, skipped), 200 if finished else 202)

    async def get(self, request: Request) -> Response:
        """Where a step is; what it printed so far, from the offsets given."""
        hosted = self.hosted(request, write=False)
        id = request.path_params["action"]
        run = hosted.actions.get(id) if hosted.actions is not None else None
        if run is None:
            replay = await _recorded(hosted, id, None)
            if replay is None:
                raise _no_action(id)
            return json_response(replay.record)
        await _wait(run, wait_s(request), settled=True)
        if run.settled.is_set():
            return _answer(hosted, run)
        stdout, stderr = number(request, "stdout_offset", 0), number(request, "stderr_offset", 0)
        return json_response(_record(hosted, run, stdout, stderr), 202)

    async def stream(self, request: Request) -> Response:
        """Server-sent events of what a step prints, and its end."""
        if not request.scope["raw_path"].endswith(b"/stream"):
            # The slash was encoded: it belongs to the id of a step that is called so.
            request.path_params["action"] += "/stream"
            return await self.get(request)
        hosted = self.hosted(request, write=False)
        id = request.path_params["action"]
        stdout, stderr = resume_offsets(
            request.headers.get("last-event-id"), request.query_params.get("last_event_id")
        )
        run = hosted.actions.get(id) if hosted.actions is not None else None
        if run is not None:
            events = run_events(run, lambda: _record(hosted, run), stdout, stderr)
        else:
            replay = await _recorded(hosted, id, None)
            if replay is None:
                raise _no_action(id)
            events = _each(replayed_events(replay.record, stdout, stderr))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def stdin(self, request: Request) -> Response:
        """Feed a step's open stdin."""
        hosted = self.hosted(request, write=True)
        write = await read_model(request, StdinWrite, limit_bytes=8 << 20)
        process, id = await self._process(hosted, request)
        try:
            data = to_bytes(write.data, write.encoding)
        except ValueError:
            raise invalid("data", "is not base64") from None
        hosted.touch()
        try:
            if data:
                await process.write_stdin(data)
            if write.close:
                await process.close_stdin()
        except LinkClosedError:
            raise
        except LinkError as error:
            raise ShoalError(ErrorCode.ACTION_NOT_RUNNING, f"Action {id} takes no input.") from error
        return json_response(b"{}")

    async def resize(self, request: Request) -> Response:
        """Set the size of a step's terminal."""
        hosted = self.hosted(request, write=True)
        size = await read_model(request, TtyResize)
        process, id = await self._process(hosted, request)
        try:
            await process.resize(size.rows, size.cols)
        except LinkClosedError:
            raise
        except LinkError as error:
            raise ShoalError(ErrorCode.ACTION_NOT_RUNNING, f"Action {id} has no terminal.") from error
        return json_response(b"{}")

    async def _process(self, hosted: Hosted, request: Request):  # type: ignore[no-untyped-def]
        id = request.path_params["action"]
        run = actions_of(hosted).get(id)
        if run is not None and run.process is None and not run.settled.is_set():
            # A step that was just taken is about to start: whoever sent it may feed it at once.
            await _first(run.process_changed, run.settled, timeout_s=_START_S)
        if run is None or run.process is None:
            raise ShoalError(ErrorCode.ACTION_NOT_RUNNING, f"Action {id} does not run.")
        return run.process, id

    async def kill(self, request: Request) -> Response:
        """Kill a step's whole process tree, or what an ended one left running; answers when it is gone."""
        hosted = self.hosted(request, write=True)
        run = await actions_of(hosted).kill(request.path_params["action"])
        if isinstance(run, Replay):
            return json_response(run.record)
        await _wait(run, 5.0, settled=True)
        return _answer(hosted, run)


def session_of(request: Request, service: SandboxService, tokens: TokenVerifier, *, write: bool) -> Hosted:
    """The sandbox of the path's session, if the token is for the epoch that is here.

    Raises:
        ShoalError: `unauthenticated`, `token_refused`, `forbidden`, `host_fenced`, `sandbox_lost`.
    """
    session = request.path_params["session"]
    claims = tokens.verify(request.headers.get("authorization"))
    require_session(claims, session, write=write)
    if service.fenced:
        raise ShoalError(
            ErrorCode.HOST_FENCED, "This host has lost touch with the control plane.", retry_after_s=1.0
        )
    hosted = service.current(session)
    if claims.epo != hosted.epoch:
        raise ShoalError(
            ErrorCode.TOKEN_REFUSED,
            f"The route token is for epoch {claims.epo}; the session is in epoch {hosted.epoch} here.",
            details={"epoch": hosted.epoch},
        )
    return hosted


def actions_of(hosted: Hosted) -> SessionActions:
    """What takes the session's steps, where it takes any.

    Raises:
        ShoalError: Why it does not: not ready, ended, lost, or rewound and not acknowledged.
    """
    hosted.require_running()
    if hosted.rewound:
        status = hosted.status()
        raise ShoalError(
            ErrorCode.SESSION_REWOUND,
            f"The session's disk went back to step {hosted.spec.restored_seq or 0}; acknowledge it to go on.",
            details={
                "restored_seq": hosted.spec.restored_seq or 0,
                "lost_actions": status.lost_actions,
                "epoch": hosted.epoch,
            },
        )
    assert hosted.actions is not None
    return hosted.actions


async def _recorded(hosted: Hosted, id: str, action: Action | None) -> Replay | None:
    """What is recorded of a step, also of a sandbox that has ended."""
    if action is None:
        return await hosted.records.find(id)
    if hosted.rewound and not hosted.over:
        return None
    _, sha = hosted.records.digest(action)
    replay = await hosted.records.find(id, sha=sha)
    return replay if replay is not None and replay.status is ActionStatus.DONE else None


async def _recorded_list(
    hosted: Hosted, id: str, wanted: Sequence[Action], *, keep_going: bool
) -> list[bytes] | None:
    """The records of a list that came to its end; None when it did not."""
    records: list[bytes] = []
    for n, action in enumerate(wanted):
        replay = await _recorded(hosted, f"{id}.{n}", action)
        if replay is None:
            return None
        records.append(replay.record)
        if replay.failed and not keep_going:
            break
    return records


def _list(id: str, status: ActionStatus, records: Sequence[bytes], skipped: int) -> bytes:
    head = f'{{"id":"{id}","status":"{status.value}","skipped":{skipped},"actions":['
    return head.encode() + b",".join(records) + b"]}"


def _no_action(id: str) -> ShoalError:
    return ShoalError(ErrorCode.NOT_FOUND, f"There is no action {id} in this session.")


async def _each(events: Iterator[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


async def _wait(run: ActionRun, timeout_s: float, *, settled: bool = False) -> None:
    event = run.settled if settled else run.answerable
    if event.is_set() or timeout_s <= 0:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


async def _first(*events: asyncio.Event, timeout_s: float) -> None:
    """Return when one of them is set, or the time is over."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _answer(hosted: Hosted, run: ActionRun, *, replayed: bool = False) -> Response:
    if run.entry is None and run.settled.is_set():
        if run.is_error and run.body is not None:
            return error_response(ShoalError.from_detail(ErrorDetail.model_validate_json(run.body)))
        raise _no_action(run.id)
    crash.passing("before_reply")
    if not run.settled.is_set():
        return json_response(_record(hosted, run, replayed=replayed), 202)
    return json_response(run.record(hosted.session, hosted.epoch, replayed=replayed))


def _record(
    hosted: Hosted, run: ActionRun, stdout: int = 0, stderr: int = 0, *, replayed: bool = False
) -> bytes:
    """The step's record; while it runs, with what it printed from those offsets on."""
    if run.settled.is_set() or run.process is None:
        return run.record(hosted.session, hosted.epoch, replayed=replayed)
    so_far = ExecSoFar.of(run, stdout, stderr)
    record = run.record(
        hosted.session,
        hosted.epoch,
        observation=so_far.observation.model_dump_json().encode(),
        replayed=replayed,
    )
    return record[:-1] + f',"stdout_offset":{so_far.stdout},"stderr_offset":{so_far.stderr}}}'.encode()
