"""The relay passes bytes through, finds routes, and says in types what is broken."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from aiohttp import web
from starlette.types import Message, Receive, Scope, Send

from api import calls
from api.auth import Gate
from api.front import Front
from api.large import Large
from api.metrics import Metrics
from api.relay import Relay
from api.routing import Routes
from api.settings import ApiSettings
from api.upstream import Upstream
from shoal.contract.actions import ActionRecord, Exec, ExecObservation
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import FileSent
from shoal.contract.states import ActionStatus, SessionState
from tests.unit.api.fakes import (
    KEY,
    READER,
    FakeArchive,
    FakeKeys,
    FakeLocator,
    FakeTransfers,
    Handler,
    ScriptedAgent,
    cuts,
    ended,
    fails,
    running,
)

SESSION = "ses_1"
ACTIONS = f"/v1/sessions/{SESSION}/actions"


@dataclass
class House:
    """A relay with scripted neighbours."""

    client: httpx.AsyncClient
    agent: ScriptedAgent
    locator: FakeLocator
    keys: FakeKeys
    archive: FakeArchive
    front: Front
    transfers: FakeTransfers


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("not for the relay")


@asynccontextmanager
async def open_house(settings: ApiSettings | None = None) -> AsyncIterator[House]:
    settings = settings or ApiSettings()
    keys, locator, archive, metrics = FakeKeys(), FakeLocator(), FakeArchive(), Metrics()
    transfers = FakeTransfers()
    async with (
        ScriptedAgent() as agent,
        Upstream(routes=Routes(locator, cache_s=15.0), metrics=metrics, settings=settings) as upstream,
    ):
        large = Large(upstream=upstream, transfers=transfers, settings=settings)
        gate = Gate(keys, cache_s=5.0)
        relay = Relay(gate=gate, upstream=upstream, archive=archive, large=large, settings=settings)
        locator.places[SESSION] = [running(SESSION, agent.address)]
        front = Front(app=_no_app, relay=relay, metrics=metrics)
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://api", headers={"authorization": f"Bearer {KEY}"}
        ) as client:
            yield House(client, agent, locator, keys, archive, front, transfers)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as opened:
        yield opened


def code_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


async def test_bytes_path_and_query_pass_through_unchanged(house: House) -> None:
    """Body, raw path, query and status reach the agent and come back as they are."""
    body = b'{"not even json \x00\xff'
    path = f"/v1/sessions/{SESSION}/files?path=%2Fa%20b"
    response = await house.client.put(path, content=body)
    assert (response.status_code, response.content) == (200, body)
    assert house.agent.seen == [("PUT", path, "Bearer token-hst_1-1-1")]


async def test_the_hot_path_asks_neither_for_the_key_nor_for_the_route(house: House) -> None:
    """After the first action of a session nothing but the agent is asked."""
    for _ in range(5):
        assert (await house.client.post(ACTIONS, content=b"{}")).status_code == 200
    assert house.keys.asked == 1
    assert len(house.locator.asked) == 1


async def test_an_encoded_slash_in_an_action_id_stays_one_segment(house: House) -> None:
    """`a/stream` as an id is not the stream of `a`."""
    house.agent.otherwise = _text("ok")
    response = await house.client.get(f"{ACTIONS}/a%2Fstream")
    assert response.status_code == 200
    assert house.agent.seen[0][1] == f"{ACTIONS}/a%2Fstream"


@pytest.mark.parametrize(
    ("headers", "code", "status"),
    [
        ({"authorization": ""}, "unauthenticated", 401),
        ({"authorization": "Bearer nobody"}, "unauthenticated", 401),
        ({"authorization": f"Bearer {READER}"}, "forbidden", 403),
    ],
)
async def test_no_valid_key_no_action(house: House, headers: dict[str, str], code: str, status: int) -> None:
    """Without a key, with an unknown one, or without the scope nothing reaches the agent."""
    response = await house.client.post(ACTIONS, content=b"{}", headers=headers)
    assert (response.status_code, code_of(response)) == (status, code)
    assert house.agent.seen == []


@pytest.mark.parametrize(
    ("method", "below"),
    [
        (method, shape.replace("*", "a"))
        for shape, methods in calls._OPERATIONS.items()
        for method in methods
        if method != "HEAD"
    ],
)
async def test_a_query_parameter_that_the_route_lacks_is_refused_by_its_name(
    house: House, method: str, below: str
) -> None:
    """On every relayed route, whatever else is in the query; nothing reaches the agent, and no key is told nothing."""
    url = f"/v1/sessions/{SESSION}/{below}"
    response = await house.client.request(method, f"{url}?bogus=1&path=/f&m%64oe=755")
    assert (response.status_code, code_of(response)) == (422, "invalid_request")
    paths = [field["path"] for field in response.json()["error"]["details"]["fields"]]
    assert {"query.bogus", "query.mdoe"} <= set(paths)
    assert ("query.path" in paths) is not below.startswith("files")
    response = await house.client.request(method, f"{url}?bogus=1", headers={"authorization": ""})
    assert response.status_code == 401
    assert house.agent.seen == []


async def test_another_tenants_session_is_not_found(house: House) -> None:
    """It is a 404, as if it were not there."""
    house.locator.places[SESSION] = [replace(running(SESSION, house.agent.address), tenant="ten_2")]
    response = await house.client.post(ACTIONS, content=b"{}")
    assert (response.status_code, code_of(response)) == (404, "not_found")


async def test_an_action_for_a_session_on_its_way_waits_as_long_as_it_asked(house: House) -> None:
    """`wait_s` of the body is the time that the locator may wait."""
    house.locator.places[SESSION] = [
        replace(running(SESSION, ""), state=SessionState.PENDING, host=None, address=None)
    ]
    response = await house.client.post(ACTIONS, json={"action": {}, "wait_s": 7})
    assert (response.status_code, code_of(response)) == (409, "session_not_ready")
    assert response.headers["retry-after"] == "1"
    assert house.locator.asked == [(SESSION, 7.0)]


async def test_a_moved_session_is_followed_once(house: House) -> None:
    """When the agent says that it is not there, the store is asked again and the request goes to the new host."""
    async with ScriptedAgent() as other:
        house.locator.places[SESSION] = [
            running(SESSION, house.agent.address),
            running(SESSION, other.address, host="hst_2", epoch=2),
        ]
        house.agent.otherwise = fails(ShoalError(ErrorCode.SANDBOX_LOST, "gone"), 409)
        response = await house.client.post(ACTIONS, content=b'{"id": "a"}')
        assert (response.status_code, response.content) == (200, b'{"id": "a"}')
        assert [seen[2] for seen in other.seen] == ["Bearer token-hst_2-2-2"]


async def test_a_refused_token_is_renewed_once(house: House) -> None:
    """An expired token costs one more round, not an error; a second refusal is told."""
    refused = fails(ShoalError(ErrorCode.TOKEN_REFUSED, "expired"), 401)
    house.agent.script = [refused]
    assert (await house.client.post(ACTIONS, content=b"{}")).status_code == 200
    assert [seen[2] for seen in house.agent.seen] == ["Bearer token-hst_1-1-1", "Bearer token-hst_1-1-2"]
    house.agent.script = [refused, refused]
    response = await house.client.post(ACTIONS, content=b"{}")
    assert (response.status_code, code_of(response)) == (503, "token_refused")


async def test_an_error_of_the_agent_gets_the_one_tables_status(house: House) -> None:
    """Whatever status an agent chose, the code decides; Retry-After is set from the error."""
    house.agent.otherwise = fails(ShoalError(ErrorCode.ACTION_CONFLICT, "used", retry_after_s=2.2), 400)
    response = await house.client.post(ACTIONS, content=b"{}")
    assert (response.status_code, code_of(response)) == (409, "action_conflict")
    assert response.headers["retry-after"] == "3"


async def test_nonsense_from_a_host_is_unavailable(house: House) -> None:
    """An error answer that is not an ErrorBody is not passed on."""
    house.agent.otherwise = _text("<html>oops</html>", status=502)
    response = await house.client.get(f"{ACTIONS}/a")
    assert (response.status_code, code_of(response)) == (503, "unavailable")
    assert "oops" not in response.text


async def test_a_host_that_is_gone_is_unreachable(house: House) -> None:
    """A refused connection is `host_unreachable`, with when to try again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        house.locator.places[SESSION] = [running(SESSION, f"http://127.0.0.1:{taken.getsockname()[1]}")]
        response = await house.client.post(ACTIONS, content=b"{}")
    assert (response.status_code, code_of(response)) == (503, "host_unreachable")
    assert response.json()["error"]["next"] == "retry"
    assert "retry-after" in response.headers


