"""What can be done in one session, as operations: both twins' handles run these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shoal.client import building, errors
from shoal.client.client_core import ClientCore
from shoal.client.effects import Op, Reply, Send, TransportFailed, reply_of
from shoal.client.platform_core import SnapshotsCore
from shoal.client.results import CodeResult, ExecResult, Result, result_of
from shoal.client.retry import call, error_of
from shoal.client.steps import StepCounter
from shoal.contract import actions
from shoal.contract.actions import ActionList, ActionRecord, ActionRequest
from shoal.contract.base import Wire
from shoal.contract.errors import ErrorCode
from shoal.contract.sessions import (
    Direct,
    Event,
    EventPage,
    Session,
    SessionAck,
    SessionPatch,
    SessionReplace,
)
from shoal.contract.snapshots import Snapshot, SnapshotCreate
from shoal.contract.states import ActionStatus

R = TypeVar("R", bound=Result)

_OPEN = frozenset({ActionStatus.QUEUED, ActionStatus.RUNNING})
#: Tells that a log goes on after its last seq.
MORE_HEADER = "x-shoal-more"
#: Direct routes are good for at most 60 s; fetched anew a little before.
_DIRECT_AGE_S = 45.0
_DIRECT_TROUBLE = frozenset(
    {
        ErrorCode.TOKEN_REFUSED,
        ErrorCode.HOST_UNREACHABLE,
        ErrorCode.HOST_FENCED,
        ErrorCode.HOST_REFUSED,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.NOT_FOUND,
        ErrorCode.UNAVAILABLE,
        ErrorCode.SANDBOX_LOST,
    }
)


class SessionCore:
    """One session as a handle holds it.

    Attributes:
        info: The session as last heard of.
        steps: Where this handle's step ids come from.
    """

    def __init__(self, core: ClientCore, info: Session, steps: StepCounter) -> None:
        self.client = core
        self.info = info
        self.steps = steps
        self._direct: Direct | None = None
        self._direct_until = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return (SessionCore, (self.client, self.info.model_copy(update={"direct": None}), self.steps))

    def with_steps(self, prefix: str) -> SessionCore:
        """The same session with its own space of step ids."""
        return SessionCore(self.client, self.info, StepCounter(prefix))

    @property
    def path(self) -> str:
        """The session's path below the service's root."""
        return f"/v1/sessions/{building.quoted(self.info.id)}"

    # The way

    def send(self, send: Send, *, deadline: float | None = None) -> Op[Reply]:
        """Sends straight to the host where that is wished and works, else through the service."""
        if self.client.config.direct:
            route = yield from self._route()
            if route is not None:
                try:
                    reply = reply_of((yield replace(send, base_url=route.url.rstrip("/"), token=route.token)))
                except TransportFailed as failure:
                    if failure.arrived and not send.repeatable:
                        raise errors.ConnectionFailed(
                            ErrorCode.UNAVAILABLE, f"no answer from the session's host: {failure}"
                        ) from failure
                    self._direct = None
                else:
                    error = error_of(reply)
                    if error is None:
                        return reply
                    passing = isinstance(error, errors.WaitError | errors.RetryError)
                    if error.code not in _DIRECT_TROUBLE and not passing:
                        raise error
                    self._direct = None
        return (yield from call(self.client.context, send, deadline=deadline))

    def _route(self) -> Op[Direct | None]:
        now = self.client.context.clock()
        if self._direct is None or now >= self._direct_until:
            self.info = yield from self.client.session(self.info.id, direct=True)
            self._direct = self.info.direct
            self._direct_until = now + _DIRECT_AGE_S
        return self._direct

    # Actions

    def act(self, action: Wire, options: Mapping[str, Any]) -> Op[ActionRecord]:
        """One action to its end, under one id whatever happens on the way.

        Raises:
            ActionOutcomeUnknown: Its host crashed while it ran.
            WaitTimeout: `wait_timeout_s` passed; the action goes on.
            ServiceError: The platform could not run it.
        """
        step = options.get("step") or self.steps.next()
        timeout_s = options.get("wait_timeout_s")
        context = self.client.context
        deadline = context.deadline(timeout_s)
        values = {
            "id": step,
            "action": action,
            **building.given({"epoch": options.get("epoch"), "parallel": options.get("parallel")}),
        }
        record: ActionRecord | None = None
        for _ in range(4):
            wait_s = context.wait_s(deadline)
            request = building.model(ActionRequest, {**values, "wait_s": wait_s})
            send = Send(
                method="POST",
                path=f"{self.path}/actions",
                content=building.body(request),
                headers=building.json_headers(),
                wait_s=wait_s,
            )
            record = building.parsed(ActionRecord, (yield from self.send(send, deadline=deadline)))
            if isinstance(action, actions.Exec) and action.background:
                return self._known(record)
            try:
                record = yield from self.until_done(record, timeout_s=timeout_s, deadline=deadline)
            except errors.NotFound:
                continue  # it vanished with its sandbox before it was recorded: the same id may run now
            if record.status is not ActionStatus.ROLLED_BACK:
                return record
        raise errors.of_code(
            ErrorCode.SANDBOX_LOST,
            f"action {step} of session {self.info.id} is lost again and again",
            action=step,
        )

    def until_done(
        self, record: ActionRecord, *, timeout_s: float | None, deadline: float | None = None
    ) -> Op[ActionRecord]:
        """Polls an action to its end."""
        if deadline is None:
            deadline = self.client.context.deadline(timeout_s)
        if record.status in _OPEN:
            record = yield from self.client.poll(
                lambda wait_s: self.read_action(record.id, wait_s=wait_s),
                lambda now: now.status not in _OPEN,
                what=f"action {record.id} of session {self.info.id}",
                timeout_s=timeout_s,
                deadline=deadline,
            )
        return self._known(record)

    def _known(self, record: ActionRecord) -> ActionRecord:
        if record.status is ActionStatus.UNKNOWN or (record.error is not None and record.observation is None):
            if record.error is not None:
                raise errors.from_detail(record.error)
            raise errors.of_code(
                ErrorCode.ACTION_OUTCOME_UNKNOWN,
                f"action {record.id} of session {self.info.id} had started when its host crashed",
                action=record.id,
            )
        return record

    def read_action(
        self, action_id: str, *, wait_s: float = 0.0, offsets: tuple[int, int] | None = None
    ) -> Op[ActionRecord]:
        """An action as it is, or at its end within `wait_s`; output from the given offsets of stdout and stderr."""
        params = {"wait_s": f"{wait_s:g}"} if wait_s else {}
        if offsets is not None:
            params.update(stdout_offset=str(offsets[0]), stderr_offset=str(offsets[1]))
        path = f"{self.path}/actions/{building.quoted(action_id)}"
        send = Send(method="GET", path=path, params=params, wait_s=wait_s)
        return building.parsed(ActionRecord, (yield from self.send(send)))

    def do(self, action: Wire, options: Mapping[str, Any], kind: type[R]) -> Op[R]:
        """An action's result."""
        return self.result((yield from self.act(action, options)), kind)

    def result(self, record: ActionRecord, kind: type[R]) -> R:
        """The result in a record."""
        result = result_of(record)
        if not isinstance(result, kind):
            raise errors.of_code(
                ErrorCode.INTERNAL,
                f"action {record.id} answered {type(result).__name__}, not {kind.__name__}",
            )
        return result

    def exec(self, command: str | Sequence[str], options: Mapping[str, Any]) -> Op[ExecResult]:
        """A command to its end."""
        return (yield from self.do(building.exec_action(command, options), options, ExecResult))

    def run_code(self, code: str, options: Mapping[str, Any]) -> Op[CodeResult]:
        """A program to its end."""
        values = building.with_stdin(building.fields(options, actions.RunCode))
        if "files" in values:
            values["files"] = building.files(values["files"])
        if "args" in values:
            values["args"] = list(values["args"])
        action = building.model(actions.RunCode, {"type": "run_code", "code": code, **values})
        return (yield from self.do(action, options, CodeResult))

    def start(self, command: str | Sequence[str], options: Mapping[str, Any]) -> Op[ActionRecord]:
        """A command in the background: its record as soon as it runs."""
        return (yield from self.act(building.exec_action(command, options, background=True), options))

    def sequence(
        self, listed: Sequence[Wire], options: Mapping[str, Any], *, keep_going: bool
    ) -> Op[ActionList]:
        """A list of actions in order, by one call."""
        step = options.get("step") or self.steps.next()
        timeout_s = options.get("wait_timeout_s")
        deadline = self.client.context.deadline(timeout_s)
        values = {"id": step, "actions": [building.tagged(one) for one in listed], "keep_going": keep_going}
        values.update(building.given({"epoch": options.get("epoch"), "parallel": options.get("parallel")}))

        def read(wait_s: float) -> Op[ActionList]:
            send = Send(
                method="POST",
                path=f"{self.path}/actions",
                content=building.body(building.model(ActionRequest, {**values, "wait_s": wait_s})),
                headers=building.json_headers(),
                wait_s=wait_s,
            )
            return building.parsed(ActionList, (yield from self.send(send, deadline=deadline)))

        done: ActionList = yield from self.client.poll(
            read,
            lambda now: now.status not in _OPEN,
            what=f"actions {step} of session {self.info.id}",
            timeout_s=timeout_s,
            deadline=deadline,
        )
        for record in done.actions:
            self._known(record)
        return done

    def kill(self, action_id: str) -> Op[None]:
        """Ends an action's whole process tree."""
        path = f"{self.path}/actions/{building.quoted(action_id)}"
        yield from self.send(Send(method="DELETE", path=path))

    def post(self, action_id: str, what: str, value: Wire, *, repeatable: bool) -> Op[None]:
        """Input or a new size for a running action. Input is not repeated when it may have arrived."""
        send = Send(
            method="POST",
            path=f"{self.path}/actions/{building.quoted(action_id)}/{what}",
            content=building.body(value),
            headers=building.json_headers(),
            repeatable=repeatable,
        )
        yield from self.send(send)

    def trajectory(self, after_seq: int) -> Op[list[ActionRecord]]:
        """The recorded steps after a seq, oldest first."""
        records: list[ActionRecord] = []
        while True:
            params = {"after_seq": str(after_seq)} if after_seq else {}
            reply = yield from self.send(Send(method="GET", path=f"{self.path}/trajectory", params=params))
            for line in filter(None, reply.content.split(b"\n")):
                records.append(building.parsed(ActionRecord, replace(reply, content=line)))
            if MORE_HEADER not in reply.headers or not records or not records[-1].seq:
                return records
            after_seq = records[-1].seq

    # The session itself

    def refresh(self, *, wait_s: float = 0.0) -> Op[Session]:
        """The session as it is now."""
        self.info = yield from self.client.session(self.info.id, wait_s=wait_s)
        return self.info

    def ready(self, timeout_s: float | None) -> Op[Session]:
        """Waits until actions can run."""
        self.info = yield from self.client.session(self.info.id)
        self.info = yield from self.client.until_ready(self.info, timeout_s=timeout_s)
        return self.info

    def events(self) -> Op[list[Event]]:
        """What happened to the session, oldest first."""
        found: list[Event] = []
        cursor: str | None = None
        while True:
            reply = yield from self.client.get(f"{self.path}/events", {"cursor": cursor})
            page = building.parsed(EventPage, reply)
            found.extend(page.events)
            cursor = page.cursor
            if cursor is None:
                return found

    def command(
        self, verb: str, asked: Wire | None, *, timeout_s: float | None, wait: bool = True
    ) -> Op[Session]:
        """replace, pause, resume, ack: a POST that answers the session; running again when `wait`."""
        context = self.client.context
        deadline = context.deadline(timeout_s)
        key = building.idempotency_key()
        send = Send(
            method="POST",
            path=f"{self.path}/{verb}",
            content=b"" if asked is None else building.body(asked),
            headers=building.json_headers(key),
            wait_s=getattr(asked, "wait_s", 0.0),
        )
        self._direct = None
        self.info = building.parsed(Session, (yield from call(context, send, deadline=deadline)))
        if wait:
            self.info = yield from self.client.until_ready(self.info, timeout_s=timeout_s, deadline=deadline)
        return self.info

    def replace(self, origin: str, timeout_s: float | None) -> Op[Session]:
        """Throws the sandbox away; the session goes on in the next epoch."""
        wait_s = self.client.context.wait_s(self.client.context.deadline(timeout_s))
        asked = building.model(SessionReplace, {"from": origin, "wait_s": wait_s})
        return (yield from self.command("replace", asked, timeout_s=timeout_s))

    def ack(self, epoch: int | None) -> Op[Session]:
        """Says that the rewind into `epoch` (None: the present one) was seen."""
        if epoch is None:
            epoch = (yield from self.refresh()).epoch
        asked = building.model(SessionAck, {"epoch": epoch})
        return (yield from self.command("ack", asked, timeout_s=None, wait=False))

    def patch(self, values: Mapping[str, Any]) -> Op[Session]:
        """Changes the fields given."""
        changed = dict(values)
        if changed.get("network") is not None:
            changed["network"] = building.network(changed["network"])
        send = Send(
            method="PATCH",
            path=self.path,
            content=building.body(building.model(SessionPatch, changed)),
            headers=building.json_headers(),
        )
        self.info = building.parsed(Session, (yield from call(self.client.context, send)))
        return self.info

    def delete(self, timeout_s: float | None = None) -> Op[None]:
        """Ends the session, from any state; repeatable."""
        try:
            yield from self.client.delete(self.path, deadline=self.client.context.deadline(timeout_s))
        except errors.SessionEnded:
            pass

    def snapshot(
        self,
        labels: Mapping[str, str] | None,
        snapshot_step: str | None,
        *,
        wait: bool,
        timeout_s: float | None,
    ) -> Op[Snapshot]:
        """A snapshot; durable when `wait`. A script that runs again gets the one it made before."""
        context = self.client.context
        deadline = context.deadline(timeout_s)
        wait_s = context.wait_s(deadline) if wait else 0.0
        values = {
            "id": snapshot_step or self.steps.next_of("snapshot"),
            "labels": dict(labels or {}),
            "wait_s": wait_s,
        }
        asked = building.model(SnapshotCreate, values)
        send = Send(
            method="POST",
            path=f"{self.path}/snapshots",
            content=building.body(asked),
            headers=building.json_headers(),  # its id in the body makes it unique in the session
            wait_s=wait_s,
        )
        snapshot = building.parsed(Snapshot, (yield from call(context, send, deadline=deadline)))
        if not wait:
            return snapshot
        waiting = SnapshotsCore(self.client).until_durable(snapshot, timeout_s=timeout_s, deadline=deadline)
        return (yield from waiting)
