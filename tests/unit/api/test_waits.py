"""One poll for many actions: any or all, in order, bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from api.waits import wait_for_actions
from provisioner.auth import Principal
from shoal.contract.actions import ActionRecord, ActionsWait, Exec
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import ActionStatus, Scope
from tests.unit.api.fakes import FULL_KEY, TENANT

WHO = Principal(tenant=TENANT, key=FULL_KEY, scopes=frozenset((Scope.SESSIONS,)))


@dataclass
class FakeRecorder:
    """Actions that end when the test says so."""

    ended: dict[str, asyncio.Event] = field(default_factory=dict)
    failures: dict[str, ShoalError] = field(default_factory=dict)
    in_flight: int = 0
    most: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def record(
        self, who: Principal, session: SessionId, action: str, *, wait_s: float = 0.0, output: bool = True
    ) -> ActionRecord:
        assert not output, "outputs are not asked for"
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0)
            if action in self.failures:
                raise self.failures[action]
            ended = self.ended.setdefault(action, asyncio.Event())
            if wait_s > 0 and not ended.is_set():
                self.waiting.set()
                try:
                    await asyncio.wait_for(ended.wait(), wait_s)
                except TimeoutError:
                    pass
            status = ActionStatus.DONE if ended.is_set() else ActionStatus.RUNNING
            return ActionRecord(id=action, epoch=1, status=status, action=Exec(command="true"))
        finally:
            self.in_flight -= 1

    def end(self, action: str) -> None:
        self.ended.setdefault(action, asyncio.Event()).set()


def asked(*actions: str, mode: str = "any", wait_s: float = 5.0) -> ActionsWait:
    return ActionsWait.model_validate(
        {"ids": [("ses_1", action) for action in actions], "mode": mode, "wait_s": wait_s}
    )


async def test_any_is_answered_by_the_first_that_ends_and_tells_the_others() -> None:
    """Every id is in the answer, in the order asked, also those that still run."""
    recorder = FakeRecorder()
    task = asyncio.create_task(wait_for_actions(recorder, WHO, asked("a", "b", "c"), fan_out=8))
    await recorder.waiting.wait()
    recorder.end("b")
    answer = await asyncio.wait_for(task, 2)
    assert answer.satisfied
    assert [(item.action, item.status) for item in answer.items] == [
        ("a", ActionStatus.RUNNING),
        ("b", ActionStatus.DONE),
        ("c", ActionStatus.RUNNING),
    ]


async def test_all_waits_for_the_last() -> None:
    """Not before every one has ended."""
    recorder = FakeRecorder()
    recorder.end("a")
    task = asyncio.create_task(wait_for_actions(recorder, WHO, asked("a", "b", mode="all"), fan_out=8))
    await recorder.waiting.wait()
    assert not task.done()
    recorder.end("b")
    assert (await asyncio.wait_for(task, 2)).satisfied


async def test_in_time_or_not_the_answer_is_whole() -> None:
    """When the time is over it says `satisfied: false` and where each is; without a wait it only looks."""
    answer = await wait_for_actions(FakeRecorder(), WHO, asked("a", "b", mode="all", wait_s=0), fan_out=1)
    assert not answer.satisfied
    assert [item.status for item in answer.items] == [ActionStatus.RUNNING] * 2


async def test_ten_thousand_ids_keep_to_the_fan_out() -> None:
    """The number of requests at the agents is bounded, whatever is asked for."""
    recorder = FakeRecorder()
    names = [f"a{n}" for n in range(10_000)]
    for name in names:
        recorder.end(name)
    answer = await wait_for_actions(recorder, WHO, asked(*names, mode="all"), fan_out=16)
    assert answer.satisfied
    assert recorder.most <= 16
    assert [item.action for item in answer.items] == names


async def test_more_actions_than_places_starve_none() -> None:
    """One that ends behind a full line of others is still found."""
    recorder = FakeRecorder()
    task = asyncio.create_task(
        wait_for_actions(recorder, WHO, asked(*(f"a{n}" for n in range(6)), wait_s=20), fan_out=2)
    )
    await recorder.waiting.wait()
    recorder.end("a5")
    answer = await asyncio.wait_for(task, 15)
    assert answer.satisfied
    assert answer.items[5].status is ActionStatus.DONE


async def test_a_session_that_cannot_tell_ends_the_wait_for_it_and_says_why() -> None:
    """An error that passes is asked again; one that does not counts as ended, with its code."""
    recorder = FakeRecorder(failures={"gone": ShoalError(ErrorCode.NOT_FOUND, "no such session")})
    recorder.end("a")
    answer = await wait_for_actions(recorder, WHO, asked("a", "gone", mode="all"), fan_out=4)
    assert answer.satisfied
    assert answer.items[1].error is not None
    assert answer.items[1].error.code == "not_found"
    passing = ShoalError(ErrorCode.HOST_UNREACHABLE, "not now", retry_after_s=0.01)
    recorder = FakeRecorder(failures={"x": passing})
    answer = await wait_for_actions(recorder, WHO, asked("x", mode="all", wait_s=0.1), fan_out=4)
    assert not answer.satisfied
