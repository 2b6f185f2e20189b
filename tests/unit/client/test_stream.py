"""Streams of running actions, and the way straight to a host."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import AsyncShoal, RetryPolicy, Shoal
from shoal.client import errors
from shoal.client.config import ClientConfig
from shoal.client.session_core import SessionCore
from shoal.client.sse import EventParser
from shoal.client.steps import StepCounter
from shoal.contract.errors import ErrorCode
from shoal.contract.sessions import Session
from tests.unit.client.fake_service import FakeService, Rig, error, refuse

QUICK = RetryPolicy(retry_for_s=2.0, base_s=0.001, cap_s=0.01)


def wire(kind: str, id: str, payload: dict[str, Any]) -> bytes:
    return f"event: {kind}\nid: {id}\ndata: {json.dumps(payload)}\n\n".encode()


@given(st.lists(st.binary(max_size=60), max_size=8), st.lists(st.integers(1, 40), max_size=60), st.booleans())
def test_events_are_whole_however_the_bytes_are_cut(
    outputs: list[bytes], cuts: list[int], crlf: bool
) -> None:
    """NULs, blank lines and split characters arrive exactly, whatever the chunks."""
    raw = b": stream\n\n"
    for at, output in enumerate(outputs):
        raw += wire("stdout", str(at), {"data": base64.b64encode(output).decode(), "encoding": "base64"})
        raw += b": heartbeat\n\n"
    if crlf:
        raw = raw.replace(b"\n", b"\r\n")
    parser = EventParser()
    seen = []
    for cut in cuts:
        seen += parser.feed(raw[:cut])
        raw = raw[cut:]
    seen += parser.feed(raw)
    assert [event.data for event in seen] == outputs
    assert [event.id for event in seen] == [str(at) for at in range(len(outputs))]


RECORD = {
    "id": "step-1",
    "epoch": 1,
    "status": "done",
    "action": {"type": "exec", "command": "x"},
    "observation": {"type": "exec", "exit_code": 0},
}


def scripted(service: FakeService) -> None:
    service.running_reads = 1_000_000
    first = wire("stdout", "2-0", {"data": "ab", "encoding": "utf-8"})
    rest = wire("stderr", "2-1", {"data": "c", "encoding": "utf-8"}) + wire("exit", "2-1", RECORD)
    stream = "GET .*/stream"
    service.fail(stream, lambda request, act: httpx.Response(200, content=first))
    service.fail(stream, refuse, error(ErrorCode.HOST_UNREACHABLE, status=502))
    service.fail(stream, lambda request, act: httpx.Response(200, content=rest))


def test_a_stream_goes_on_where_it_broke_off() -> None:
    """After a break it asks by Last-Event-ID; nothing comes twice and nothing is missed."""
    service = FakeService()
    scripted(service)
    shoal = Shoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK)
    running = shoal.session("code:1").start("x")
    events = list(running.stream())
    assert [(event.kind, event.data) for event in events] == [
        ("stdout", b"ab"),
        ("stderr", b"c"),
        ("exit", b""),
    ]
    streams = [request for request in service.requests if request.url.path.endswith("/stream")]
    assert [request.headers.get("last-event-id") for request in streams] == [None, "2-0", "2-0", "2-0"]


async def test_the_async_stream_does_the_same() -> None:
    """Its twin."""
    service = FakeService()
    scripted(service)
    async with AsyncShoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK) as shoal:
        running = await (await shoal.session("code:1")).start("x")
        assert [event.data async for event in running.stream()] == [b"ab", b"c", b""]


def test_a_stream_of_nothing_is_an_error() -> None:
    """What repeating does not mend is raised."""
    service = FakeService()
    service.running_reads = 1_000_000
    service.fail("GET .*/stream", error(ErrorCode.NOT_FOUND, status=404))
    shoal = Shoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK)
    with pytest.raises(errors.NotFound):
        list(shoal.session("code:1").start("x").stream())


def test_actions_go_straight_to_the_host_and_fall_back() -> None:
    """With direct=True by the session's own route and token; when that fails through the service, under the same id."""
    rig = Rig(config=ClientConfig(url="http://service:1", api_key="key", direct=True))
    info = rig.service.session(direct={"url": "http://host:2/", "token": "route"})
    box = SessionCore(rig.core, Session.model_validate(info), StepCounter())
    rig.run(box.exec("one", {}))
    rig.service.fail("POST .*/actions", error(ErrorCode.TOKEN_REFUSED, status=401))
    rig.run(box.exec("two", {}))
    sent = [(r.url.host, r.headers["authorization"]) for r in rig.service.requests if r.method == "POST"]
    assert sent == [("host", "Bearer route"), ("host", "Bearer route"), ("service", "Bearer key")]
    assert [run[1] for run in rig.service.runs] == ["step-1", "step-2"]
    assert rig.service.requests[0].url.params["direct"] == "true"


def test_a_direct_refusal_that_is_final_is_raised() -> None:
    """A conflict is a conflict whichever way it comes."""
    rig = Rig(config=ClientConfig(url="http://service:1", api_key="key", direct=True))
    info = rig.service.session(direct={"url": "http://host:2", "token": "route"})
    box = SessionCore(rig.core, Session.model_validate(info), StepCounter())
    rig.service.fail("POST .*/actions", error(ErrorCode.SESSION_REWOUND, status=409))
    with pytest.raises(errors.SessionRewound):
        rig.run(box.exec("one", {}))


def test_polling_gives_output_and_results() -> None:
    """poll is None while it runs, then the result."""
    service = FakeService()
    service.running_reads = 2
    shoal = Shoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK)
    running = shoal.session("code:1").start("x")
    assert running.poll() is None
    result = running.poll()
    assert result is not None
    assert result.stdout == "ran late"
    assert running.wait().exit_code == 0
