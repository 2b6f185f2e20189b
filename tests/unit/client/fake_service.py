"""A small service in memory that speaks the contract, and loses answers, refuses and delays as scripted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import httpx

from shoal.client.client_core import ClientCore
from shoal.client.config import ClientConfig
from shoal.client.drivers import run
from shoal.client.effects import Context, Op, RetryPolicy
from shoal.client.pools import SyncPool
from shoal.contract.errors import TABLE, ErrorCode

T = TypeVar("T")
NOW = "2026-11-30T12:00:00Z"
CONFIG = ClientConfig(url="http://127.0.0.1:1", api_key="key")
Fault = Callable[[httpx.Request, Callable[[], httpx.Response]], httpx.Response]


def error(code: ErrorCode, *, status: int = 503, retry_after_s: float | None = None, **details: Any) -> Fault:
    """Refuses without doing anything."""
    body = {
        "code": code.value,
        "message": f"scripted {code}",
        "next": TABLE[code].next.value,
        "retry_after_s": retry_after_s,
        "details": details,
    }
    return lambda request, act: httpx.Response(status, json={"error": body})


def bare(status: int, headers: dict[str, str] | None = None) -> Fault:
    """A gateway's own error."""
    return lambda request, act: httpx.Response(status, text="<html>Bad gateway</html>", headers=headers)


def refuse(request: httpx.Request, act: Callable[[], httpx.Response]) -> httpx.Response:
    """Nobody listens."""
    raise httpx.ConnectError("refused", request=request)


def lose(request: httpx.Request, act: Callable[[], httpx.Response]) -> httpx.Response:
    """Does it, and loses the answer."""
    act()
    raise httpx.ReadError("connection reset", request=request)


