"""What a client can ask of the service as a whole, as operations: sessions, snapshots, images, pools, execute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.client import building
from shoal.client.config import ClientConfig
from shoal.client.effects import Context, Op, Reply, RetryPolicy, Send, Sleep
from shoal.client.errors import InvalidRequest, WaitTimeout, from_detail, of_code
from shoal.client.retry import call
from shoal.contract.actions import ActionsWait, ActionsWaited
from shoal.contract.errors import ErrorCode
from shoal.contract.execute import Execute, Executed
from shoal.contract.sessions import (
    Session,
    SessionBatch,
    SessionCreate,
    SessionItem,
    SessionPage,
    Sessions,
    SessionsDelete,
    SessionsDeleted,
)
from shoal.contract.states import ActionStatus, SessionState

#: States that a caller who wants to act waits out.
UNREADY = frozenset({SessionState.PENDING, SessionState.STARTING, SessionState.RESTORING})
Watch = Callable[[Session], None]


class ClientCore:
    """Operations of one client. Pickles to its configuration and policy.

    Attributes:
        context: The world; its `patience` is set by whoever drives.
    """

    def __init__(self, config: ClientConfig, policy: RetryPolicy, context: Context | None = None) -> None:
        self.config = config
        self.policy = policy
        self.context = context or Context(policy=policy)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ClientCore, (self.config, self.policy))

    def drive(self, patience: Callable[[], float]) -> None:
        """Says how long polls may be, by who sends them."""
        self.context = replace(self.context, patience=patience)

    def get(self, path: str, params: Mapping[str, str | None] | None = None) -> Op[Reply]:
        """A plain read."""
        asked = building.given(params or {})
        return (yield from call(self.context, Send(method="GET", path=path, params=asked)))

    def delete(self, path: str, *, deadline: float | None = None) -> Op[Reply]:
        """A plain, repeatable delete."""
        return (yield from call(self.context, Send(method="DELETE", path=path), deadline=deadline))

    def poll(
        self,
        read: Callable[[float], Op[Any]],
        is_done: Callable[[Any], bool],
        *,
        what: str,
        timeout_s: float | None,
        deadline: float | None,
    ) -> Op[Any]:
        """Long polls until it is done; never faster than a few a second, whatever the service does."""
        context = self.context
        while True:
            began = context.clock()
            value = yield from read(context.wait_s(deadline))
            if is_done(value):
                return value
            now = context.clock()
            if deadline is not None and now >= deadline:
                raise WaitTimeout(what, timeout_s or 0.0)
            if now - began < 0.25:
                yield Sleep(0.25 - (now - began))

    # Sessions

    def create(
        self, asked: SessionCreate, *, wait: bool, timeout_s: float | None, watch: Watch | None = None
    ) -> Op[Session]:
        """One session, running when `wait`."""
        context = self.context
        deadline = context.deadline(timeout_s)
        first_wait = context.wait_s(deadline) if wait else 0.0
        if watch is not None and wait:
            first_wait = min(first_wait, 0.2)  # who watches wants the first phase soon
        asked = asked.model_copy(update={"wait_s": first_wait})
        send = Send(
            method="POST",
            path="/v1/sessions",
            content=building.body(asked),
            headers=building.json_headers(building.idempotency_key()),
            wait_s=first_wait,
        )
        session = building.parsed(Session, (yield from call(context, send, deadline=deadline)))
        if not wait:
            return session
        return (yield from self.until_ready(session, timeout_s=timeout_s, deadline=deadline, watch=watch))

    def until_ready(
        self,
        session: Session,
        *,
        timeout_s: float | None,
        deadline: float | None = None,
        watch: Watch | None = None,
    ) -> Op[Session]:
        """Waits until actions can run.

        Raises:
            SessionEnded: It ended instead; `details["end"]` tells why.
            WaitTimeout: `timeout_s` passed.
        """
        if deadline is None:
            deadline = self.context.deadline(timeout_s)
        if watch is not None:
            watch(session)
        if session.state in UNREADY:

            def read(wait_s: float) -> Op[Session]:
                now = yield from self.session(session.id, wait_s=wait_s)
                if watch is not None:
                    watch(now)
                return now

            session = yield from self.poll(
                read,
                lambda now: now.state not in UNREADY,
                what=f"session {session.id}",
                timeout_s=timeout_s,
                deadline=deadline,
            )
        if session.state in {SessionState.ENDING, SessionState.ENDED}:
            end = session.end.model_dump(mode="json") if session.end else None
            cause = (
                f"{session.end.reason}: {session.end.detail or 'no detail'}"
                if session.end
                else "no cause yet"
            )
            raise of_code(
                ErrorCode.SESSION_ENDED, f"session {session.id} ended ({cause})", end=end, session=session.id
            )
        return session

    def session(self, session_id: str, *, wait_s: float = 0.0, direct: bool = False) -> Op[Session]:
        """A session as it is now, or after its next change of state within `wait_s`; `direct`: with the way to its
        host."""
        params = {"wait_s": f"{wait_s:g}"} if wait_s else {}
        if direct:
            params["direct"] = "true"
        send = Send(
            method="GET",
            path=f"/v1/sessions/{building.quoted(session_id)}",
            params=params,
            wait_s=wait_s,
        )
        return building.parsed(Session, (yield from call(self.context, send)))

    def create_many(self, path: str, asked: SessionCreate | SessionBatch) -> Op[list[SessionItem]]:
        """Many sessions by one call, placed or queued; an item each."""
        send = Send(
            method="POST",
            path=path,
            content=building.body(asked),
            headers=building.json_headers(building.idempotency_key()),
            wait_s=asked.wait_s,
        )
        reply = yield from call(self.context, send)
        if isinstance(asked, SessionCreate) and asked.count == 1:
            return [SessionItem(session=building.parsed(Session, reply))]
        return building.parsed(Sessions, reply).sessions

    def group(self, bodies: Sequence[SessionCreate | SessionBatch], *, wait_s: float) -> Op[list[Session]]:
        """All sessions of all bodies, or none: what was made before a failure is deleted again.

        Raises:
            ServiceError: The first item's error, with `details["failed"]` and `details["asked"]`.
        """
        made: list[Session] = []
        asked = 0
        for asking in bodies:
            asking = asking.model_copy(update={"wait_s": wait_s})
            path = "/v1/sessions:batch" if isinstance(asking, SessionBatch) else "/v1/sessions"
            try:
                items = yield from self.create_many(path, asking)
            except Exception:
                yield from self._undo(made)
                raise
            asked += len(items)
            made.extend(item.session for item in items if item.session is not None)
            failures = [item.error for item in items if item.error is not None]
            if failures:
                yield from self._undo(made)
                error = from_detail(failures[0])
                error.details = {**error.details, "failed": len(failures), "asked": asked}
                raise error
        return made

    def _undo(self, made: Sequence[Session]) -> Op[None]:
        # Named sessions may have been there before this call: they are kept.
        ids = [session.id for session in made if session.name is None]
        if ids:
            yield from self.delete_sessions(SessionsDelete(ids=ids))

    def sessions(self, params: Mapping[str, str | None]) -> Op[SessionPage]:
        """One page of the list."""
        return building.parsed(SessionPage, (yield from self.get("/v1/sessions", params)))

    def delete_sessions(self, asked: SessionsDelete) -> Op[SessionsDeleted]:
        """Ends a whole run, or many by id."""
        send = Send(
            method="POST",
            path="/v1/sessions:delete",
            content=building.body(asked),
            headers=building.json_headers(),
        )
        return building.parsed(SessionsDeleted, (yield from call(self.context, send)))

    # Actions of many sessions, and calls without a session

    def wait(
        self, ids: Sequence[tuple[str, str]], *, mode: str, timeout_s: float | None
    ) -> Op[ActionsWaited]:
        """Waits for any or all of many actions; gives their states when the time is over, too."""
        deadline = self.context.deadline(timeout_s)
        if not ids:
            return ActionsWaited(satisfied=True, items=[])

        def read(wait_s: float) -> Op[ActionsWaited]:
            asked = building.model(ActionsWait, {"ids": list(ids), "mode": mode, "wait_s": wait_s})
            send = Send(
                method="POST",
                path="/v1/actions:wait",
                content=building.body(asked),
                headers=building.json_headers(),
                wait_s=wait_s,
            )
            return building.parsed(ActionsWaited, (yield from call(self.context, send)))

        try:
            waited: ActionsWaited = yield from self.poll(
                read, lambda now: now.satisfied, what="actions", timeout_s=timeout_s, deadline=deadline
            )
        except WaitTimeout:
            return (yield from read(0.0))
        return waited

    def execute(self, image: str, program: Mapping[str, Any], options: Mapping[str, Any]) -> Op[Executed]:
        """One stateless call, done.

        Raises:
            ServiceError: The platform could not run it; `InvalidRequest` for a bad request.
            WaitTimeout: `wait_timeout_s` passed; the same `id` finds it again.
        """
        values = building.with_stdin(building.given({**program, **options, "image": image}))
        timeout_s = values.pop("wait_timeout_s", None)
        values.setdefault("id", "exe-" + building.idempotency_key())
        if "files" in values:
            values["files"] = building.files(values["files"])
        if "network" in values:
            values["network"] = building.network(values["network"])
        for key in ("resources", "env"):
            if key in values:
                values[key] = building.plain(values[key])
        for key in ("args", "argv", "output_files"):
            if key in values:
                if isinstance(values[key], str):
                    raise InvalidRequest(ErrorCode.INVALID_REQUEST, f"{key}: a list, not one string")
                values[key] = list(values[key])
        asked = building.model(Execute, values)
        deadline = self.context.deadline(timeout_s)

        def read(wait_s: float) -> Op[Executed]:
            send = Send(
                method="POST",
                path="/v1/execute",
                content=building.body(asked.model_copy(update={"wait_s": wait_s})),
                headers=building.json_headers(),  # the id in the body makes it run once
                wait_s=wait_s,
            )
            return building.parsed(Executed, (yield from call(self.context, send, deadline=deadline)))

        done: Executed = yield from self.poll(
            read,
            lambda now: now.status not in {ActionStatus.QUEUED, ActionStatus.RUNNING},
            what=f"call {asked.id}",
            timeout_s=timeout_s,
            deadline=deadline,
        )
        if done.error is not None:
            raise from_detail(done.error)
        if done.observation is None:
            raise of_code(
                ErrorCode.ACTION_OUTCOME_UNKNOWN, f"call {done.id} ended without a result", id=done.id
            )
        return done
