"""Both clients over a service in memory: blocks, groups, copies of handles, forks, a thousand sessions."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import pickle
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import shoal as package
from shoal import ActionFailed, AsyncShoal, ErrorCode, GiveUpError, RetryPolicy, SandboxLost, Shoal
from shoal.client import errors, pools
from shoal.client.async_client import AsyncOpening
from shoal.contract.errors import Next
from tests.unit.client.fake_service import FakeService, error, lose, refuse

QUICK = RetryPolicy(retry_for_s=2.0, wait_for_s=2.0, base_s=0.001, cap_s=0.01)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def shoal(service: FakeService) -> Shoal:
    return Shoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK)


def test_leaving_the_block_normally_ends_the_session(shoal: Shoal, service: FakeService) -> None:
    """Named or not."""
    with shoal.session("code:1") as box:
        assert box.exec("ls").stdout == "ran ls"
    with shoal.session("code:1", name="a"):
        pass
    assert service.deleted == ["ses_1", "ses_2"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_leaving_by_an_exception_keeps_a_named_session(
    shoal: Shoal, service: FakeService, kind: type[BaseException]
) -> None:
    """A restarted script finds it again; an unnamed one could not be found and is ended."""
    with pytest.raises(kind), shoal.session("code:1", name="a"):
        raise kind
    assert service.deleted == []
    with pytest.raises(kind), shoal.session("code:1"):
        raise kind
    assert service.deleted == ["ses_2"]


def test_keep_overrides_the_rule(shoal: Shoal, service: FakeService) -> None:
    """True never ends it, False always."""
    with shoal.session("code:1", keep=True):
        pass
    with pytest.raises(ValueError), shoal.session("code:1", name="a", keep=False):
        raise ValueError
    assert service.deleted == ["ses_2"]


def test_an_exception_in_the_block_is_not_hidden_by_a_lost_service(
    shoal: Shoal, service: FakeService
) -> None:
    """Ending the session fails too: the block's own exception is the one that is seen."""
    service.fail("DELETE", *[refuse] * 10_000)
    with pytest.raises(ValueError), shoal.session("code:1"):
        raise ValueError


def test_a_rerun_of_a_named_session_fast_forwards(shoal: Shoal, service: FakeService) -> None:
    """The script crashes between two steps; run again, the first is answered from the record."""
    for attempt in range(2):
        try:
            with shoal.session("code:1", run="r", name="a") as box:
                first = box.exec("increment")
                assert first.replayed == bool(attempt)
                snapshot = box.snapshot()
                if attempt == 0:
                    raise RuntimeError("preempted")
                box.exec("second")
        except RuntimeError:
            pass
    assert [run[2]["command"] for run in service.runs] == ["increment", "second"]
    assert snapshot.id == "snp_1"
    assert len(service.snapshots) == 1


def test_another_way_than_the_recorded_one_is_refused(shoal: Shoal, service: FakeService) -> None:
    """The same id with another action never runs."""
    box = shoal.session("code:1", name="a")
    box.exec("one")
    again = shoal.session("code:1", name="a")
    with pytest.raises(package.ActionConflict):
        again.exec("two")
    again.steps("evaluator").exec("two")
    assert [run[1] for run in service.runs] == ["step-1", "evaluator-1"]


def test_check_raises_on_the_users_own_failure_only() -> None:
    """A result is a value; .check() turns it into an exception that is no ShoalError, and pickles."""
    from shoal.client.results import EditResult, ExecResult

    good = ExecResult(exit_code=0)
    assert good.check() is good
    for bad in (
        ExecResult(exit_code=2, stderr="no such"),
        ExecResult(signal="KILL", timed_out=True),
        EditResult(),
    ):
        assert not bad.ok
        with pytest.raises(ActionFailed) as caught:
            bad.check()
        assert not isinstance(caught.value, package.ShoalError)
        assert pickle.loads(pickle.dumps(caught.value)).result == bad