async def test_a_lost_answer_is_repeated_only_where_the_id_makes_it_safe(house: House) -> None:
    """With an id the relay sends it again; without one it leaves that to the caller, who knows."""
    house.agent.script = [cuts]
    assert (await house.client.post(ACTIONS, content=b'{"id": "a"}')).status_code == 200
    assert len(house.agent.seen) == 2
    house.agent.seen.clear()
    house.agent.script = [cuts]
    response = await house.client.post(ACTIONS, content=b"{}")
    assert (response.status_code, code_of(response)) == (503, "host_unreachable")
    assert len(house.agent.seen) == 1


async def test_an_ended_session_refuses_actions_and_tells_the_cause(house: House) -> None:
    """The tombstone's cause is in the details."""
    house.locator.places[SESSION] = [ended(SESSION)]
    response = await house.client.post(ACTIONS, content=b"{}")
    assert (response.status_code, code_of(response)) == (410, "session_ended")
    assert response.json()["error"]["details"]["end"]["reason"] == "ttl"


async def test_an_ended_session_is_read_from_its_journal(house: House) -> None:
    """Actions and trajectory stay readable; what is not in it is 404."""
    house.locator.places[SESSION] = [ended(SESSION)]
    for seq in (1, 2):
        house.archive.records[(SESSION, f"a{seq}")] = _record(seq)
    response = await house.client.get(f"{ACTIONS}/a1")
    assert ActionRecord.model_validate_json(response.content).seq == 1
    assert (await house.client.get(f"{ACTIONS}/nothing")).status_code == 404
    # A client whose gateway had no router asks below this prefix; a server knows it as well.
    by_function = await house.client.get(f"/via/function{ACTIONS}/a1")
    assert by_function.content == response.content
    stream = (await house.client.get(f"{ACTIONS}/a1/stream")).text
    assert ActionRecord.model_validate_json(stream.splitlines()[-2].removeprefix("data: ")).seq == 1
    response = await house.client.get(f"/v1/sessions/{SESSION}/trajectory?after_seq=1")
    assert [ActionRecord.model_validate_json(line).seq for line in response.text.splitlines()] == [2]


