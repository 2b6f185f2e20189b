"""How AWS is called: within limits, repeated when throttled, counted. All in virtual time."""

from __future__ import annotations

import random

import pytest
from botocore.parsers import ResponseParserError
from hypothesis import given
from hypothesis import strategies as st

from provisioner.capacity.calls import Calls, Refused
from provisioner.capacity.limits import BUCKETS, ECS_TASKS, SHARE, Limit, TokenBucket
from provisioner.capacity.port import CapacityUnavailable
from tests.aws_capacity import Hostile, QuickClock, client_error


class _Service:
    """A client that answers anything."""

    def __init__(self) -> None:
        self.pages = 3

    async def start_task(self, **about: object) -> dict[str, object]:
        return {"tasks": []}

    async def list_tasks(self, **about: object) -> dict[str, object]:
        page = int(str(about.get("nextToken", 0)))
        more = {"nextToken": str(page + 1)} if page + 1 < self.pages else {}
        return {"taskArns": [f"task-{page}"], **more}


class _Clients:
    def __init__(self) -> None:
        self.service = _Service()

    async def get(self, service: str) -> _Service:
        return self.service


def opened() -> tuple[Calls, Hostile, QuickClock]:
    clients, clock = Hostile(_Clients()), QuickClock()
    return Calls(clients, clock, chance=random.Random(1)), clients, clock  # type: ignore[arg-type]


@given(
    st.lists(st.floats(min_value=0, max_value=3), min_size=1, max_size=400),
    st.integers(min_value=1, max_value=100),
    st.integers(min_value=1, max_value=50),
)
def test_no_second_has_more_than_the_limit(gaps: list[float], burst: int, per_s: int) -> None:
    """However calls come, no span of time has more of them than the share of burst and rate."""
    bucket = TokenBucket(Limit(burst=burst, per_s=per_s), share=1.0)
    now, turns = 0.0, []
    for gap in gaps:
        now += gap
        turns.append(now + bucket.take(now))
    assert turns == sorted(turns)
    for first in range(len(turns)):
        for last in range(first, len(turns)):
            allowed = max(1, burst) + (turns[last] - turns[first]) * per_s + 1e-6
            assert last - first + 1 <= allowed


def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    """500 StartTasks take the burst at once and the rest at the share of 40 a second: 13 s."""
    bucket = TokenBucket(ECS_TASKS)
    waits = [bucket.take(0.0) for _ in range(500)]
    assert waits[: int(100 * SHARE)] == [0.0] * 80
    assert waits[-1] == pytest.approx(420 / 32)


async def test_calls_keep_to_the_limit_of_their_bucket() -> None:
    """Calls wait for their turn; what they waited is counted."""
    calls, _, clock = opened()
    began = clock.monotonic()
    for _ in range(200):
        await calls.call("ecs", "start_task")
    assert clock.monotonic() - began == pytest.approx(120 / 32, rel=0.01)
    assert calls.waited_s["ecs tasks"] == pytest.approx(120 / 32, rel=0.01)
    assert calls.counts["ecs", "start_task", "ok"] == 200


async def test_a_throttled_call_is_tried_again_and_counted() -> None:
    """A throttled call comes through once AWS lets it; nobody hears of it but the counters."""
    calls, clients, clock = opened()
    left = [client_error("ThrottlingException", "Rate exceeded")] * 3
    clients.fail = lambda operation: left.pop() if left else None
    before = clock.monotonic()
    await calls.call("ecs", "start_task")
    assert calls.counts["ecs", "start_task", "throttled"] == 3
    assert calls.counts["ecs", "start_task", "ok"] == 1
    assert clock.monotonic() > before + 1.0


async def test_after_a_throttle_others_slow_down_as_well() -> None:
    """Nothing is left of the burst once AWS says that it is too fast: the next calls go at the rate."""
    calls, clients, clock = opened()
    left = [client_error("ThrottlingException", "Rate exceeded")]
    clients.fail = lambda operation: left.pop() if left else None
    await calls.call("ecs", "start_task")
    before = clock.monotonic()
    for _ in range(64):
        await calls.call("ecs", "start_task")
    assert clock.monotonic() - before > 1.0


async def test_throttling_without_end_is_bounded() -> None:
    """After some tries a throttled call is given up, and whether it happened is not claimed."""
    calls, clients, _ = opened()
    clients.fail = lambda operation: client_error("RequestLimitExceeded")
    with pytest.raises(CapacityUnavailable) as raised:
        await calls.call("ecs", "start_task")
    assert not isinstance(raised.value, Refused)
    assert 1 < calls.counts["ecs", "start_task", "throttled"] < 10


async def test_a_refusal_is_not_repeated() -> None:
    """What AWS will say again is raised at once, with its reason."""
    calls, clients, _ = opened()
    clients.fail = lambda operation: client_error("AccessDeniedException", "not you")
    with pytest.raises(Refused, match="not you"):
        await calls.call("ecs", "start_task")
    assert calls.counts["ecs", "start_task", "refused"] == 1


@pytest.mark.parametrize(
    "error",
    [client_error("InternalError", status=500), ResponseParserError("a page of HTML"), None],
    ids=["error of AWS's own", "no answer of AWS", "lost"],
)
async def test_no_answer_is_told_as_such(error: Exception | None) -> None:
    """A lost answer, or an error of AWS's own, is neither repeated here nor taken for a refusal."""
    calls, clients, _ = opened()
    if error is not None:
        clients.fail = lambda operation: error
    else:
        clients.lose = lambda operation: True
    with pytest.raises(CapacityUnavailable) as raised:
        await calls.call("ecs", "start_task")
    assert not isinstance(raised.value, Refused)
    assert calls.counts["ecs", "start_task", "lost"] == 1


async def test_pages_are_followed() -> None:
    """All pages of a list are read."""
    calls, _, _ = opened()
    assert [arn async for arn in calls.pages("ecs", "list_tasks", "taskArns")] == [
        "task-0",
        "task-1",
        "task-2",
    ]


def test_tasks_share_one_bucket() -> None:
    """StartTask and StopTask are counted together, as ECS does."""
    assert BUCKETS["ecs", "start_task"] == BUCKETS["ecs", "stop_task"]
    assert BUCKETS["ecs", "list_tasks"][0] != BUCKETS["ecs", "start_task"][0]
