"""Waiting for many actions at once, with a bounded number of requests at the agents."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Protocol

from provisioner.auth import Principal
from shoal.contract.actions import ActionRecord, ActionsWait, ActionsWaited, WaitItem
from shoal.contract.base import SessionId
from shoal.contract.errors import Next, ShoalError
from shoal.contract.states import ActionStatus

_UNDER_WAY = (ActionStatus.QUEUED, ActionStatus.RUNNING)
#: The longest one request waits at an agent while others are in the line behind it.
_TURN_S = 1.0


class Recorder(Protocol):
    """What waiting needs of the agents."""

    async def record(
        self, who: Principal, session: SessionId, action: str, *, wait_s: float = 0.0, output: bool = True
    ) -> ActionRecord:
        """The record of an action."""


async def wait_for_actions(
    recorder: Recorder,
    who: Principal,
    body: ActionsWait,
    *,
    fan_out: int,
    clock: Callable[[], float] = time.monotonic,
) -> ActionsWaited:
    """Wait until any or all of the actions have ended, or `body.wait_s` has passed.

    Each round asks for those still under way, `fan_out` at a time. The first round does not wait. Later ones do, at
    the agents, for as long as the deadline allows where all fit into one round, else for a turn of a second.

    Args:
        fan_out: How many requests are in flight at once.
        clock: Monotonic seconds.
    """
    wait = _Wait(recorder, who, body, fan_out, clock)
    return await wait.run()


class _Wait:
    def __init__(
        self, recorder: Recorder, who: Principal, body: ActionsWait, fan_out: int, clock: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._who = who
        self._mode = body.mode
        self._clock = clock
        self._fan_out = fan_out
        self._deadline = clock() + body.wait_s
        self._ids = body.ids
        self._items: dict[tuple[SessionId, str], WaitItem] = {}

    async def run(self) -> ActionsWaited:
        open_ids = list(dict.fromkeys(self._ids))
        await self._round(open_ids, wait_s=0.0)
        while not self._satisfied():
            left = self._deadline - self._clock()
            if left <= 0:
                break
            open_ids = [id for id in open_ids if not self._ended(id)]
            # Another order each round: with more actions than `fan_out` none waits behind the same others for ever.
            random.shuffle(open_ids)
            turn = left if len(open_ids) <= self._fan_out else min(_TURN_S, left)
            await self._round(open_ids, wait_s=turn)
        return ActionsWaited(satisfied=self._satisfied(), items=[self._items[id] for id in self._ids])

    async def _round(self, ids: list[tuple[SessionId, str]], *, wait_s: float) -> None:
        line = iter(ids)

        async def work() -> None:
            for id in line:
                left = self._deadline - self._clock()
                await self._ask(id, max(0.0, min(wait_s, left)))
                if wait_s > 0 and (left <= 0 or (self._mode == "any" and self._ended(id))):
                    return

        workers = {asyncio.create_task(work()) for _ in range(min(self._fan_out, len(ids)))}
        pending = workers
        try:
            while pending and not (wait_s > 0 and self._mode == "any" and self._satisfied()):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for worker in done:
                    worker.result()
        finally:
            for worker in pending:
                worker.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _ask(self, id: tuple[SessionId, str], wait_s: float) -> None:
        session, action = id
        try:
            record = await self._recorder.record(self._who, session, action, wait_s=wait_s, output=False)
        except ShoalError as error:
            self._items[id] = WaitItem(session=session, action=action, error=error.body().error)
            if wait_s > 0 and error.next in (Next.RETRY, Next.WAIT):
                await asyncio.sleep(min(error.retry_after_s or 1.0, wait_s))
        else:
            self._items[id] = WaitItem(session=session, action=action, status=record.status)

    def _ended(self, id: tuple[SessionId, str]) -> bool:
        """Whether waiting for it longer is of no use: it ended, or its session will not tell."""
        item = self._items[id]
        if item.error is not None:
            return item.error.next not in (Next.RETRY.value, Next.WAIT.value)
        return item.status not in _UNDER_WAY

    def _satisfied(self) -> bool:
        ended = (self._ended(id) for id in self._items)
        return any(ended) if self._mode == "any" else all(ended)