class FakeService:
    """Sessions and actions; `faults` are taken from the front, one a request that matches."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.sessions: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, str] = {}
        self.by_name: dict[str, str] = {}
        self.actions: dict[tuple[str, str], dict[str, Any]] = {}
        self.bodies: dict[tuple[str, str], Any] = {}
        self.runs: list[tuple[str, str, Any]] = []
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.files: dict[str, bytes] = {}
        self.faults: list[tuple[str, Fault]] = []
        self.pending_reads = 0
        self.running_reads = 0

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    def fail(self, pattern: str, *faults: Fault) -> None:
        """The next requests whose `METHOD path` matches fail so, one fault each, in order."""
        self.faults.extend((pattern, fault) for fault in faults)

    def handle(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        line = f"{request.method} {request.url.path}"
        for at, (pattern, fault) in enumerate(self.faults):
            if re.search(pattern, line):
                del self.faults[at]
                return fault(request, lambda: self.act(request))
        return self.act(request)

    def act(self, request: httpx.Request) -> httpx.Response:
        path, method = unquote(request.url.path), request.method
        body = (
            json.loads(request.content)
            if request.content and "json" in request.headers["content-type"]
            else {}
        )
        if (method, path) == ("POST", "/v1/sessions"):
            return self._create(request, body)
        if (method, path) == ("POST", "/v1/sessions:batch"):
            items = [{"session": self._named(item)} for item in body["items"]]
            return httpx.Response(201, json={"sessions": items})
        if (method, path) == ("POST", "/v1/sessions:delete"):
            self.deleted.extend(body["ids"])
            return httpx.Response(200, json={"ids": body["ids"]})
        if match := re.fullmatch(r"/v1/sessions/([^/]+)", path):
            return self._session(method, match[1])
        if match := re.fullmatch(r"/v1/sessions/([^/]+)/actions", path):
            return self._act(match[1], body)
        if match := re.fullmatch(r"/v1/sessions/([^/]+)/actions/([^/]+)", path):
            return self._read_action(match[1], match[2])
        if match := re.fullmatch(r"/v1/sessions/([^/]+)/snapshots", path):
            made = self.snapshots.setdefault(body["id"], self._snapshot(match[1], body["id"]))
            return httpx.Response(201, json=made)
        if re.fullmatch(r"/v1/sessions/([^/]+)/files", path):
            return self._file(request)
        if re.fullmatch(r"/v1/sessions/([^/]+)/pause", path):
            return error(ErrorCode.NOT_IMPLEMENTED, status=501)(request, lambda: httpx.Response(200))
        if (method, path) == ("POST", "/v1/actions:wait"):
            items = [{"session": s, "action": a, "status": "done"} for s, a in body["ids"]]
            return httpx.Response(200, json={"satisfied": True, "items": items})
        return error(ErrorCode.NOT_FOUND, status=404)(request, lambda: httpx.Response(200))

    def session(self, **fields: Any) -> dict[str, Any]:
        """A session as the wire has it."""
        made = {
            "id": f"ses_{len(self.sessions) + 1}",
            "state": "running",
            "epoch": 1,
            "substrate": "container",
            "pool": "default",
            "resources": {},
            "network": {},
            "created_at": NOW,
            "expires_at": NOW,
            **fields,
        }
        self.sessions[made["id"]] = made
        return made

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("name")
        if name is not None and name in self.by_name:
            return self.sessions[self.by_name[name]]
        made = self.session(
            name=name, run=body.get("run"), state="pending" if self.pending_reads else "running"
        )
        if name is not None:
            self.by_name[name] = made["id"]
        return made

    def _create(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        key = request.headers["idempotency-key"]
        if body.get("count", 1) > 1:
            items = [{"session": self._named(body)} for _ in range(body["count"])]
            return httpx.Response(201, json={"sessions": items})
        if key not in self.by_key:
            self.by_key[key] = self._named(body)["id"]
        session = self.sessions[self.by_key[key]]
        return httpx.Response(201 if session["state"] == "running" else 202, json=session)

    def _session(self, method: str, session_id: str) -> httpx.Response:
        session = self.sessions.get(session_id)
        if session is None:
            return error(ErrorCode.NOT_FOUND, status=404)(None, None)  # type: ignore[arg-type]
        if method == "DELETE":
            session["state"] = "ended"
            self.deleted.append(session_id)
        elif session["state"] == "pending":
            self.pending_reads -= 1
            if self.pending_reads <= 0:
                session["state"] = "running"
        return httpx.Response(200, json=session)

    def _act(self, session_id: str, body: dict[str, Any]) -> httpx.Response:
        known = (session_id, body["id"])
        if known in self.actions:
            if self.bodies[known] != body["action"]:
                return error(ErrorCode.ACTION_CONFLICT, status=409)(None, None)  # type: ignore[arg-type]
            record = {**self.actions[known], "replayed": True}
        else:
            self.runs.append((session_id, body["id"], body["action"]))
            self.bodies[known] = body["action"]
            record = self.actions[known] = self._record(body)
        return httpx.Response(200 if record["status"] == "done" else 202, json=record)

    def _record(self, body: dict[str, Any]) -> dict[str, Any]:
        observation = {"type": "exec", "exit_code": 0, "stdout": f"ran {body['action'].get('command')}"}
        return {
            "id": body["id"],
            "seq": len(self.runs),
            "epoch": 1,
            "status": "running" if self.running_reads else "done",
            "action": body["action"],
            "observation": None if self.running_reads else observation,
        }

    def _read_action(self, session_id: str, action_id: str) -> httpx.Response:
        record = self.actions[session_id, action_id]
        if record["status"] == "running":
            self.running_reads -= 1
            if self.running_reads <= 0:
                record["status"] = "done"
                record["observation"] = {"type": "exec", "exit_code": 0, "stdout": "ran late"}
        return httpx.Response(200, json=record)

    def _snapshot(self, session_id: str, client_id: str) -> dict[str, Any]:
        return {
            "id": f"snp_{len(self.snapshots) + 1}",
            "session": session_id,
            "state": "available",
            "client_id": client_id,
            "epoch": 1,
            "created_at": NOW,
        }

    def _file(self, request: httpx.Request) -> httpx.Response:
        path = request.url.params["path"]
        if request.method == "PUT":
            self.files[path] = request.content
            return httpx.Response(200, json={})
        return httpx.Response(
            200, content=self.files[path], headers={"content-type": "application/octet-stream"}
        )


class Rig:
    """Runs operations against a fake service in virtual time."""

    def __init__(self, policy: RetryPolicy | None = None, config: ClientConfig = CONFIG) -> None:
        self.service = FakeService()
        self.now = 0.0
        self.sleeps: list[float] = []
        policy = policy or RetryPolicy()
        self.core = ClientCore(config, policy, Context(policy=policy, clock=lambda: self.now))
        self.pool = SyncPool(config, self.service.transport)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def run(self, op: Op[T]) -> T:
        return run(op, self.pool.send, self.sleep)
