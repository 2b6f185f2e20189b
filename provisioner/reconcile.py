"""The loop that keeps hosts and records as they should be: observe, plan, execute; when woken, and now and then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol, runtime_checkable

from provisioner import keys, spread
from provisioner.capacity.port import Capacity, CapacityError
from provisioner.context import Context, log
from provisioner.executor import Executor
from provisioner.images import Images
from provisioner.model import Group, load
from provisioner.observe import observe, policy_of
from provisioner.plan import Plan, Policy
from provisioner.planner import plan
from provisioner.sessions import Sessions
from provisioner.sessions.groups import STALE_S
from provisioner.snapshots import Snapshots
from provisioner.store.port import ConditionFailed
from provisioner.transfers import Transfers
from shoal.contract.base import HostId
from shoal.contract.errors import ShoalError
from shoal.contract.states import HostState

#: Seconds between rounds of what need not be done at every tick.
_CHORES_S = 15.0
#: The same while nothing runs or waits: most of what a look reads then is for chores (costs/at_rest.py has the price).
_QUIET_CHORES_S = 300.0
_CLEAN_S = 300.0
#: Seconds between two ticks at the least.
_AT_LEAST_S = 0.1
_GONE = frozenset({HostState.LOST, HostState.GONE})


@runtime_checkable
class Cleans(Protocol):
    """A store that has to be told to drop what expired."""

    async def clean(self, now: datetime, *, limit: int = 1000) -> int: ...


class Reconciler:
    """One tick at a time.

    Attributes:
        last: The plan of the last tick.
        pending: Whether another tick soon may find more to do: the last one did something, or hosts are starting.
    """

    def __init__(
        self,
        context: Context,
        capacity: Capacity,
        executor: Executor,
        sessions: Sessions,
        snapshots: Snapshots,
        images: Images,
        transfers: Transfers,
        raw_store: object,
    ) -> None:
        self._context = context
        self._capacity = capacity
        self._executor = executor
        self._sessions = sessions
        self._snapshots = snapshots
        self._images = images
        self._transfers = transfers
        self._raw_store = raw_store
        self._policy = _policy(context)
        self._chores_at: float | None = None
        self._cleaned_at: float | None = None
        self.last = Plan()
        self.pending = False

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            try:
                await self.tick()
            except (ShoalError, CapacityError, ConditionFailed) as error:
                log.warning("reconcile.failed", reason=str(error))
            except Exception:  # noqa: BLE001 - the loop's top: logged, and tried again
                log.exception("reconcile.broke")
            # Who wakes it in a burst wakes it for all: a look at everything is not for every one of them.
            await self._context.clock.sleep(_AT_LEAST_S)
            await self._context.wake_reconciler.wait(self._context.settings.reconcile_s)

    async def tick(self) -> Plan:
        """Observe, plan, execute once; answers the plan."""
        context = self._context
        await context.demand.flush(context.store)
        view = await observe(context, self._capacity)
        now = context.clock.now()
        oldest = min((each.since for each in view.waiting if each.since is not None), default=None)
        if oldest is not None:
            # Terraform's module `observability` makes a metric of it.
            log.info("reconcile.queue", waiting=len(view.waiting), queue_age_s=(now - oldest).total_seconds())
        decided = plan(view, self._policy, now)
        if not context.execution_enabled:
            decided = replace(decided, start={}, resume={})
        if not decided.empty:
            log.info(
                "reconcile.plan",
                start=dict(decided.start),
                lose=[each.host for each in decided.lose],
                drain=list(decided.drain),
                undrain=list(decided.undrain),
                stop=[each.instance for each in decided.stop],
                levels=len(decided.levels),
                expire=len(decided.expire),
            )
            await self._executor.execute(decided)
        self.last = decided
        self.pending = not decided.empty or any(host.state is HostState.STARTING for host in view.hosts)
        quiet = not (self.pending or view.hosts or view.waiting or view.wanted)
        # By the time of day: in a function that is frozen between its calls no other clock is sure to go on.
        at = context.clock.now().timestamp()
        if self._chores_at is None or at - self._chores_at >= (_QUIET_CHORES_S if quiet else _CHORES_S):
            self._chores_at = at
            there = frozenset(host.view.id for host in view.hosts if host.state not in _GONE)
            await self._chores(there)
        return decided

    async def _chores(self, hosts: frozenset[HostId]) -> None:
        chores: list[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("keys", self._context.signer.refresh),
            ("groups", self._groups),
            ("images", self._images.recover),
            ("snapshots", lambda: self._snapshots.recover(hosts)),
            ("transfers", self._transfers.sweep),
            ("machines", self._executor.settle),
            ("clean", self._clean),
        ]
        for name, chore in chores:
            try:
                await chore()
            except (ShoalError, CapacityError, ConditionFailed) as error:
                log.warning("chore.failed", chore=name, reason=str(error))

    async def _groups(self) -> None:
        """Finish groups that their makers left; while nothing may be started they stay as they are."""
        if not self._context.execution_enabled:
            return
        stale = self._context.clock.now() - timedelta(seconds=STALE_S)
        for stored in await spread.everything(self._context.store, keys.groups()):
            group = load(Group, stored.item)
            if group.created_at < stale:
                await self._sessions.groups.resume(group)

    async def _clean(self) -> None:
        now = self._context.clock.monotonic()
        if isinstance(self._raw_store, Cleans) and (
            self._cleaned_at is None or now - self._cleaned_at >= _CLEAN_S
        ):
            self._cleaned_at = now
            while await self._raw_store.clean(self._context.clock.now()) >= 1000:
                continue


def _policy(context: Context) -> Policy:
    policy = policy_of(context.settings)
    if context.execution_enabled:
        return policy
    # Spending is frozen: what is idle goes, down to nothing.
    return replace(policy, pools=tuple(replace(pool, min_hosts=0) for pool in policy.pools))
