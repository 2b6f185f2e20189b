"""The client for threads. Its twin is shoal.client.async_client; a test holds them alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack

import httpx

from shoal.client import building
from shoal.client.client_core import ClientCore, Watch
from shoal.client.config import ClientConfig, resolve
from shoal.client.drivers import run
from shoal.client.effects import Op, RetryPolicy
from shoal.client.options import CreateOptions, ExecuteOptions
from shoal.client.pools import SyncPool
from shoal.client.session_core import SessionCore
from shoal.client.steps import StepCounter
from shoal.client.sync_group import SessionGroup
from shoal.client.sync_platform import Images, Pools, Snapshots
from shoal.client.sync_running import Running
from shoal.client.sync_session import Session
from shoal.contract.actions import ActionsWaited
from shoal.contract.execute import Executed
from shoal.contract.sessions import Session as SessionInfo
from shoal.contract.sessions import SessionsDelete
from shoal.contract.snapshots import Snapshot

T = TypeVar("T")


class Shoal:
    """A client of the service.

    Args:
        url, api_key: None takes `SHOAL_URL`, `SHOAL_API_KEY`, else the credentials file that `shoal up` wrote.
        max_in_flight: Requests at once, long polls counted; others wait for their turn without a time-out.
        direct: Send actions and files straight to a session's host when the service offers the way.
        policy: How long to repeat and to wait.
        transport: For tests.

    Pickles to its configuration, key included; unpickled handles of one process share one client. It keeps no
    state of sessions: one client serves any number of threads.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        config = resolve(url, api_key, max_in_flight=max_in_flight, direct=direct)
        self._set_up(ClientCore(config, policy or RetryPolicy()), transport)

    def _set_up(self, core: ClientCore, transport: httpx.BaseTransport | None) -> None:
        self._core = core
        self._pool = SyncPool(core.config, transport)
        core.drive(self._pool.patience)
        self.images = Images(self._run, core)
        self.snapshots = Snapshots(self._run, core)
        self.pools = Pools(self._run, core)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, (self._core,))

    def __repr__(self) -> str:
        return f"<Shoal {self._core.config.url}>"

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._core.config.url

    def _run(self, op: Op[T]) -> T:
        return run(op, self._pool.send)

    def close(self) -> None:
        """Closes connections; sessions live on."""
        self._pool.close()

    def __enter__(self) -> Shoal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
    ) -> Session:
        """One session: new from an image or a snapshot, the one of that `name` in its run, or that of an `id`.

        Use it as `with shoal.session(...) as box:`, or keep the handle.

        Args:
            steps: What the ids of this handle's steps begin with (see shoal.client.steps).
            keep: Whether leaving the block keeps the session; None as Session says.
            wait: Whether to wait until it runs; actions wait by themselves.
            timeout_s: Seconds to wait for it; then `WaitTimeout`, and the session stays queued. None waits on.
            watch: Called with the session at each change of state or phase.

        Raises:
            SessionEnded: It ended instead of running; `details["end"]` tells why.
        """
        counter = StepCounter(steps)

        if id is not None:
            info = self._run(self._core.session(id))
            if wait:
                info = self._run(self._core.until_ready(info, timeout_s=timeout_s, watch=watch))
        else:
            asked = building.session_create(image, snapshot, name, options)
            info = self._run(self._core.create(asked, wait=wait, timeout_s=timeout_s, watch=watch))
        return Session(self, SessionCore(self._core, info, counter), keep)

    def sessions(
        self,
        image: str | None = None,
        *,
        snapshot: str | Snapshot | None = None,
        count: int | None = None,
        names: Sequence[str] | None = None,
        steps: str = "step",
        wait_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> SessionGroup:
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
        infos = self._run(self._core.group(bodies, wait_s=wait_s))
        boxes = [Session(self, SessionCore(self._core, info, StepCounter(steps))) for info in infos]
        return SessionGroup(self, boxes)

    def list_sessions(
        self,
        *,
        run: str | None = None,
        name: str | None = None,
        state: str | None = None,
        labels: dict[str, str] | None = None,
    ) -> Iterator[SessionInfo]:
        """Sessions that match, page by page; ended ones only with `state="ended"`."""
        params = {"run": run, "name": name, "state": state, "cursor": None}
        params.update({f"label.{key}": value for key, value in (labels or {}).items()})
        while True:
            page = self._run(self._core.sessions(params))
            yield from page.sessions
            if page.cursor is None:
                return
            params["cursor"] = page.cursor

    def delete_sessions(self, *, ids: Sequence[str] | None = None, run: str | None = None) -> list[str]:
        """Ends many sessions, or a whole run, by one call per ten thousand; gives the ids that are ending by it."""
        if ids is None:
            asked = building.model(SessionsDelete, building.given({"run": run}))
            return list((self._run(self._core.delete_sessions(asked))).ids)
        gone: list[str] = []
        for at in range(0, len(ids), 10_000):
            asked = building.model(SessionsDelete, {"ids": list(ids[at : at + 10_000])})
            gone.extend((self._run(self._core.delete_sessions(asked))).ids)
        return gone

    def wait(
        self,
        running: Sequence[Running | tuple[str, str]],
        *,
        mode: Literal["any", "all"] = "all",
        timeout_s: float | None = None,
    ) -> ActionsWaited:
        """Waits for any or all of many actions of many sessions by one poll; `(session id, action id)` names one.

        When `timeout_s` passes, it gives how they are then, with `satisfied` False.
        """
        ids = [one if isinstance(one, tuple) else (one.session_id, one.id) for one in running]
        return self._run(self._core.wait(ids, mode=mode, timeout_s=timeout_s))

    def execute(
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
        return self._run(self._core.execute(image, program, options))


_shared: weakref.WeakValueDictionary[tuple[ClientConfig, RetryPolicy], Shoal] = weakref.WeakValueDictionary()


def _unpickled(core: ClientCore) -> Shoal:
    key = (core.config, core.policy)
    client = _shared.get(key)
    if client is None:
        client = Shoal.__new__(Shoal)
        client._set_up(core, None)
        _shared[key] = client
    return client