@pytest.mark.parametrize(
    ("headers", "query", "expected"),
    [
        ({}, "", ["stdout 3-0", "stderr 3-3", "exit 3-3"]),
        ({"last-event-id": "2-0"}, "", ["stdout 3-0", "stderr 3-3", "exit 3-3"]),
        ({"last-event-id": "3-0"}, "", ["stderr 3-3", "exit 3-3"]),
        ({}, "?last_event_id=3-1", ["stderr 3-3", "exit 3-3"]),
        ({"last-event-id": "3-3"}, "?last_event_id=0-0", ["exit 3-3"]),
    ],
)
async def test_the_stream_of_an_ended_sessions_action_is_the_one_that_its_host_would_send(
    house: House, headers: dict[str, str], query: str, expected: list[str]
) -> None:
    """All of the output that was kept, from where the reader was, each event with an id to resume by; then the end."""
    house.locator.places[SESSION] = [ended(SESSION)]
    seen = ExecObservation(exit_code=0, stdout="out", stderr="err", stdout_bytes=3, stderr_bytes=3)
    record = _record(1).model_copy(update={"observation": seen})
    house.archive.records[(SESSION, "a1")] = record
    response = await house.client.get(f"{ACTIONS}/a1/stream{query}", headers=headers)
    assert response.headers["content-type"] == "text/event-stream"
    blocks = [
        dict(line.split(": ", 1) for line in block.splitlines())
        for block in response.text.strip().split("\n\n")
    ]
    assert [f"{block['event']} {block['id']}" for block in blocks] == expected
    assert ActionRecord.model_validate_json(blocks[-1]["data"]) == record
    started = [int(part) for part in (headers.get("last-event-id") or query[-3:] or "0-0").split("-")]
    told = {block["event"]: json.loads(block["data"])["data"] for block in blocks[:-1]}
    assert told.get("stdout", "") == "out"[started[0] :]
    assert told.get("stderr", "") == "err"[started[1] :]


