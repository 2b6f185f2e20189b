"""One step in flight: from its arrival to its observation."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Literal

from runtime_image.agent.journal.file import Entry, Recorded, record_json
from shoal.contract.actions import Action
from shoal.contract.states import ActionStatus

if TYPE_CHECKING:
    from runtime_image.agent.link import GuestProcess
    from runtime_image.agent.ports import KillGroup

KillReason = Literal["timeout", "kill", "end"]


class Batch:
    """Steps that were asked for as one list: the first failure stops the rest, unless `keep_going`."""

    def __init__(self, *, keep_going: bool) -> None:
        self.keep_going = keep_going
        self.stopped = False


class ActionRun:
    """A step that is queued, runs, or has just ended.

    `settled` is set when there is an answer for good: done, unknown, or skipped in its list. `answerable` is set at
    `settled`, and for a background command as soon as it has started.
    """

    __slots__ = (
        "_give_up_s",
        "_task",
        "action",
        "answerable",
        "batch",
        "body",
        "entry",
        "failed",
        "given_up",
        "group",
        "id",
        "is_error",
        "kept",
        "kill_reason",
        "killer",
        "owns_group",
        "process",
        "process_changed",
        "settled",
        "sha",
        "skipped",
        "status",
    )

    def __init__(self, *, id: str, action: Action, kept: bytes, sha: str, batch: Batch | None = None) -> None:
        self.id = id
        self.action = action
        self.kept = kept
        self.sha = sha
        self.batch = batch
        self.status = ActionStatus.QUEUED
        self.entry: Entry | None = None
        self.body: bytes | None = None
        self.is_error = False
        self.failed = False
        self.skipped = False
        self.process: GuestProcess | None = None
        self.group: KillGroup | None = None
        #: Whether the group goes with the step; that of a named shell or context outlives it.
        self.owns_group = True
        self.kill_reason: KillReason | None = None
        self.killer: asyncio.TimerHandle | None = None
        self.given_up = False
        self._task: asyncio.Task[object] | None = None
        self._give_up_s = 0.0
        self.settled = asyncio.Event()
        self.answerable = asyncio.Event()
        self.process_changed = asyncio.Event()

    @property
    def seq(self) -> int | None:
        """Its place in the session; None while queued."""
        return self.entry.seq if self.entry else None

    def kill(self, reason: KillReason) -> None:
        """Kill every process of the step. The first reason counts; before the fork it prevents the fork."""
        if self.kill_reason is None and not self.settled.is_set():
            self.kill_reason = reason
        if self.group is not None:
            self.group.kill()
        if self._task is not None:
            asyncio.get_running_loop().call_later(self._give_up_s, self._give_up)

    def give_up_after(self, seconds: float, task: asyncio.Task[object]) -> None:
        """From a kill on, let `task` wait no longer than that: it is cancelled with `given_up` set."""
        self._task, self._give_up_s = task, seconds
        if self.kill_reason is not None:
            asyncio.get_running_loop().call_later(seconds, self._give_up)

    def forget_task(self) -> None:
        """Nobody waits for the process any more."""
        self._task = None

    def _give_up(self) -> None:
        if self._task is not None:
            self.given_up = True
            self._task.cancel()

    def attach(self, process: GuestProcess) -> None:
        """The step's process runs: it can be read, fed and killed from now on."""
        self.process = process
        self.process_changed.set()

    def record(
        self, session: str, epoch: int, *, observation: bytes | None = None, replayed: bool = False
    ) -> bytes:
        """The step's `ActionRecord`, as JSON. `observation` is what was printed so far, while it runs."""
        if self.entry is None:
            return (
                f'{{"id":{json.dumps(self.id)},"session":"{session}","seq":null,"epoch":{epoch},'
                f'"status":"{self.status.value}","action":'.encode()
                + self.kept
                + b',"replayed":'
                + (b"true" if replayed else b"false")
                + b"}"
            )
        recorded = Recorded(
            action=self.kept,
            observation=self.body if self.body is not None and not self.is_error else observation,
            error=self.body if self.is_error else None,
        )
        return record_json(session, epoch, self.entry, recorded, status=self.status, replayed=replayed)
