"""Routes are remembered for a while, by key, and forgotten at once when somebody knows better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.routing import Ended, Routes
from provisioner.auth import Principal
from shoal.contract.base import KeyId, SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import Scope, SessionState
from tests.unit.api.fakes import FULL_KEY, TENANT, FakeLocator, ended, running

A = Principal(tenant=TENANT, key=FULL_KEY, scopes=frozenset((Scope.SESSIONS,)))
B = replace(A, key=KeyId("key_b"))
SESSION = SessionId("ses_1")


class Clock:
    """Monotonic time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def routes(locator: FakeLocator, clock: Clock, *, size: int = 100) -> Routes:
    return Routes(locator, cache_s=15.0, size=size, clock=clock)


async def test_a_route_is_believed_for_its_time_and_then_looked_up() -> None:
    """Neither longer than the setting says nor than its token is good for."""
    locator, clock = FakeLocator(places={SESSION: [running(SESSION, "http://h")]}), Clock()
    book = routes(locator, clock)
    first = await book.find(A, SESSION, wait_s=0)
    clock.now += 14
    assert await book.find(A, SESSION, wait_s=0) is first
    clock.now += 2
    assert await book.find(A, SESSION, wait_s=0) is not first
    assert len(locator.asked) == 2


async def test_each_key_has_its_own_token_and_a_forgotten_session_is_forgotten_for_all() -> None:
    """Tokens name the key that asked; a session that ended or moved has for everybody."""
    book = routes(FakeLocator(places={SESSION: [running(SESSION, "http://h")]}), Clock())
    of_a, of_b = await book.find(A, SESSION, wait_s=0), await book.find(B, SESSION, wait_s=0)
    assert of_a.authorization != of_b.authorization
    book.forget(SESSION)
    assert book.known(A, SESSION) is None
    assert book.known(B, SESSION) is None


async def test_memory_is_bounded() -> None:
    """The oldest session goes first."""
    places = {f"ses_{n}": [running(f"ses_{n}", "http://h")] for n in range(5)}
    book = routes(FakeLocator(places=places), Clock(), size=3)
    for n in range(5):
        await book.find(A, SessionId(f"ses_{n}"), wait_s=0)
    known = [n for n in range(5) if book.known(A, SessionId(f"ses_{n}")) is not None]
    assert known == [2, 3, 4]


@pytest.mark.parametrize("state", [SessionState.PENDING, SessionState.STARTING, SessionState.RESTORING])
async def test_what_does_not_run_in_time_is_not_ready_and_not_remembered(state: SessionState) -> None:
    """It may run soon: the caller is told to ask again."""
    locator = FakeLocator(places={SESSION: [replace(running(SESSION, "http://h"), state=state)]})
    book = routes(locator, Clock())
    with pytest.raises(ShoalError) as refused:
        await book.find(A, SESSION, wait_s=3)
    assert refused.value.code is ErrorCode.SESSION_NOT_READY
    assert locator.asked == [(SESSION, 3)]
    assert book.known(A, SESSION) is None


async def test_what_has_ended_says_so() -> None:
    """With where it is told of from then on."""
    with pytest.raises(Ended) as over:
        await routes(FakeLocator(places={SESSION: [ended(SESSION)]}), Clock()).find(A, SESSION, wait_s=0)
    assert over.value.refusal().code is ErrorCode.SESSION_ENDED
