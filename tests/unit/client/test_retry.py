"""What is repeated, for how long, and under which id."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from shoal.client import errors
from shoal.client.building import session_create
from shoal.client.effects import RetryPolicy, Send
from shoal.client.retry import call
from shoal.client.session_core import SessionCore
from shoal.client.steps import StepCounter
from shoal.contract.actions import Exec, ReadFile
from shoal.contract.errors import ErrorCode, Next, ShoalError
from shoal.contract.route import BY_FUNCTION, BY_FUNCTION_HEADER
from shoal.contract.sessions import Session
from tests.unit.client.fake_service import Fault, Rig, bare, error, lose, refuse

IMAGE = session_create("code:1", None, None, {})


def box_of(rig: Rig, prefix: str = "step") -> SessionCore:
    info = Session.model_validate(rig.service.session())
    return SessionCore(rig.core, info, StepCounter(prefix))


def test_an_action_whose_answer_is_lost_runs_once_under_one_id() -> None:
    """A lost answer is fetched by the same id; the command is not run again."""
    rig = Rig()
    box = box_of(rig)
    rig.service.fail("POST .*/actions", lose, bare(502), refuse)
    result = rig.run(box.exec("make", {}))
    assert result.stdout == "ran make"
    assert result.replayed
    assert rig.service.runs == [("ses_1", "step-1", {"type": "exec", "command": "make"})]
    assert len(rig.service.requests) == 4


def by_function(rig: Rig) -> Fault:
    """The function behind the gateway's default route."""

    def answer(request: httpx.Request, act: object) -> httpx.Response:
        plain = request.url.copy_with(path=request.url.path.removeprefix(BY_FUNCTION))
        told = rig.service.act(
            httpx.Request(request.method, plain, headers=request.headers, content=request.content)
        )
        told.headers[BY_FUNCTION_HEADER] = "function"
        return told

    return answer


def test_a_gateway_without_routers_is_passed_by() -> None:
    """A pool that is empty has no router, and a gateway that has none to ask says a bare 503: the same request goes to
    the function, which tells a recorded step without any host. Its refusals count, too."""
    rig = Rig()
    box = box_of(rig)
    rig.service.fail("POST /v1/.*/actions", *[bare(503)] * 3)
    rig.service.fail("POST /via/function/v1/", by_function(rig))
    assert rig.run(box.exec("make", {})).stdout == "ran make"
    first, other = rig.service.requests
    assert other.url.path == BY_FUNCTION + first.url.path
    assert other.content == first.content
    rig.service.fail("GET /v1/.*/actions", bare(503))
    rig.service.fail("GET /via/function/v1/", by_function(rig))
    asked = Send(method="GET", path="/v1/sessions/ses_1/actions/step-9/none")
    with pytest.raises(errors.NotFound):
        rig.run(call(rig.core.context, asked))


def test_only_what_goes_to_routers_is_asked_for_another_way() -> None:
    """Not what the service itself refuses, what the function serves anyway, what may not be repeated, nor what is too
    large for a function; and an answer of somebody who does not know that way is none."""
    rig = Rig(RetryPolicy(retry_for_s=0.0))
    act = Send(method="POST", path="/v1/sessions/s/actions", content=b"{}")
    for fault, asked in (
        (error(ErrorCode.UNAVAILABLE), act),
        (bare(502), act),
        (bare(503), Send(method="GET", path="/v1/sessions/s")),
        (bare(503), replace(act, path="/v1/sessions/s/actions/a/stdin", repeatable=False)),
        (bare(503), replace(act, content=bytes(600_000))),
    ):
        rig.service.fail("", fault)
        with pytest.raises(errors.Unavailable):
            rig.run(call(rig.core.context, asked))
    assert not [each for each in rig.service.requests if each.url.path.startswith(BY_FUNCTION)]
    rig.service.fail("", bare(503), error(ErrorCode.NOT_FOUND, status=404))
    with pytest.raises(errors.Unavailable):
        rig.run(call(rig.core.context, act))


def test_a_create_whose_answer_is_lost_makes_one_session() -> None:
    """One logical create sends one idempotency key with each attempt; two creates send two."""
    rig = Rig()
    rig.service.fail("POST /v1/sessions$", lose, lose)
    rig.run(rig.core.create(IMAGE, wait=True, timeout_s=None))
    rig.run(rig.core.create(IMAGE, wait=True, timeout_s=None))
    keys = [request.headers["idempotency-key"] for request in rig.service.requests]
    assert len(keys) == 4
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]
    assert len(rig.service.sessions) == 2


