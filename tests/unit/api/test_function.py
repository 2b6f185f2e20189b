"""The API as a Lambda function: the same answers as a server, whole, within its limits, and nothing after them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from api import function, lambda_handler
from provisioner.store.fake import FakeStore
from provisioner.store.port import StoreUnavailable
from shoal.client.sse import EventParser
from tests.unit.api.functions import World, function_world

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with function_world(monkeypatch, World()) as opened:
        yield opened


def test_a_session_is_made_read_and_ended_through_events(world: World) -> None:
    """The routes behind the HTTP API are the server's: create, read, list, delete, errors, health."""
    assert world.call("GET", "/healthz").json() == {"status": "ok"}
    world.host()
    id = world.session()
    assert world.call("GET", f"/v1/sessions/{id}").json()["state"] == "running"
    assert [each["id"] for each in world.call("GET", "/v1/sessions").json()["sessions"]] == [id]
    missing = world.call("GET", "/v1/sessions/ses_none")
    assert (missing.status, missing.code) == (404, "not_found")
    assert missing.headers["content-type"] == "application/json"
    assert missing.headers["x-request-id"].startswith("req_")
    assert world.call("DELETE", f"/v1/sessions/{id}").status == 202
    assert world.call("GET", f"/v1/sessions/{id}").json()["state"] == "ended"
    unknown = world.call("GET", "/v1/sessions", headers={"authorization": "Bearer shk_x"})
    assert (unknown.status, unknown.code) == (401, "unauthenticated")


def test_what_a_create_began_is_done_when_it_answers(world: World) -> None:
    """Asked not to wait, it answers a session on its way, and has placed it: nothing runs after the answer."""
    world.host()
    answer = world.post("/v1/sessions", {"image": "code:1", "wait_s": 0})
    assert answer.status in (201, 202)
    (host,) = world.agents.hosts.values()
    assert len(host.starts) == 1


def test_bytes_pass_both_ways(world: World) -> None:
    """Every byte of a file, NULs and what is no text, comes to the agent and back as it is."""
    world.host()
    id = world.session()
    content = bytes(range(256)) * 1000
    put = world.call(
        "PUT",
        f"/v1/sessions/{id}/files",
        query={"path": "/a b/ü&x"},
        body=content,
        headers={"content-type": "application/octet-stream"},
    )
    assert (put.status, put.body) == (200, content)
    (method, target, _) = world.agent.seen[-1]
    assert (method, target) == ("PUT", f"/v1/sessions/{id}/files?path=%2Fa+b%2F%C3%BC%26x")
    assert put.raw["isBase64Encoded"]


@pytest.mark.parametrize("encoded", [False, True], ids=["decoded by the gateway", "as it came"])
def test_ids_with_a_slash_reach_the_agent_as_one(world: World, encoded: bool) -> None:
    """An HTTP API decodes the path: the id of an action is put together again."""
    world.host()
    id = world.session()
    for path in ("actions/task-9%2Fstep-1", "actions/task-9%2Fstep%3A1/stdin"):
        method = "POST" if path.endswith("stdin") else "GET"
        body = b"{}" if method == "POST" else None
        answer = world.call(method, f"/v1/sessions/{id}/{path}", encoded=encoded, body=body)
        assert answer.status == 200
        assert world.agent.seen[-1][1] == f"/v1/sessions/{id}/{path}"


@pytest.mark.parametrize("encoded", [False, True], ids=["decoded by the gateway", "as it came"])
def test_below_the_prefix_for_functions_are_the_same_routes(world: World, encoded: bool) -> None:
    """A gateway without routers sends here what it does not know; the answer says who gave it."""
    world.host()
    id = world.session()
    for path in ("actions/task-9%2Fstep-1", "files"):
        answer = world.call("GET", f"/via/function/v1/sessions/{id}/{path}", encoded=encoded)
        assert answer.status == 200
        assert answer.headers["x-shoal-via"] == "function"
        assert world.agent.seen[-1][1] == f"/v1/sessions/{id}/{path}"
    assert "x-shoal-via" not in world.call("GET", f"/v1/sessions/{id}/files").headers
    missing = world.call("GET", "/via/function/v1/sessions/ses_none/actions/a")
    assert (missing.status, missing.code, missing.headers["x-shoal-via"]) == (404, "not_found", "function")
    assert world.call("GET", "/via/function/healthz").status == 404


