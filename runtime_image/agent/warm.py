"""Warm sandboxes: started ahead, handed over once each, first to go when a session needs the room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from runtime_image.agent.admission import Reservation
from runtime_image.agent.clock import Clock
from runtime_image.agent.hosted import workdir_of
from runtime_image.agent.keeper import Keeper
from runtime_image.agent.layer_store import LayerStore
from runtime_image.agent.link import GuestLink, LinkError
from runtime_image.agent.ports import RuntimePort
from runtime_image.agent.sandboxes import Limits, SandboxRuntimeError
from runtime_image.agent.starting import Started, Starter, prepare_workdir
from shoal.contract.base import new_id
from shoal.contract.errors import ShoalError
from shoal.contract.host import SandboxSource, WarmKey, WarmOrder, WarmReport

#: What a sandbox is held at until a session claims it; cpu, memory and pids are set at the claim.
WARM_MEMORY_MIB = 256
WARM_CPU_MILLIS = 1000
WARM_PIDS = 128
#: The /dev/shm of warm sandboxes, MiB: it cannot be changed later, so a session that wants another starts cold.
WARM_SHM_MIB = 64
_PING_TIMEOUT_S = 0.5
_BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class WarmSandbox:
    """One sandbox that waits."""

    sandbox_id: str
    key: WarmKey
    started: Started
    reservation: Reservation


@dataclass(kw_only=True)
class _Level:
    source: SandboxSource
    #: None until the control plane has said it: what was adopted is neither drained nor refilled.
    count: int | None
    ready: list[WarmSandbox] = field(default_factory=list)
    starting: int = 0
    failures: int = 0
    not_before: float = 0.0
    error: str | None = None


class WarmPool:
    """Keeps as many warm sandboxes of each key as it was told, one refill after another, behind all claims."""

    def __init__(
        self,
        *,
        runtime: RuntimePort,
        starter: Starter,
        layers: LayerStore,
        keeper: Keeper,
        clock: Clock,
        concurrency: int,
        may_add: Callable[[Reservation], bool],
    ) -> None:
        """`may_add` tells whether there is room for one more beside everything else."""
        self._runtime = runtime
        self._starter = starter
        self._layers = layers
        self._keeper = keeper
        self._clock = clock
        self._may_add = may_add
        self._concurrency = concurrency
        self._levels: dict[WarmKey, _Level] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        #: What happened so far, for the metrics.
        self.hits = self.misses = self.dead = self.evicted = self.started = 0

    def set_orders(self, orders: Iterable[WarmOrder]) -> None:
        """The levels from now on; a key not named is 0."""
        wanted = {order.key: order for order in orders}
        for key, level in self._levels.items():
            if key not in wanted:
                level.count = 0
        for key, order in wanted.items():
            level = self._levels.setdefault(key, _Level(source=order.source, count=0))
            level.source, level.count = order.source, order.count
        self.tend()

    def reservations(self) -> Mapping[str, Reservation]:
        """What each warm sandbox holds, by id, oldest first; those being started are under names of their own."""
        held = {one.sandbox_id: one.reservation for level in self._levels.values() for one in level.ready}
        for key, level in self._levels.items():
            for n in range(level.starting):
                held[f"starting-{key.digest}-{key.disk_mib}-{n}"] = warm_reservation(key)
        return held

    def report(self) -> list[WarmReport]:
        """How many there are of each key that has or should have some."""
        return [
            WarmReport(key=key, ready=len(level.ready), starting=level.starting, error=level.error)
            for key, level in self._levels.items()
            if level.count or level.ready or level.starting
        ]

    def peek(self, key: WarmKey) -> str | None:
        """The id of the one that `take` would try first; None when there is none."""
        level = self._levels.get(key)
        return level.ready[-1].sandbox_id if level is not None and level.ready else None

    async def take(self, key: WarmKey) -> tuple[str, Started] | None:
        """Hand one over, checked alive just now; it is the caller's from then on. Dead ones are counted."""
        level = self._levels.get(key)
        while level is not None and level.ready:
            one = level.ready.pop()
            if await self._alive(one):
                self.hits += 1
                self.tend()
                return one.sandbox_id, one.started
            self.dead += 1
            _log_dead(one)
            self._spawn(self._remove(one))
        self.misses += 1
        self.tend()
        return None

    async def _alive(self, one: WarmSandbox) -> bool:
        link = one.started.link
        if link.closed.is_set():
            return False
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await ping(link)
        except (TimeoutError, LinkError):
            return False
        return True

    def adopt(self, one: WarmSandbox, source: SandboxSource) -> None:
        """Take over a warm sandbox of an earlier agent. Its level is 0 until the control plane says otherwise, and
        nothing is drained before `set_orders`."""
        self._levels.setdefault(one.key, _Level(source=source, count=None)).ready.append(one)

    def evict(self, sandbox_ids: Iterable[str]) -> None:
        """Make room: these go now."""
        gone = set(sandbox_ids)
        for level in self._levels.values():
            for one in [one for one in level.ready if one.sandbox_id in gone]:
                level.ready.remove(one)
                self.evicted += 1
                # Not refilled at once: the room was needed.
                level.not_before = self._clock.monotonic() + _BACKOFF_S[1]
                self._spawn(self._remove(one))

    def tend(self) -> None:
        """Start what is missing, as far as there is room and nobody more important starts; stop what is too much."""
        if self._closed:
            return
        for key, level in list(self._levels.items()):
            while level.count is not None and len(level.ready) > level.count:
                self._spawn(self._remove(level.ready.pop(0)))
            self._refill(key, level)
            if level.count == 0 and not level.ready and not level.starting:
                del self._levels[key]

    def _refill(self, key: WarmKey, level: _Level) -> None:
        while (
            len(level.ready) + level.starting < (level.count or 0)
            and sum(one.starting for one in self._levels.values()) < self._concurrency
            and not self._starter.claims
            and self._clock.monotonic() >= level.not_before
            and self._may_add(warm_reservation(key))
        ):
            level.starting += 1
            self._spawn(self._start(key, level))

    async def _start(self, key: WarmKey, level: _Level) -> None:
        sandbox_id = new_id("wrm")
        limits = Limits(
            cpu_millis=WARM_CPU_MILLIS,
            memory_mib=WARM_MEMORY_MIB,
            disk_mib=key.disk_mib,
            pids=WARM_PIDS,
            shm_mib=WARM_SHM_MIB,
        )
        source = level.source
        try:
            started = await self._starter.cold(sandbox_id, source, limits, {})
        except ShoalError as error:
            level.error = error.message
            level.not_before = self._clock.monotonic() + _BACKOFF_S[min(level.failures, len(_BACKOFF_S) - 1)]
            level.failures += 1
            structlog.get_logger().warning("warm.start_failed", digest=key.digest, code=error.code.value)
            return
        finally:
            level.starting -= 1
        try:
            await prepare_workdir(started.link, started.stack, workdir_of(source.config), source.config.user)
        except LinkError:
            # Seen at the hand-over, if it is gone.
            pass
        self.started += 1
        level.error, level.failures = None, 0
        one = WarmSandbox(sandbox_id=sandbox_id, key=key, started=started, reservation=warm_reservation(key))
        if self._closed:
            await self._remove(one)
            return
        self._keeper.keep_warm(sandbox_id, started, key, source)
        level.ready.append(one)
        self.tend()

    async def _remove(self, one: WarmSandbox) -> None:
        one.started.link.close()
        self._keeper.drop(one.sandbox_id)
        try:
            await self._runtime.stop(one.sandbox_id)
        except SandboxRuntimeError as error:
            structlog.get_logger().error("warm.stop_failed", sandbox_id=one.sandbox_id, error=str(error))
        self._layers.release(one.started.stack)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop all of them and start no more."""
        self._closed = True
        for level in self._levels.values():
            level.count = 0
            while level.ready:
                self._spawn(self._remove(level.ready.pop()))
        while self._tasks:
            await asyncio.wait(set(self._tasks))


async def ping(link: GuestLink) -> None:
    """One round trip to the guest: the smallest request there is."""
    await link.request({"op": "list", "after": "\x7f"})


def warm_reservation(key: WarmKey) -> Reservation:
    """What a warm sandbox holds of the host."""
    return Reservation(cpu_millis=0, memory_mib=WARM_MEMORY_MIB, disk_mib=key.disk_mib)


def _log_dead(one: WarmSandbox) -> None:
    structlog.get_logger().warning("warm.dead_at_hand_over", sandbox_id=one.sandbox_id, digest=one.key.digest)