@pytest.mark.parametrize(
    "fault", [refuse, lose, bare(500), bare(502), bare(503), bare(504), error(ErrorCode.HOST_UNREACHABLE)]
)
def test_what_passes_is_repeated_until_the_policy_ends(fault: object) -> None:
    """Retry errors, lost connections and a gateway's bare 5xx are repeated with capped delays, then raised."""
    policy = RetryPolicy(retry_for_s=60.0, base_s=0.5, cap_s=8.0)
    rig = Rig(policy)
    rig.service.fail("GET", *[fault] * 1000)  # type: ignore[list-item]
    with pytest.raises(errors.RetryError) as caught:
        rig.run(call(rig.core.context, Send(method="GET", path="/v1/sessions/x")))
    assert caught.value.next is Next.RETRY
    assert max(rig.sleeps) <= 8.0
    assert 40 < rig.now <= 60.0, "patience is used, and not more than that"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.INVALID_REQUEST, errors.InvalidRequest),
        (ErrorCode.SESSION_ENDED, errors.SessionEnded),
        (ErrorCode.SANDBOX_LOST, errors.SandboxLost),
        (ErrorCode.SESSION_REWOUND, errors.SessionRewound),
        (ErrorCode.ACTION_OUTCOME_UNKNOWN, errors.ActionOutcomeUnknown),
        (ErrorCode.NOT_IMPLEMENTED, errors.NotImplementedByService),
    ],
)
def test_what_repeating_does_not_mend_is_raised_at_once(code: ErrorCode, kind: type[ShoalError]) -> None:
    """fix, replace and give_up are raised at the first answer, typed by their code."""
    rig = Rig()
    rig.service.fail("GET", error(code, status=409, fact=1))
    with pytest.raises(kind) as caught:
        rig.run(rig.core.session("x"))
    assert caught.value.code is code
    assert caught.value.details == {"fact": 1}
    assert rig.sleeps == []


def test_wait_errors_wait_as_long_as_the_service_says() -> None:
    """`retry_after_s` comes first, jitter on top; the policy's longer patience applies."""
    rig = Rig(RetryPolicy(retry_for_s=1.0, wait_for_s=1000.0, base_s=0.1))
    rig.service.fail("POST", *[error(ErrorCode.QUOTA_EXCEEDED, status=429, retry_after_s=30.0)] * 3)
    rig.run(rig.core.create(IMAGE, wait=True, timeout_s=None))
    assert len(rig.sleeps) == 3
    assert all(30.0 <= slept <= 30.4 for slept in rig.sleeps)


def test_a_bare_429_is_waited_out_by_its_header() -> None:
    """A gateway's throttle has no body of ours; its Retry-After counts."""
    rig = Rig()
    rig.service.session()
    rig.service.fail("GET", bare(429, {"retry-after": "7"}))
    rig.run(rig.core.session("ses_1"))
    assert 7.0 <= rig.sleeps[0] < 8.0


def test_a_deadline_ends_patience() -> None:
    """No attempt starts after the caller's own time."""
    rig = Rig()
    rig.service.fail("POST", *[error(ErrorCode.NO_CAPACITY, retry_after_s=4.0)] * 100)
    with pytest.raises(errors.NoCapacity):
        rig.run(rig.core.create(IMAGE, wait=True, timeout_s=10.0))
    assert rig.now <= 10.0


def test_internal_errors_are_repeated_a_few_times_only() -> None:
    """An error of the service's own seldom passes: it is told soon, with its request id."""
    rig = Rig(RetryPolicy(internal_attempts=3))
    rig.service.fail("GET", *[error(ErrorCode.INTERNAL, status=500, request_id="req_1")] * 10)
    with pytest.raises(errors.InternalError) as caught:
        rig.run(rig.core.session("x"))
    assert len(rig.service.requests) == 3
    assert caught.value.request_id == "req_1"


def test_input_is_not_sent_twice_when_it_may_have_arrived() -> None:
    """stdin has no id: after a lost answer it is raised, after a refused connection repeated."""
    rig = Rig()
    send = Send(method="POST", path="/v1/sessions/x/actions/a/stdin", repeatable=False)
    rig.service.fail("POST", lose)
    with pytest.raises(errors.ConnectionFailed):
        rig.run(call(rig.core.context, send))
    rig.service.fail("POST", refuse, lambda request, act: httpx.Response(200))
    assert rig.run(call(rig.core.context, send)).status == 200


