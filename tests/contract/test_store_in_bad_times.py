"""The store suite once more, through a layer that injects conflicts, throttles and lost answers: what use cases hold
(`SteadyStore`) keeps the port's promises over a store that keeps failing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from provisioner.clock import SystemClock
from provisioner.store.port import Conflict, Key, Op, Page, Put, Store, Stored, StoreUnavailable, Throttled
from provisioner.store.steady import SteadyStore
from shoal.contract.errors import ErrorCode, ShoalError
from tests.contract.test_store import (
    ADAPTERS,
    PROMISES,
    closed_is_unavailable,
    opened,
    refuses_what_is_too_much,
    sixty_four_with_one_token_write_once,
)

T = TypeVar("T")
#: What has another error here (`ShoalError`), and what repeats one call more often than this layer lets it through.
OTHERWISE = (closed_is_unavailable, refuses_what_is_too_much, sixty_four_with_one_token_write_once)


class BadTimes:
    """A store whose calls fail often: before their effect, or after it; the same call no more than three times."""

    def __init__(self, store: Store, *, share: float = 0.4) -> None:
        self._store = store
        self._chance = random.Random(3)
        self._share = share
        self._failed: dict[str, int] = {}

    async def get(self, key: Key) -> Stored | None:
        return await self._call(lambda: self._store.get(key), f"get {key}")

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        return await self._call(lambda: self._store.get_many(keys), f"get_many {keys}")

    async def query(
        self, pk: str, *, prefix: str = "", after: str | None = None, limit: int = 100, reverse: bool = False
    ) -> Page:
        return await self._call(
            lambda: self._store.query(pk, prefix=prefix, after=after, limit=limit, reverse=reverse),
            f"query {pk} {prefix}",
        )

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        await self._call(lambda: self._store.transact(ops, token=token), f"transact {token}")

    async def close(self) -> None:
        await self._store.close()

    async def _call(self, call: Callable[[], Awaitable[T]], name: str) -> T:
        failed = self._failed.get(name, 0)
        if failed < 3 and self._chance.random() < self._share:
            self._failed[name] = failed + 1
            kinds: list[type[Exception]] = [Throttled, StoreUnavailable]
            if name.startswith("transact"):
                kinds.append(Conflict)
            kind = self._chance.choice(kinds)
            if kind is StoreUnavailable and self._chance.random() < 0.7:
                await call()
            raise kind("injected")
        self._failed.pop(name, None)
        return await call()


class Hasty(SystemClock):
    """Pauses cost nothing."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(0)


@pytest.fixture(params=ADAPTERS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(request.param, tmp_path, request) as inner:
        yield SteadyStore(BadTimes(inner), Hasty(), random.Random(1))


@pytest.mark.parametrize(
    "promise",
    [each for each in PROMISES if each not in OTHERWISE],
    ids=lambda promise: promise.__name__,
)
async def test_the_promises_hold_in_bad_times(
    store: Store, promise: Callable[[Store], Awaitable[None]]
) -> None:
    """Conflicts, throttles and lost answers change no outcome: nothing is written twice, nothing is lost."""
    await promise(store)


async def test_when_it_lasts_the_caller_is_told_to_come_back() -> None:
    """A store that stays away is `unavailable` with a time to come back, and what is too large says its limit."""
    from provisioner.store.fake import FakeStore

    inner = FakeStore()
    store = SteadyStore(inner, Hasty(), random.Random(1))
    for number in range(1, 10):
        inner.fail_call(number)
    with pytest.raises(ShoalError) as raised:
        await store.get(Key(pk="p", sk="a"))
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert raised.value.retry_after_s
    inner.script.clear()
    with pytest.raises(ShoalError) as raised:
        await store.transact([Put(key=Key(pk="p", sk="a"), item={"x": "y" * 500_000})])
    assert raised.value.code is ErrorCode.PAYLOAD_TOO_LARGE