async def test_a_stream_is_not_resumed_at_what_is_no_id(house: House) -> None:
    """Also of an ended session: 422 with the header's name."""
    house.locator.places[SESSION] = [ended(SESSION)]
    house.archive.records[(SESSION, "a1")] = _record(1)
    for wrong in ("x", "1", "-1-0", "1-2-3"):
        response = await house.client.get(f"{ACTIONS}/a1/stream", headers={"last-event-id": wrong})
        assert response.status_code == 422
        assert response.json()["error"]["details"]["fields"][0]["path"] == "header.last-event-id"


async def test_a_recorded_step_is_answered_after_the_session_ended(house: House) -> None:
    """The archive's record, whether the route was known or not; what it does not have is refused with the cause."""
    house.archive.records[(SESSION, "a1")] = _record(1)
    asked = {"id": "a1", "action": {"type": "exec", "command": "true"}}
    assert (await house.client.post(ACTIONS, json=asked)).status_code == 200
    house.agent.otherwise = fails(ShoalError(ErrorCode.SESSION_ENDED, "it ended"), 410)
    house.locator.places[SESSION] = [ended(SESSION)]
    for _ in range(2):
        response = await house.client.post(ACTIONS, json=asked)
        assert response.status_code == 200
        assert ActionRecord.model_validate_json(response.content).seq == 1
        response = await house.client.post(ACTIONS, json={**asked, "id": "a2"})
        assert (response.status_code, code_of(response)) == (410, "session_ended")


async def test_a_large_step_that_was_streamed_to_a_host_that_ended_it_is_asked_for_again() -> None:
    """Its body is gone, so that the archive cannot be asked; sent anew it is answered."""
    async with open_house(ApiSettings(buffer_body_bytes=64)) as house:
        house.archive.records[(SESSION, "a1")] = _record(1)
        asked = json.dumps({"id": "a1", "action": {"type": "exec", "command": "x" * 5000}}).encode()
        house.agent.otherwise = fails(ShoalError(ErrorCode.SESSION_ENDED, "it ended"), 410)
        house.locator.places[SESSION] = [running(SESSION, house.agent.address), ended(SESSION)]

        async def chunks() -> AsyncIterator[bytes]:
            yield asked[:100]
            yield asked[100:]

        response = await house.client.post(ACTIONS, content=chunks())
        assert (response.status_code, code_of(response)) == (409, "session_not_ready")
        response = await house.client.post(ACTIONS, content=chunks())
        assert response.status_code == 200


async def test_a_trajectory_that_cannot_be_told_yet_is_an_error_and_not_half_an_answer(house: House) -> None:
    """While the journal is on its way, the refusal comes as one."""
    house.locator.places[SESSION] = [ended(SESSION)]
    house.archive.refusal = ShoalError(ErrorCode.SESSION_NOT_READY, "on its way", retry_after_s=0.5)
    response = await house.client.get(f"/v1/sessions/{SESSION}/trajectory")
    assert (response.status_code, code_of(response)) == (409, "session_not_ready")