def test_what_is_not_built_yet_is_a_typed_error(shoal: Shoal) -> None:
    """501 is give_up, at once."""
    box = shoal.session("code:1")
    with pytest.raises(GiveUpError) as caught:
        box.pause()
    assert caught.value.code is ErrorCode.NOT_IMPLEMENTED


def test_a_group_maps_in_order_and_ends_by_one_call(shoal: Shoal, service: FakeService) -> None:
    """Results in order; one that raises stops no other; one delete for all."""

    def play(box: Any) -> str:
        if box.id == "ses_2":
            raise RuntimeError(box.id)
        return str(box.exec("play").stdout)

    with shoal.sessions("code:1", count=4) as group:
        results = group.map(play, return_exceptions=True)
        assert [type(result) for result in results] == [str, RuntimeError, str, str]
        with pytest.raises(RuntimeError):
            group.map(play)
        assert [box.id for box in group[1:3]] == ["ses_2", "ses_3"]
    deletes = [request for request in service.requests if request.url.path.endswith(":delete")]
    assert len(deletes) == 1
    assert service.deleted == ["ses_1", "ses_2", "ses_3", "ses_4"]


def test_a_group_of_names_is_found_again(shoal: Shoal, service: FakeService) -> None:
    """One batch; the same names answer the same sessions."""
    names = ["t/0", "t/1"]
    first = shoal.sessions("code:1", names=names, run="r")
    again = shoal.sessions("code:1", names=names, run="r")
    assert [box.id for box in first] == [box.id for box in again]


def test_half_a_group_is_not_left_behind(shoal: Shoal, service: FakeService) -> None:
    """When an item fails the others are ended, and the error says how many failed."""
    detail = {"code": "quota_exceeded", "message": "m", "next": "wait"}

    def half(request: httpx.Request, act: Callable[[], httpx.Response]) -> httpx.Response:
        items = [{"session": service.session()}, {"error": detail}]
        return httpx.Response(201, json={"sessions": items})

    service.fail("POST /v1/sessions$", half)
    with pytest.raises(errors.QuotaExceeded) as caught:
        shoal.sessions("code:1", count=2)
    assert service.deleted == ["ses_1"]
    assert caught.value.details == {"failed": 1, "asked": 2}


def test_handles_survive_pickling(shoal: Shoal, service: FakeService) -> None:
    """The copy acts in the same session with steps of its own, over connections of its own."""
    box = shoal.session("code:1")
    box.exec("one")
    copied = pickle.loads(pickle.dumps(box))
    assert copied.id == box.id
    assert copied._shoal._pool is not shoal._pool
    copied._shoal._pool._transport = service.transport
    copied.exec("two")
    box.exec("three")
    assert [run[1] for run in service.runs] == ["step-1", "step-1+1-1", "step-2"]


def test_unpickled_handles_of_one_service_share_connections(shoal: Shoal) -> None:
    """A worker with a thousand handles has one pool."""
    boxes = [shoal.session("code:1") for _ in range(3)]
    copies = [pickle.loads(pickle.dumps(box)) for box in boxes]
    assert len({id(box._shoal) for box in copies}) == 1


def test_groups_and_running_actions_survive_pickling(shoal: Shoal, service: FakeService) -> None:
    """All that a driver hands to workers."""
    group = shoal.sessions("code:1", count=2)
    assert [box.id for box in pickle.loads(pickle.dumps(group))] == ["ses_1", "ses_2"]
    assert [box.id for box in copy.copy(group)] == ["ses_1", "ses_2"]
    running = group[0].start("sleep 1")
    again = pickle.loads(pickle.dumps(running))
    assert (again.session_id, again.id) == (running.session_id, running.id)
    assert shoal.wait([running, again]).satisfied


def service_errors() -> list[type[errors.ServiceError]]:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in found if issubclass(kind, errors.ServiceError)]