def test_an_answer_over_the_limit_is_told_and_not_broken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over Lambda's size the caller would get a bare 502: it gets a typed error that says what to do."""
    monkeypatch.setattr(function, "ANSWER_BYTES", 2000)
    world.host()
    for _ in range(6):
        world.session()
    answer = world.call("GET", "/v1/sessions")
    assert (answer.status, answer.code) == (413, "payload_too_large")
    assert answer.json()["error"]["details"]["limit_bytes"] == 2000
    assert world.call("GET", "/v1/sessions", query={"limit": "1"}).status == 200


def test_the_largest_answer_fits_into_lambdas_document(world: World) -> None:
    """Whatever is in it: nothing is escaped, so that its size in the answer's document is known."""
    world.host()
    id = world.session()
    worst = b'"\\\n\x00' * (function.ANSWER_BYTES // 4)

    async def answers(request: web.Request) -> web.StreamResponse:
        return web.Response(body=worst, content_type="application/json")

    world.agent.otherwise = answers
    answer = world.call("GET", f"/v1/sessions/{id}/actions/a")
    assert answer.body == worst
    assert len(json.dumps(answer.raw)) < 6 * 1024 * 1024


def test_a_stream_is_answered_with_what_is_there_and_goes_on_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes with the first output and not at its end, cut after a whole event; one in which nothing came
    tells of no output, where the reader is, so that it neither gives up nor reads anything twice."""
    world.host()
    id = world.session()
    seen: list[str | None] = []

    async def streams(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Last-Event-ID"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": heartbeat\n\n")
        if len(seen) == 1:
            await response.write(
                b'event: stdout\nid: 3-0\ndata: {"data": "one"}\n\nevent: stdout\nid: 6-0\nda'
            )
        await asyncio.Event().wait()
        return response

    world.agent.otherwise = streams
    first = world.call("GET", f"/v1/sessions/{id}/actions/a%2Fb/stream")
    assert first.status == 200
    assert first.headers["content-type"] == "text/event-stream"
    (one,) = EventParser().feed(first.body)
    assert (one.kind, one.data, one.id) == ("stdout", b"one", "3-0")
    assert lambda_handler._adapter is not None
    lambda_handler._adapter.app._stream_s = 0.2  # type: ignore[attr-defined]
    quiet = world.call("GET", f"/v1/sessions/{id}/actions/a/stream", headers={"last-event-id": "3-0"})
    (nothing,) = EventParser().feed(quiet.body)
    assert (nothing.kind, nothing.data, nothing.id) == ("stdout", b"", "3-0")
    assert seen == [None, "3-0"]


def test_a_stream_that_ends_is_whole(world: World) -> None:
    """The last event of an action comes as the agent sent it; an error is an error."""
    world.host()
    id = world.session()
    whole = b'event: stdout\nid: 1-0\ndata: {"data": "x"}\n\nevent: exit\nid: 1-0\ndata: {}\n\n'

    async def ends(request: web.Request) -> web.StreamResponse:
        return web.Response(body=whole, content_type="text/event-stream")

    world.agent.script.append(ends)
    assert world.call("GET", f"/v1/sessions/{id}/actions/a/stream").body == whole
    refused = world.call(
        "GET", f"/v1/sessions/{id}/actions/a/stream", headers={"authorization": "Bearer shk_x"}
    )
    assert refused.code == "unauthenticated"


def test_what_takes_longer_than_the_gateway_waits_is_told_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past 30 s the gateway would answer for us, with nothing to act on. The typed error comes before that, says to
    repeat the request, and the repeat finds what was begun; an answer that was begun is not given half."""
    monkeypatch.setattr(function, "ANSWER_S", 1.3)
    world.host()
    id = world.session()

    async def hangs(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"half')
        await asyncio.Event().wait()
        return response

    world.agent.script.append(hangs)
    act = {"id": "a", "action": {"type": "exec", "command": "sleep 60"}, "wait_s": 25}
    answer = world.post(f"/v1/sessions/{id}/actions", act)
    assert (answer.status, answer.code) == (503, "unavailable")
    assert answer.json()["error"]["next"] == "retry"
    again = world.post(f"/v1/sessions/{id}/actions", act)
    assert again.status == 200


def test_a_host_that_registers_is_given_who_waits(world: World) -> None:
    """The queue has no loop in a function: the request of a new host drains it before it is answered."""
    waiting = world.post("/v1/sessions", {"image": "code:1", "wait_s": 0})
    assert waiting.status == 202
    world.host()
    assert world.call("GET", f"/v1/sessions/{waiting.json()['id']}").json()["state"] == "running"


def test_a_store_that_does_not_answer_is_told_and_tried_again(world: World) -> None:
    """The first request may find no store: it is told so by a typed error, and the next one opens the services."""
    assert isinstance(world.store, FakeStore)
    for number in range(1, 6):
        world.store.fail_call(number, StoreUnavailable("down"))
    answer = world.call("GET", "/v1/sessions")
    assert (answer.status, answer.code) == (503, "unavailable")
    world.store.script.clear()
    assert world.call("GET", "/v1/sessions").status == 200


def test_a_request_that_waited_long_settles_within_the_gateways_limit() -> None:
    """What is left is counted from when the gateway took the request, the time of a cold start included."""
    import time

    began = (time.time() - 20) * 1000
    left = function._left({"aws.event": {"requestContext": {"timeEpoch": began}}})
    assert left() == pytest.approx(function.ANSWER_S - 20, abs=0.5)
    strange = function._left({"aws.event": {"requestContext": {"timeEpoch": 0}}})
    assert strange() == pytest.approx(function.ANSWER_S, abs=0.5)


HEAVY = {
    "aioboto3", "aiobotocore", "aiohttp", "boto3", "botocore", "cryptography", "fastapi", "httpx", "jwt", "mangum",
    "matplotlib", "prometheus_client", "pydantic", "rich", "starlette", "structlog", "typer", "uvicorn", "uvloop",
    "zstandard",
}  # fmt: skip


def imported(statement: str, **environment: str) -> set[str]:
    """The top-level modules that a program has loaded after a statement."""
    script = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment}
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=environ
    )
    return set(told.stdout.split())


def test_the_handlers_load_nothing_heavy_when_they_are_imported() -> None:
    """No SDK, no framework, no command line: whoever imports a handler pays for nothing but itself."""
    assert not imported("import api.lambda_handler") & HEAVY
    allowed = {"structlog", "rich"}  # logging, and what it takes for its tracebacks where it finds it
    assert not imported("import provisioner.handlers") & (HEAVY - allowed)


def test_in_a_function_the_api_loads_what_its_first_request_needs() -> None:
    """And nothing that no request needs: no server, no command line, no plots."""
    loaded = imported("import api.lambda_handler", AWS_LAMBDA_FUNCTION_NAME="api")
    assert {"aioboto3", "aiohttp", "fastapi", "mangum"} <= loaded
    assert not loaded & {"matplotlib", "typer", "uvicorn", "uvloop", "httptools", "moto"}


def test_the_app_and_the_profile_load_no_sdk_before_they_are_used() -> None:
    """A server of one machine has no SDK, and the profile's module is imported by the reconciler's first event."""
    sdk = {"aioboto3", "aiobotocore", "boto3", "botocore"}
    assert not imported("import api.app, api.up, api.serve, provisioner.aws.profile") & sdk