async def test_a_wrong_method_and_ports_are_typed(house: House) -> None:
    """405 for a method that the route lacks, 501 for ports."""
    response = await house.client.patch(ACTIONS)
    assert (response.status_code, code_of(response)) == (405, "method_not_allowed")
    response = await house.client.get(f"/v1/sessions/{SESSION}/ports/8000/x")
    assert (response.status_code, code_of(response)) == (501, "not_implemented")


async def test_too_large_a_body_is_refused_before_it_is_read() -> None:
    """The limit is told; the agent sees nothing."""
    async with open_house(ApiSettings(max_action_bytes=2048)) as house:
        response = await house.client.post(ACTIONS, content=b"x" * 4096)
        assert (response.status_code, code_of(response)) == (413, "payload_too_large")
        assert response.json()["error"]["details"]["limit_bytes"] == 2048
        assert house.agent.seen == []


async def test_too_large_a_body_of_unknown_length_is_refused_where_it_passes_the_limit() -> None:
    """It is the caller's error, and told as such; the host is not blamed for it."""
    async with open_house(ApiSettings(max_action_bytes=100_000)) as house:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"x" * 40_000

        response = await house.client.post(ACTIONS, content=chunks())
        assert (response.status_code, code_of(response)) == (413, "payload_too_large")
        assert (await house.client.post(ACTIONS, content=b"{}")).status_code == 200


async def test_large_bodies_stream_both_ways_with_backpressure(house: House) -> None:
    """Neither way does the relay take more than a few MiB ahead of the slower side."""
    chunk, chunks = b"x" * 65_536, 1024
    taken, released = 0, asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await released.wait()
        size = 0
        async for part in request.content.iter_any():
            size += len(part)
        return web.Response(text=str(size))

    house.agent.otherwise = slow
    sent: list[Message] = []

    async def receive() -> Message:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": chunk, "more_body": taken < chunks}

    async def send(message: Message) -> None:
        sent.append(message)

    upload = asyncio.create_task(
        house.front(_scope("PUT", f"/v1/sessions/{SESSION}/files", length=len(chunk) * chunks), receive, send)
    )
    stalled_at = await _until_still(lambda: taken)
    assert 0 < stalled_at < 400, "the relay read ahead without limit"
    released.set()
    await upload
    assert sent[-1]["body"] == str(len(chunk) * chunks).encode()


async def test_a_slow_reader_slows_the_agent_and_a_gone_one_ends_it(house: House) -> None:
    """A download stops where the reader stops; when the caller hangs up, the agent's side is closed."""
    chunk = b"y" * 65_536
    produced, cancelled = 0, asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal produced
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(chunk)
                produced += 1
        finally:
            cancelled.set()

    house.agent.otherwise = endless
    first, hang_up = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            first.set()
            await hang_up.wait()

    download = asyncio.create_task(house.front(_scope("GET", f"/v1/sessions/{SESSION}/files"), receive, send))
    await first.wait()
    assert await _until_still(lambda: produced) < 400
    hang_up.set()
    await asyncio.wait_for(download, 5)
    await asyncio.wait_for(cancelled.wait(), 5)


def _scope(method: str, path: str, *, length: int | None = None) -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }


async def _until_still(count: Any) -> int:
    """The count once it has not moved for 50 turns of a few milliseconds: all buffers on the way are full."""
    last, still = -1, 0
    while still < 50:
        await asyncio.sleep(0.004)
        now = count()
        still = still + 1 if now == last else 0
        last = now
    return last


def _text(text: str, status: int = 200) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return answer


