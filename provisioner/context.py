"""What the use cases share: one frozen bundle instead of a dozen arguments each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from provisioner.agents.port import AgentClient
from provisioner.blobs.port import Blobs
from provisioner.clock import Clock, event_or_time
from provisioner.demand import DemandLog
from provisioner.fleet import Fleet
from provisioner.manifests import Sources
from provisioner.pins import Pins
from provisioner.route_tokens import RouteSigner
from provisioner.settings import ProvisionerSettings
from provisioner.store.steady import SteadyStore
from provisioner.waiters import Waiters

Ids = Callable[[str], str]
log = structlog.get_logger("provisioner")


class Wake:
    """Wakes loops: each `wait` returns at the next `set`, or after its time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = asyncio.Event()

    def set(self) -> None:
        """There is something to do."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether there is something to do that nobody waited for yet."""
        return self._event.is_set()

    def clear(self) -> None:
        """It is being seen to."""
        self._event.clear()

    async def wait(self, seconds: float) -> None:
        """Return when there is something to do, or after `seconds`."""
        await event_or_time(self._clock, self._event, seconds)
        self._event.clear()


class Background:
    """Tasks that go on after the call that began them; `close` waits for them and ends what does not end.

    A process may die, or be stopped between two calls (Lambda), with any of them half done. So none may be the only one
    that sees to something: what it does is also found undone, and done, by others (`provisioner.turns` lists by whom).
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._long: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], what: str, *, long: bool = False) -> asyncio.Task[Any]:
        """Begin; a failure is logged.

        Args:
            long: It may take longer than any call; `settle` does not wait for it.
        """
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        if long:
            self._long.add(task)
        task.add_done_callback(self._done)
        return task

    async def settle(self, clock: Clock, within_s: float) -> bool:
        """Wait until nothing runs but what is long, at most so many seconds; answers whether it came to that."""
        slept = asyncio.ensure_future(clock.sleep(within_s))
        try:
            while (short := self._tasks - self._long) and not slept.done():
                await asyncio.wait({slept, *short}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            slept.cancel()
        return not short

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._long.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("background.failed", what=task.get_name(), exc_info=task.exception())

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self, grace_s: float = 5.0) -> None:
        """Wait up to `grace_s`, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the use cases share.

    Attributes:
        ids: Makes an id of a kind.
        replica: This process's name among its equals.
        chance: For placement's draw and for jitter.
        wake_queue, wake_reconciler: Set when somebody waits for a place, or for hosts.
        execution_enabled: False takes no new session and no prepare, and starts no host.
    """

    store: SteadyStore
    blobs: Blobs
    agents: AgentClient
    clock: Clock
    ids: Ids
    settings: ProvisionerSettings
    signer: RouteSigner
    replica: str
    chance: random.Random
    waiters: Waiters
    fleet: Fleet
    sources: Sources
    pins: Pins
    demand: DemandLog
    background: Background
    wake_queue: Wake
    wake_reconciler: Wake
    execution_enabled: bool = True
