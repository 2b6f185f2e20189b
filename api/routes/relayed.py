"""The relayed routes, declared for the OpenAPI document.

`api.front` answers them before FastAPI sees the request (see `api.calls`), so these functions never run: they are
here because parameters, bodies and answers are best written down where all the others are. A test holds the two
lists together.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Body, Header, Path, Query, Response

from api.state import BEARER
from shoal.contract.actions import (
    ActionList,
    ActionRecord,
    ActionRequest,
    StdinWrite,
    TtyResize,
)
from shoal.contract.base import MAX_WAIT_S
from shoal.contract.errors import ErrorBody

router = APIRouter(prefix="/v1/sessions/{id}", dependencies=[BEARER])

SessionPath = Annotated[str, Path(description="The session's id.")]
ActionPath = Annotated[str, Path(description="The action's own id, percent-encoded where it has a slash.")]
Offset = Annotated[int, Query(ge=0, description="Bytes of this stream that the caller has already.")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the end of the action.")]
FilePath = Annotated[str, Query(description="Absolute, or relative to the session's working directory.")]
_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_RUNNING: dict[int | str, dict[str, Any]] = {
    202: {"model": ActionRecord | ActionList, "description": "It still runs: poll it, or repeat the request."}
}


def _relayed() -> NoReturn:
    raise AssertionError("the front answers relayed routes")


@router.post(
    "/actions",
    response_model=ActionRecord | ActionList,
    responses=_RUNNING,
    tags=["actions"],
    summary="Act: run one step, or a list of them",
)
async def act(id: SessionPath, body: ActionRequest) -> Any:
    """Runs an action and answers its observation. The same `id` never runs twice: it answers what was recorded
    (`replayed: true`) or joins the running one. A command's failure is an observation with 200, never an error."""
    _relayed()


@router.get(
    "/actions/{action}",
    response_model=ActionRecord,
    responses={202: {"model": ActionRecord, "description": "It still runs."}},
    tags=["actions"],
    summary="Read or wait for an action",
)
async def get_action(
    id: SessionPath,
    action: ActionPath,
    wait_s: Wait = 0.0,
    stdout_offset: Offset = 0,
    stderr_offset: Offset = 0,
) -> Any:
    """The record of an action; while it runs, what it printed after the offsets. Also after the session ended."""
    _relayed()


@router.delete(
    "/actions/{action}", response_model=ActionRecord, tags=["actions"], summary="Kill a running action"
)
async def kill_action(id: SessionPath, action: ActionPath) -> Any:
    """Ends the whole process tree of the action; what it printed is kept."""
    _relayed()


@router.get(
    "/actions/{action}/stream",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    tags=["actions"],
    summary="Follow an action's output as server-sent events",
)
async def stream_action(
    id: SessionPath,
    action: ActionPath,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
    resume: Annotated[
        str | None,
        Query(alias="last_event_id", description="The same, for readers that cannot set the header."),
    ] = None,
) -> Any:
    """Events `stdout`, `stderr` and `exit`; a comment every 15 seconds keeps the connection alive."""
    _relayed()


@router.post(
    "/actions/{action}/stdin", tags=["actions"], summary="Write to a running action's standard input"
)
async def write_stdin(id: SessionPath, action: ActionPath, body: StdinWrite) -> Any:
    """For actions started with `stdin_open` or a terminal; `close` ends the input."""
    _relayed()


@router.post("/actions/{action}/resize", tags=["actions"], summary="Resize a running action's terminal")
async def resize_tty(id: SessionPath, action: ActionPath, body: TtyResize) -> Any:
    """For actions with a `tty`."""
    _relayed()


@router.get(
    "/trajectory",
    response_class=Response,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
    tags=["actions"],
    summary="The session's log, as JSON lines",
)
async def get_trajectory(
    id: SessionPath,
    after_seq: Annotated[int, Query(ge=0, description="Only actions after this seq.")] = 0,
) -> Any:
    """One ActionRecord a line, ordered by epoch and seq. Also after the session ended. With the header `X-Shoal-More`
    it goes on: ask again after its last seq."""
    _relayed()


@router.get(
    "/files",
    response_class=Response,
    responses={
        200: {"content": _BYTES},
        303: {"description": "It is larger than this entrance carries: `Location` leads to the bytes."},
    },
    tags=["files"],
    summary="Download a file, or a directory as a tar",
)
async def get_file(
    id: SessionPath,
    path: FilePath,
    checksum: Annotated[
        bool, Query(description="Also answer the header X-Shoal-Sha256; reads it twice.")
    ] = False,
    transfer: Annotated[str | None, Query(description="As a redirect of this route says.")] = None,
) -> Any:
    """Raw bytes, streamed, of any size. A directory comes as `application/x-tar`: modes, links and times are kept. What
    is larger than the entrance carries is put into the blob store first: follow the redirects (303; back to here while
    that goes on). The last one has `X-Shoal-Kind`, `-Mode`, `-Size-Bytes` and `-Sha256`; where it leads takes no
    `Authorization`."""
    _relayed()


@router.put(
    "/files",
    responses={202: {"description": "A transfer's file is on its way: repeat the request."}},
    tags=["files"],
    summary="Upload a file, or a tar into a directory",
)
async def put_file(
    id: SessionPath,
    path: FilePath,
    body: Annotated[bytes, Body(media_type="application/octet-stream")],
    mode: Annotated[
        str | None, Query(description="Octal, such as 755; None keeps the file's, else 644.")
    ] = None,
    owner: Annotated[str | None, Query(description="None keeps the file's, else the session's user.")] = None,
    create_parents: Annotated[bool, Query(description="Make missing directories above it.")] = True,
    transfer: Annotated[
        str | None, Query(description="Take the bytes of this transfer (`POST /v1/transfers`); no body then.")
    ] = None,
    wait_s: Annotated[
        float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for a transfer's file.")
    ] = MAX_WAIT_S,
    x_shoal_sha256: Annotated[
        str | None, Header(description="SHA-256 of the body in hex: checked before the file shows.")
    ] = None,
) -> Any:
    """Raw bytes, streamed, of any size; written aside and renamed when whole. With `Content-Type: application/x-tar`
    the body is unpacked into the directory `path`. Answers `size_bytes` and `sha256`."""
    _relayed()


async def port(id: SessionPath, port: int, path: str) -> Any:
    """Answers 501 `not_implemented` in this version."""
    _relayed()


for _method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
    router.add_api_route(
        "/ports/{port}/{path:path}",
        port,
        methods=[_method],
        operation_id=f"{_method.lower()}_port",
        tags=["later"],
        summary="Reach a server inside the sandbox (not implemented yet)",
        status_code=501,
        response_model=None,
        responses={501: {"model": ErrorBody, "description": "Not implemented yet."}},
    )