def test_codes_and_steps_of_a_newer_service_keep_their_meaning() -> None:
    """An unknown code is classed by its `next`; an unknown `next` means to give up."""
    rig = Rig()
    body = {"code": "sandbox_moved", "message": "m", "next": "fix", "details": {}}
    rig.service.fail("GET", lambda request, act: httpx.Response(409, json={"error": body}))
    with pytest.raises(errors.FixError) as caught:
        rig.run(rig.core.session("x"))
    assert caught.value.details["code"] == "sandbox_moved"
    assert caught.value.next is Next.FIX
    body["next"] = "dance"
    rig.service.fail("GET", lambda request, act: httpx.Response(409, json={"error": body}))
    with pytest.raises(errors.GiveUpError):
        rig.run(rig.core.session("x"))


def test_a_queued_session_is_waited_for() -> None:
    """202 is polled until the session runs; the key is not sent again."""
    rig = Rig()
    rig.service.pending_reads = 4
    session = rig.run(rig.core.create(IMAGE, wait=True, timeout_s=None))
    assert session.state == "running"
    assert [request.method for request in rig.service.requests] == ["POST", "GET", "GET", "GET", "GET"]
    assert all(slept <= 0.25 for slept in rig.sleeps)


def test_the_callers_own_timeout_is_a_wait_timeout() -> None:
    """What was asked for goes on; the exception names it."""
    rig = Rig()
    rig.service.pending_reads = 10_000
    with pytest.raises(errors.WaitTimeout, match="session ses_1"):
        rig.run(rig.core.create(IMAGE, wait=True, timeout_s=5.0))
    assert 5.0 <= rig.now < 5.5


def test_a_running_action_is_polled_to_its_end() -> None:
    """202 on an action is followed by reads of that action, never by another run."""
    rig = Rig()
    box = box_of(rig)
    rig.service.running_reads = 3
    assert rig.run(box.exec("sleep 60", {})).stdout == "ran late"
    assert len(rig.service.runs) == 1


def test_an_action_that_vanished_with_its_sandbox_is_sent_again_under_its_id() -> None:
    """A read that finds no such action means that it was never recorded: the same id may run."""
    rig = Rig()
    box = box_of(rig)
    rig.service.running_reads = 1
    rig.service.fail("GET .*/actions/", error(ErrorCode.NOT_FOUND, status=404))
    rig.run(box.exec("make", {}))
    posts = [request for request in rig.service.requests if request.method == "POST"]
    assert len(posts) == 2
    assert {request.read() for request in posts} == {posts[0].read()}


def test_an_unknown_outcome_is_an_error_and_never_a_second_run() -> None:
    """A record without an end raises ActionOutcomeUnknown."""
    rig = Rig()
    box = box_of(rig)
    record = {"id": "step-1", "epoch": 1, "status": "unknown", "action": {"type": "exec", "command": "x"}}
    rig.service.fail("POST .*/actions", lambda request, act: httpx.Response(200, json=record))
    with pytest.raises(errors.ActionOutcomeUnknown):
        rig.run(box.exec("x", {}))
    assert len(rig.service.requests) == 1


def test_a_bad_request_is_found_here_in_the_services_words() -> None:
    """Validation is the contract's own: no round trip, the field's path is told."""
    rig = Rig()
    box = box_of(rig)
    with pytest.raises(errors.InvalidRequest) as caught:
        rig.run(box.exec("x", {"timeout_s": -1.0}))
    assert caught.value.details["fields"][0]["path"] == "timeout_s"
    assert rig.service.requests == []


def test_a_list_of_actions_says_each_type() -> None:
    """Models made without their type, as people write them, are sent with it; the default is not left out."""
    rig = Rig()
    box = box_of(rig)
    done = {"id": "step-1", "status": "done", "actions": []}
    rig.service.fail("POST .*/actions", lambda request, act: httpx.Response(200, json=done))
    rig.run(box.sequence([Exec(command="a"), ReadFile(path="b")], {}, keep_going=False))
    sent = json.loads(rig.service.requests[0].content)
    assert sent["actions"] == [{"type": "exec", "command": "a"}, {"type": "read_file", "path": "b"}]
