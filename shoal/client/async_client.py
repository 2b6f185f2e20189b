"""The client for asyncio. Its twin is shoal.client.sync_client; a test holds them alike."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Generator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack

import httpx

from shoal.client import building
from shoal.client.async_group import AsyncSessionGroup
from shoal.client.async_platform import AsyncImages, AsyncPools, AsyncSnapshots
from shoal.client.async_running import AsyncRunning
from shoal.client.async_session import AsyncSession
from shoal.client.client_core import ClientCore, Watch
from shoal.client.config import ClientConfig, resolve
from shoal.client.drivers import arun
from shoal.client.effects import Op, RetryPolicy
from shoal.client.options import CreateOptions, ExecuteOptions
from shoal.client.pools import AsyncPool
from shoal.client.session_core import SessionCore
from shoal.client.steps import StepCounter
from shoal.contract.actions import ActionsWaited
from shoal.contract.execute import Executed
from shoal.contract.sessions import Session as SessionInfo
from shoal.contract.sessions import SessionsDelete
from shoal.contract.snapshots import Snapshot

T = TypeVar("T")


class AsyncShoal:
    """A client of the service.

    Args:
        url, api_key: None takes `SHOAL_URL`, `SHOAL_API_KEY`, else the credentials file that `shoal up` wrote.
        max_in_flight: Requests at once, long polls counted; others wait for their turn without a time-out.
        direct: Send actions and files straight to a session's host when the service offers the way.
        policy: How long to repeat and to wait.
        transport: For tests.

    Pickles to its configuration, key included; unpickled handles of one process share one client. It keeps no
    state of sessions: one client serves any number of tasks of its event loop.

    Raises:
        ConfigError: No URL or no key is known.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        max_in_flight: int | None = None,
        direct: bool = False,
        policy: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        config = resolve(url, api_key, max_in_flight=max_in_flight, direct=direct)
        self._set_up(ClientCore(config, policy or RetryPolicy()), transport)

    def _set_up(self, core: ClientCore, transport: httpx.AsyncBaseTransport | None) -> None:
        self._core = core
        self._pool = AsyncPool(core.config, transport)
        core.drive(self._pool.patience)
        self.images = AsyncImages(self._run, core)
        self.snapshots = AsyncSnapshots(self._run, core)
        self.pools = AsyncPools(self._run, core)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, (self._core,))

    def __repr__(self) -> str:
        return f"<AsyncShoal {self._core.config.url}>"

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._core.config.url

    async def _run(self, op: Op[T]) -> T:
        return await arun(op, self._pool.send)

    async def close(self) -> None:
        """Closes connections; sessions live on."""
        await self._pool.close()

    async def __aenter__(self) -> AsyncShoal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def session(
        self,
        image: str | None = None,
        *,
        snapshot: str | Snapshot | None = None,
        id: str | None = None,
        name: str | None = None,
        steps: str = "step",
        keep: bool | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
        watch: Watch | None = None,
        **options: Unpack[CreateOptions],
    ) -> AsyncOpening:
        """One session: new from an image or a snapshot, the one of that `name` in its run, or that of an `id`.

        Use it as `async with shoal.session(...) as box:` or `box = await shoal.session(...)`.

        Args:
            steps: What the ids of this handle's steps begin with (see shoal.client.steps).
            keep: Whether leaving the block keeps the session; None as AsyncSession says.
            wait: Whether to wait until it runs; actions wait by themselves.
            timeout_s: Seconds to wait for it; then `WaitTimeout`, and the session stays queued. None waits on.
            watch: Called with the session at each change of state or phase.

        Raises:
            SessionEnded: It ended instead of running; `details["end"]` tells why.
        """
        counter = StepCounter(steps)

        async def open_it() -> AsyncSession:
            if id is not None:
                info = await self._run(self._core.session(id))
                if wait:
                    ready = self._core.until_ready(info, timeout_s=timeout_s, watch=watch)
                    info = await self._run(ready)
            else:
                asked = building.session_create(image, snapshot, name, options)
                info = await self._run(self._core.create(asked, wait=wait, timeout_s=timeout_s, watch=watch))
            return AsyncSession(self, SessionCore(self._core, info, counter), keep)

        return AsyncOpening(open_it)

    async def sessions(
        self,
        image: str | None = None,
        *,
        snapshot: str | Snapshot | None = None,
        count: int | None = None,
        names: Sequence[str] | None = None,
        steps: str = "step",
        wait_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> AsyncSessionGroup:
        """A group of like sessions: `count` new ones, or one per name (which a restarted script finds again).

        They are placed or queued by one call per thousand; actions wait until their session runs.

        Args:
            wait_s: Seconds, at most 25, that the call may wait for them to run.

        Raises:
            ServiceError: One could not be made; then none is left but named ones.
        """
        if (count is None) == (names is None):
            raise TypeError("give exactly one of `count` and `names`")
        bodies = building.group_bodies(image, snapshot, count, names, options)
        infos = await self._run(self._core.group(bodies, wait_s=wait_s))
        boxes = [AsyncSession(self, SessionCore(self._core, info, StepCounter(steps))) for info in infos]
        return AsyncSessionGroup(self, boxes)

    async def list_sessions(
        self,
        *,
        run: str | None = None,
        name: str | None = None,
        state: str | None = None,
        labels: dict[str, str] | None = None,
    ) -> AsyncIterator[SessionInfo]:
        """Sessions that match, page by page; ended ones only with `state="ended"`."""
        params = {"run": run, "name": name, "state": state, "cursor": None}
        params.update({f"label.{key}": value for key, value in (labels or {}).items()})
        while True:
            page = await self._run(self._core.sessions(params))
            for info in page.sessions:
                yield info
            if page.cursor is None:
                return
            params["cursor"] = page.cursor

    async def delete_sessions(self, *, ids: Sequence[str] | None = None, run: str | None = None) -> list[str]:
        """Ends many sessions, or a whole run, by one call per ten thousand; gives the ids that are ending by it."""
        if ids is None:
            asked = building.model(SessionsDelete, building.given({"run": run}))
            return list((await self._run(self._core.delete_sessions(asked))).ids)
        gone: list[str] = []
        for at in range(0, len(ids), 10_000):
            asked = building.model(SessionsDelete, {"ids": list(ids[at : at + 10_000])})
            gone.extend((await self._run(self._core.delete_sessions(asked))).ids)
        return gone

    async def wait(
        self,
        running: Sequence[AsyncRunning | tuple[str, str]],
        *,
        mode: Literal["any", "all"] = "all",
        timeout_s: float | None = None,
    ) -> ActionsWaited:
        """Waits for any or all of many actions of many sessions by one poll; `(session id, action id)` names one.

        When `timeout_s` passes, it gives how they are then, with `satisfied` False.
        """
        ids = [one if isinstance(one, tuple) else (one.session_id, one.id) for one in running]
        return await self._run(self._core.wait(ids, mode=mode, timeout_s=timeout_s))

    async def execute(
        self,
        image: str,
        argv: Sequence[str] | None = None,
        *,
        code: str | None = None,
        language: Literal["python", "bash", "sh", "c", "c++"] | None = None,
        **options: Unpack[ExecuteOptions],
    ) -> Executed:
        """One stateless call in a sandbox of its own: `argv`, or `code` (python unless `language` says otherwise)."""
        if code is not None and language is None:
            language = "python"
        program = {"argv": argv, "code": code, "language": language}
        return await self._run(self._core.execute(image, program, options))


class AsyncOpening:
    """A session about to be made or found: await it, or enter it."""

    def __init__(self, open_it: Any) -> None:
        self._open = open_it
        self._box: AsyncSession | None = None

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        box: AsyncSession = yield from self._open().__await__()
        return box

    async def __aenter__(self) -> AsyncSession:
        self._box = await self
        return await self._box.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._box is not None:
            await self._box.__aexit__(kind, error, trace)


_shared: weakref.WeakValueDictionary[tuple[ClientConfig, RetryPolicy], AsyncShoal] = (
    weakref.WeakValueDictionary()
)


def _unpickled(core: ClientCore) -> AsyncShoal:
    key = (core.config, core.policy)
    client = _shared.get(key)
    if client is None:
        client = AsyncShoal.__new__(AsyncShoal)
        client._set_up(core, None)
        _shared[key] = client
    return client
