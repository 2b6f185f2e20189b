"""Routes parse, call and answer; whatever goes wrong is an ErrorBody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import structlog

from api.app import create_app
from api.errors import STATUS
from api.front import Front
from provisioner.auth import Principal
from provisioner.clock import SystemClock
from provisioner.services import Counts, Services
from provisioner.sessions import Created
from provisioner.store.fake import FakeStore
from provisioner.store.port import StoreUnavailable
from shoal.contract.errors import ErrorBody, ErrorCode, ShoalError
from shoal.contract.sessions import (
    Network,
    Resources,
    Session,
    SessionCreate,
    SessionItem,
    SessionPage,
    Sessions,
)
from shoal.contract.states import SessionState, Substrate
from tests.unit.api.fakes import KEY, READER, FakeKeys, FakeTransfers


def a_session(id: str = "ses_1", state: SessionState = SessionState.RUNNING) -> Session:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Session.model_validate(
        {
            "id": id,
            "state": state,
            "epoch": 1,
            "substrate": Substrate.CONTAINER,
            "pool": "default",
            "resources": Resources(),
            "network": Network(),
            "created_at": now,
            "expires_at": now + timedelta(hours=1),
        }
    )


@dataclass
class FakeSessions:
    """Answers what the test said; keeps what it was asked."""

    state: SessionState = SessionState.RUNNING
    created: bool = True
    failure: Exception | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    waiting: asyncio.Event | None = None

    def _note(self, **what: Any) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure

    async def create(
        self,
        who: Principal,
        body: SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> Created:
        self._note(body=body, key=idempotency_key)
        return Created(session=a_session(state=self.state), created=self.created)

    async def create_many(
        self,
        who: Principal,
        body: SessionCreate,
        *,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> Sessions:
        self._note(body=body, key=idempotency_key)
        return Sessions(
            sessions=[SessionItem(session=a_session(f"ses_{n}", self.state)) for n in range(body.count)]
        )

    async def get(self, who: Principal, id: str, *, wait_s: float = 0.0) -> Session:
        self._note(id=id, wait_s=wait_s)
        if self.waiting is not None:
            self.waiting.set()
            await asyncio.Event().wait()
        return a_session(id, self.state)

    async def delete(self, who: Principal, id: str, *, wait_s: float = 0.0) -> Session:
        self._note(id=id, wait_s=wait_s)
        return a_session(id, self.state)

    async def list(self, who: Principal, **filters: Any) -> SessionPage:
        self._note(**filters)
        return SessionPage(sessions=[])


@dataclass
class House:
    """The app over fakes."""

    client: httpx.AsyncClient
    sessions: FakeSessions
    store: FakeStore
    front: Front


@pytest.fixture
async def house() -> AsyncIterator[House]:
    sessions, store = FakeSessions(), FakeStore()

    async def counts() -> Counts:
        return Counts(sessions={"running": 3}, hosts={"ready": 1}, queue=2, queue_age_s=1.5, warm=4)

    services = SimpleNamespace(
        sessions=sessions,
        auth=FakeKeys(),
        store=store,
        blobs=None,
        clock=SystemClock(),
        counts=counts,
        transfers=FakeTransfers(),
    )
    app = create_app(cast("Services", services))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app, raise_app_exceptions=False),
                base_url="http://api",
                headers={"authorization": f"Bearer {KEY}"},
            )
        )
        yield House(client=client, sessions=sessions, store=store, front=app)


def error_of(response: httpx.Response) -> ErrorBody:
    assert response.headers["content-type"] == "application/json"
    body = ErrorBody.model_validate_json(response.content)
    assert response.status_code == STATUS[ErrorCode(body.error.code)]
    return body


@pytest.mark.parametrize(
    ("state", "created", "status"),
    [
        (SessionState.RUNNING, True, 201),
        (SessionState.RUNNING, False, 200),
        (SessionState.PENDING, True, 202),
        (SessionState.STARTING, False, 202),
    ],
)
async def test_a_create_tells_by_its_status_how_far_it_is(
    house: House, state: SessionState, created: bool, status: int
) -> None:
    """201 made and running, 200 there already, 202 on its way."""
    house.sessions.state, house.sessions.created = state, created
    response = await house.client.post(
        "/v1/sessions", json={"image": "code:1"}, headers={"idempotency-key": "k1"}
    )
    assert response.status_code == status
    assert response.json()["id"] == "ses_1"
    assert house.sessions.asked[0]["key"] == "k1"


async def test_count_answers_sessions(house: House) -> None:
    """One call for a whole group: items in order."""
    response = await house.client.post("/v1/sessions", json={"image": "code:1", "count": 3})
    assert response.status_code == 201
    assert [item["session"]["id"] for item in response.json()["sessions"]] == ["ses_0", "ses_1", "ses_2"]


async def test_unknown_and_wrong_fields_are_refused_with_their_paths(house: House) -> None:
    """422 names each path; what was sent is not repeated, it may be a secret."""
    body = {"image": "code:1", "imagee": "s3cret", "resources": {"cpu_millis": -1}}
    response = await house.client.post("/v1/sessions", json=body)
    error = error_of(response).error
    assert error.code == "invalid_request"
    paths = {one["path"] for one in error.details["fields"]}
    assert all(set(one) == {"path", "message"} for one in error.details["fields"])
    assert paths == {"imagee", "resources.cpu_millis"}
    assert "s3cret" not in response.text
    assert house.sessions.asked == []


async def test_a_body_that_is_no_json_is_refused_in_the_same_form(house: House) -> None:
    """Also what cannot be parsed at all."""
    response = await house.client.post(
        "/v1/sessions", content=b"{nope", headers={"content-type": "application/json"}
    )
    assert error_of(response).error.code == "invalid_request"


async def test_unknown_query_parameters_are_refused(house: House) -> None:
    """A misspelt filter would else filter nothing."""
    error = error_of(await house.client.get("/v1/sessions?stat=running")).error
    assert error.details["fields"][0]["path"] == "query.stat"
    error = error_of(await house.client.get("/v1/sessions/ses_1?label.x=1")).error
    assert error.details["fields"][0]["path"] == "query.label.x"


async def test_labels_filter_a_list(house: House) -> None:
    """`label.k=v`, any number of them."""
    response = await house.client.get("/v1/sessions?label.task=swe-1&label.kind=a%20b&run=r&state=running")
    assert response.status_code == 200
    assert house.sessions.asked[0]["labels"] == {"task": "swe-1", "kind": "a b"}
    assert house.sessions.asked[0]["run"] == "r"


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/nothing", "not_found"),
        ("GET", "/v1/sessions/", "not_found"),
        ("PUT", "/v1/sessions", "method_not_allowed"),
        ("PATCH", "/v1/sessions/s/files", "method_not_allowed"),
        ("POST", "/v1/sessions/s/pause", "not_implemented"),
        ("GET", "/v1/costs", "not_implemented"),
        ("GET", "/v1/sessions?limit=0", "invalid_request"),
        ("GET", "/v1/sessions/s?wait_s=26", "invalid_request"),
    ],
)
async def test_every_refusal_is_an_error_body(house: House, method: str, path: str, code: str) -> None:
    """Also of routes and methods that are not there."""
    assert error_of(await house.client.request(method, path)).error.code == code


async def test_a_wrong_method_tells_the_right_ones(house: House) -> None:
    """`Allow` is set."""
    response = await house.client.put("/v1/sessions")
    assert set(response.headers["allow"].replace(" ", "").split(",")) == {"GET", "POST"}


async def test_refusals_of_the_use_cases_pass_with_status_and_retry_after(house: House) -> None:
    """The one table decides the status; Retry-After is rounded up."""
    house.sessions.failure = ShoalError(ErrorCode.QUOTA_EXCEEDED, "full", retry_after_s=0.2)
    response = await house.client.get("/v1/sessions/ses_1")
    assert error_of(response).error.code == "quota_exceeded"
    assert response.headers["retry-after"] == "1"


async def test_a_bug_tells_nothing_but_the_request_id(house: House) -> None:
    """No traceback, no message of the exception outside; the id leads to both in the log."""
    bug = RuntimeError("password=hunter2")
    house.sessions.failure = bug
    with structlog.testing.capture_logs() as logged:
        response = await house.client.get("/v1/sessions/ses_1", headers={"x-request-id": "mine-1"})
    error = error_of(response).error
    assert error.code == "internal"
    assert error.details == {"request_id": "mine-1"}
    assert "hunter2" not in response.text
    assert response.headers["x-request-id"] == "mine-1"
    assert [(entry["event"], entry["request_id"], entry["exc_info"]) for entry in logged] == [
        ("request.failed", "mine-1", bug)
    ]


async def test_a_store_that_is_down_is_unavailable(house: House) -> None:
    """It passes by itself: retry, not a bug."""
    house.sessions.failure = StoreUnavailable("gone")
    error = error_of(await house.client.get("/v1/sessions/ses_1")).error
    assert (error.code, error.next) == ("unavailable", "retry")


async def test_scopes_are_held(house: House) -> None:
    """A reading key reads; it creates nothing, and an unknown key does neither."""
    reader = {"authorization": f"Bearer {READER}"}
    assert (await house.client.get("/v1/sessions/s", headers=reader)).status_code == 200
    response = await house.client.post("/v1/sessions", json={"image": "code:1"}, headers=reader)
    assert error_of(response).error.code == "forbidden"
    response = await house.client.get("/v1/sessions/s", headers={"authorization": "Basic xyz"})
    assert error_of(response).error.code == "unauthenticated"
    assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(await house.client.get("/v1/keys", headers=reader)).error.code == "forbidden"


async def test_a_delete_says_whether_it_is_over(house: House) -> None:
    """202 while it is ending, 200 once it has ended."""
    house.sessions.state = SessionState.ENDING
    assert (await house.client.delete("/v1/sessions/s")).status_code == 202
    house.sessions.state = SessionState.ENDED
    assert (await house.client.delete("/v1/sessions/s?wait_s=5")).status_code == 200
    assert house.sessions.asked[-1]["wait_s"] == 5


async def test_health_needs_no_key_and_readiness_asks_the_store(house: House) -> None:
    """/healthz asks nobody; /readyz is 503 when the store does not answer."""
    nobody = {"authorization": ""}
    assert (await house.client.get("/healthz", headers=nobody)).json() == {"status": "ok"}
    assert (await house.client.get("/readyz", headers=nobody)).status_code == 200
    house.store.fail_call(1)
    assert error_of(await house.client.get("/readyz", headers=nobody)).error.code == "unavailable"


async def test_metrics_count_by_template_not_by_path(house: House) -> None:
    """Ids are no labels: two sessions are one series. The levels are the store's."""
    for id in ("a", "b"):
        await house.client.get(f"/v1/sessions/{id}")
    await house.client.get("/nowhere/at/all")
    await house.client.post("/v1/sessions", json={"image": "code:1", "count": 2})
    text = (await house.client.get("/metrics", headers={"authorization": ""})).text
    assert 'shoal_http_requests_total{method="GET",route="/v1/sessions/{id}",status="200"} 2.0' in text
    assert 'shoal_http_requests_total{method="GET",route="unmatched",status="404"} 1.0' in text
    assert 'shoal_session_creates_total{outcome="cold"} 2.0' in text
    assert 'shoal_sessions{state="running"} 3.0' in text
    assert 'shoal_hosts{state="ready"} 1.0' in text
    assert "shoal_queue_length 2.0" in text
    assert "shoal_queue_age_seconds 1.5" in text
    assert "shoal_warm_sandboxes 4.0" in text


async def test_a_server_that_stops_refuses_callers_and_hears_its_hosts(house: House) -> None:
    """Nothing new begins; health and what hosts report are still answered."""
    house.front.drain()
    error = error_of(await house.client.post("/v1/sessions", json={"image": "code:1"})).error
    assert (error.code, error.next) == ("unavailable", "retry")
    assert error_of(await house.client.get("/v1/sessions/s/trajectory")).error.code == "unavailable"
    assert (await house.client.get("/healthz")).status_code == 200
    response = await house.client.post(
        "/internal/v1/hosts/h/heartbeat", headers={"authorization": ""}, json={}
    )
    assert error_of(response).error.code == "unauthenticated"


async def test_whoever_still_waits_when_the_server_stops_gets_an_answer(house: House) -> None:
    """A long poll ends with `unavailable` and when to try again, not with a closed connection."""
    house.sessions.waiting = asyncio.Event()
    poll = asyncio.create_task(house.client.get("/v1/sessions/s?wait_s=25"))
    await house.sessions.waiting.wait()
    house.front.cut()
    response = await poll
    assert error_of(response).error.code == "unavailable"
    assert response.headers["retry-after"] == "5"