@pytest.mark.parametrize("kind", service_errors())
def test_errors_survive_pickling(kind: type[errors.ServiceError]) -> None:
    """With code, message, details and what to do next."""
    made = kind(
        ErrorCode.UNAVAILABLE, "m", retry_after_s=2.0, details={"a": 1}, status=503, next_step=Next.WAIT
    )
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is kind
    assert (again.code, again.message, again.retry_after_s, again.details, again.status, again.next) == (
        ErrorCode.UNAVAILABLE,
        "m",
        2.0,
        {"a": 1},
        503,
        "wait",
    )


def test_errors_of_the_client_survive_pickling() -> None:
    """Those with constructors of their own."""
    for made in (errors.WaitTimeout("session x", 3.0), errors.PythonMismatch("3.11", "3.12")):
        again = pickle.loads(pickle.dumps(made))
        assert type(again) is type(made)
        assert str(again) == str(made)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_child_has_its_own_connections_and_ends_nothing(shoal: Shoal, service: FakeService) -> None:
    """The child acts under ids of its own; leaving the block in it leaves the parent's session alone."""
    with shoal.session("code:1") as box:
        box.exec("one")
        before = shoal._pool._shards
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                fresh = shoal._pool._shards is not before and not shoal._pool._shards.all
                box.exec("two")
                box.__exit__(None, None, None)
                told = f"{fresh} {service.runs[-1][1]} {service.deleted}"
                os.write(write, told.encode())
            finally:
                os._exit(0)
        os.close(write)
        told = os.read(read, 1000).decode()
        os.close(read)
        os.waitpid(child, 0)
        assert told.startswith("True step-1+f")
        assert told.endswith("[]")
        assert shoal._pool._shards is before
    assert service.deleted == ["ses_1"]


async def test_the_async_client_does_the_same(service: FakeService) -> None:
    """await or enter a session; groups gather."""
    async with AsyncShoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK) as shoal:
        box = await shoal.session("code:1", name="a")
        service.fail("POST .*/actions", lose)
        assert (await box.exec("ls")).replayed
        with pytest.raises(ValueError):
            async with shoal.session("code:1", name="b"):
                raise ValueError
        async with shoal.session("code:1"):
            pass
        assert service.deleted == ["ses_3"]
        async with await shoal.sessions("code:1", count=3) as group:
            results = await group.map(lambda one: one.exec("play"))
            assert [result.stdout for result in results] == ["ran play"] * 3
        assert [info.id async for info in _listed(shoal, service)] == ["ses_1"]


async def _listed(shoal: AsyncShoal, service: FakeService) -> Any:
    page = {"sessions": [service.sessions["ses_1"]]}
    service.fail("GET /v1/sessions$", lambda request, act: httpx.Response(200, json=page))
    async for info in shoal.list_sessions(run="r", labels={"k": "v"}):
        yield info
    assert service.requests[-1].url.params["label.k"] == "v"


async def test_a_cancelled_block_ends_its_session(service: FakeService) -> None:
    """Cancellation is an exception like any other."""
    async with AsyncShoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK) as shoal:
        entered = asyncio.Event()

        async def work() -> None:
            async with shoal.session("code:1"):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert service.deleted == ["ses_1"]


class Held:
    """A transport whose action calls all wait until as many have come as are expected."""

    def __init__(self, service: FakeService, expected: int) -> None:
        self.service = service
        self.expected = expected
        self.waiting = 0
        self.most = 0
        self.all_here = asyncio.Event()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/actions"):
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            if self.waiting >= self.expected:
                self.all_here.set()
            await self.all_here.wait()
            await asyncio.sleep(0)  # lets those that wait for a turn come to it
            self.waiting -= 1
        return self.service.handle(request)


