"""The Lambda function of the reconciler: `provisioner.handlers.reconcile`.

What invokes it: a schedule (every minute), the wake items of the table's stream (filtered to `pk = WAKE`), and events
of ECS, EC2 and Spot by EventBridge. None of them says anything but that it is time to look: state is read. It runs
outside the network of the hosts and reaches none of them; what hosts are to do travels in the replies to their
heartbeats.

A batch of the stream never fails: its records only wake, so there is nothing to repeat, and a batch that failed would
be repeated for as long as the stream keeps it, holding up newer ones. What did not work is logged, and left to the
schedule, whose invocation does fail when the store does not answer: that is what an alarm on errors sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from provisioner.logs import configure

if TYPE_CHECKING:
    from provisioner.services import Services

_process: _Process | None = None


class _Process:
    """What lasts from one invocation to the next: the loop, and the services on it."""

    def __init__(self) -> None:
        configure()
        self.loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._services: Services | None = None

    async def services(self) -> Services:
        """The services, opened at first use."""
        if self._services is None:
            from provisioner.aws.profile import open_services
            from provisioner.aws.settings import AwsSettings
            from provisioner.settings import ProvisionerSettings

            opening = open_services(AwsSettings(), ProvisionerSettings(), role="reconciler")
            self._services = await self._stack.enter_async_context(opening)
        return self._services

    def close(self) -> None:
        """Close everything; for tests, since a function is frozen and never closed."""
        self.loop.run_until_complete(self._stack.aclose())
        self.loop.close()


def reconcile(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Reconcile until nothing is to do, or the invocation's time is over.

    Args:
        event: A scheduled event, an event of EventBridge, or a batch of the table's stream.
        context: Lambda's own; its remaining time is what there is.

    Returns:
        For a batch of the stream, that no record failed; else what was done: `ticks`, `failed`, `pending`.

    Raises:
        ShoalError, StoreError: The store does not answer, or refuses, and it was no batch of the stream.
    """
    global _process
    if _process is None:
        _process = _Process()
    return _process.loop.run_until_complete(_reconcile(_process, event, context))


def close() -> None:
    """Forget what is kept between invocations; for tests."""
    global _process
    if _process is not None:
        _process.close()
        _process = None


async def _reconcile(process: _Process, event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    from provisioner.context import log
    from provisioner.store.port import StoreError
    from shoal.contract.errors import ShoalError

    records = event.get("Records")
    try:
        services = await process.services()
        shift = await services.shifts.work(_left_s(context), marked=records is not None)
    except (ShoalError, StoreError) as error:
        if records is None:
            raise
        log.warning("reconcile.failed", reason=str(error), records=len(records))
        return {"batchItemFailures": []}
    log.info("reconcile.done", ticks=shift.ticks, failed=shift.failed, pending=shift.pending)
    if records is not None:
        return {"batchItemFailures": []}
    return {"ticks": shift.ticks, "failed": shift.failed, "pending": shift.pending}


def _left_s(context: Any) -> Callable[[], float]:
    def left() -> float:
        return float(context.get_remaining_time_in_millis()) / 1000

    return left