def _record(seq: int) -> ActionRecord:
    return ActionRecord(
        id=f"a{seq}",
        seq=seq,
        epoch=1,
        status=ActionStatus.DONE,
        action=Exec(command="true"),
        observation=ExecObservation(exit_code=0),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


LIMITED = ApiSettings(answer_limit_bytes=1024)
SENT = FileSent(size_bytes=5000, sha256="0" * 64, kind="file", mode=0o755, mtime_ns=7)


async def test_a_file_over_the_limit_is_answered_with_where_it_is() -> None:
    """The agent is told to put it into the blob store; while it does the redirect leads back, and then to the bytes
    with what a download tells in headers."""
    async with open_house(LIMITED) as house:
        path = f"/v1/sessions/{SESSION}/files?path=%2Fa%20b%2Fc"
        house.agent.script = [
            _bytes(b"x" * 5000),
            _text('{"status": "running"}', status=202),
            _text(SENT.model_dump_json()),
        ]
        back = await house.client.get(path)
        assert (back.status_code, back.content) == (303, b"")
        again = str(httpx.URL(f"http://api{path}").join(back.headers["location"]))
        assert again == f"http://api/v1/sessions/{SESSION}/files?path=/a%20b/c&transfer=trf_0"
        there = await house.client.get(again)
        assert there.status_code == 303
        assert there.headers["location"] == "https://blobs.example.org/trf_0?as=application/octet-stream"
        assert (there.headers["x-shoal-size-bytes"], there.headers["x-shoal-mode"]) == ("5000", "755")
        assert [(method, target) for method, target, _ in house.agent.seen] == [
            ("GET", path),
            ("POST", f"/v1/sessions/{SESSION}/files:send?path=/a%20b/c&transfer=trf_0&wait_s=15"),
            ("POST", f"/v1/sessions/{SESSION}/files:send?path=/a%20b/c&transfer=trf_0&wait_s=15"),
        ]
        house.transfers.made["trf_0"] = "ses_other"
        assert (await house.client.get(again)).status_code == 404


async def test_a_tar_of_unknown_length_over_the_limit_goes_the_same_way() -> None:
    """What streams is held up to the limit; under it, it is answered as it is."""
    async with open_house(LIMITED) as house:
        path = f"/v1/sessions/{SESSION}/files?path=d"
        house.agent.script = [_chunks(b"x" * 1000), _chunks(b"x" * 1000, b"y" * 1000)]
        house.agent.otherwise = _text(SENT.model_copy(update={"kind": "directory"}).model_dump_json())
        small = await house.client.get(path)
        assert (small.status_code, small.content) == (200, b"x" * 1000)
        assert (await house.client.get(path)).headers["location"].endswith("?as=application/x-tar")


async def test_what_is_no_file_and_over_the_limit_says_what_to_do() -> None:
    """Answers and bodies alike: a typed error with the limit, never a broken answer of some gateway."""
    async with open_house(LIMITED) as house:
        house.agent.otherwise = _bytes(b"x" * 2000)
        answer = await house.client.post(ACTIONS, content=b"{}")
        assert (answer.status_code, code_of(answer)) == (413, "payload_too_large")
        assert answer.json()["error"]["details"] == {"limit_bytes": 1024, "direction": "answer"}
        for method, path in (("POST", ACTIONS), ("PUT", f"/v1/sessions/{SESSION}/files?path=a")):
            body = await house.client.request(method, path, content=b"x" * 2000)
            assert (body.status_code, code_of(body)) == (413, "payload_too_large")
            assert body.json()["error"]["details"]["transfer"] == "/v1/transfers"


async def test_a_long_log_comes_in_whole_lines() -> None:
    """Each answer ends with a line and tells that there is more; one line over the limit is refused."""
    async with open_house(LIMITED) as house:
        house.agent.script = [_chunks(b"a" * 499 + b"\n", b"b" * 499 + b"\n" + b"c" * 499 + b"\n")]
        house.agent.otherwise = _bytes(b"a" * 2000)
        log = f"/v1/sessions/{SESSION}/trajectory"
        first = await house.client.get(log)
        assert first.content == b"a" * 499 + b"\n" + b"b" * 499 + b"\n"
        assert first.headers["x-shoal-more"] == "true"
        assert (await house.client.get(log)).status_code == 413


def _bytes(content: bytes) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content)

    return answer


def _chunks(*chunks: bytes) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    return answer