async def test_a_thousand_rollouts_do_not_starve_each_other(service: FakeService) -> None:
    """1,000 long polls are in flight at once: none waits for a connection, spread over small clients."""
    held = Held(service, 1000)
    client = AsyncShoal(
        "http://127.0.0.1:1", "key", transport=httpx.MockTransport(held.handle), max_in_flight=1000
    )
    async with client as shoal, await shoal.sessions("code:1", count=1000) as group:
        results = await group.map(lambda box: box.exec("play"))
        assert len(results) == 1000
        assert held.most == 1000
        state = shoal._pool._state
        assert state is not None
        assert len(state.shards.all) == 125
        assert all(shard.in_flight == 0 for shard in state.shards.all)


async def test_more_than_the_bound_take_turns(service: FakeService) -> None:
    """Over the bound requests queue without a time-out, and long polls ask for short waits meanwhile."""
    held = Held(service, 5)
    client = AsyncShoal(
        "http://127.0.0.1:1", "key", transport=httpx.MockTransport(held.handle), max_in_flight=5
    )
    async with client as shoal:
        group = await shoal.sessions("code:1", count=30)
        await group.map(lambda box: box.exec("play"))
        assert held.most == 5
        waits = {
            float(request.read().split(b'"wait_s":')[1].split(b"}")[0].split(b",")[0])
            for request in service.requests
            if request.url.path.endswith("/actions")
        }
        assert pools.BUSY_WAIT_S in waits


async def test_an_async_client_works_on_a_second_loop(service: FakeService) -> None:
    """Scripts call asyncio.run more than once: connections belong to a loop."""
    client = AsyncShoal("http://127.0.0.1:1", "key", transport=service.transport)

    async def once() -> str:
        return (await client.session("code:1", name="a")).id

    here = await once()
    there = await asyncio.to_thread(lambda: asyncio.run(once()))
    assert here == there


def twins() -> list[tuple[type, type]]:
    from shoal.client import (
        async_client,
        async_group,
        async_platform,
        async_running,
        async_session,
        sync_client,
        sync_group,
        sync_platform,
        sync_running,
        sync_session,
    )

    found = []
    pairs = [
        (async_client, sync_client),
        (async_group, sync_group),
        (async_platform, sync_platform),
        (async_running, sync_running),
        (async_session, sync_session),
    ]
    for there, here in pairs:
        for name, kind in vars(there).items():
            own = inspect.isclass(kind) and kind.__module__ == there.__name__
            if own and name.startswith("Async") and kind is not AsyncOpening:
                found.append((kind, getattr(here, name.removeprefix("Async"))))
    return found


@pytest.mark.parametrize("pair", twins(), ids=lambda pair: pair[1].__name__)
def test_the_twins_are_alike(pair: tuple[type, type]) -> None:
    """The same public methods with the same parameters and words."""
    there, here = pair

    def surface(kind: type) -> dict[str, list[str]]:
        made = {}
        for name, member in vars(kind).items():
            if not name.startswith("_"):
                plain = member.fget if isinstance(member, property) else member
                made[name] = [
                    str(p).replace("Async", "") for p in inspect.signature(plain).parameters.values()
                ]
        return made

    def loose(text: str) -> str:
        return text.replace("Awaitable[T]", "T").replace("httpx.BaseTransport", "T").replace("Pools", "")

    ours, theirs = surface(here), surface(there)
    assert {name: [loose(p) for p in ps] for name, ps in ours.items()} == {
        name: [loose(p) for p in ps] for name, ps in theirs.items()
    }
    for name, member in vars(here).items():
        if not name.startswith("_"):
            assert inspect.getdoc(member), f"{here.__name__}.{name} says nothing"


def test_sandbox_lost_is_what_to_catch() -> None:
    """Errors are grouped by what the caller does next."""
    assert issubclass(SandboxLost, package.ReplaceError)
    made = error(ErrorCode.SANDBOX_LOST)(None, None)  # type: ignore[arg-type]
    assert made.json()["error"]["next"] == "replace"
