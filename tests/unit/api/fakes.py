"""Scripted stand-ins of what the API talks to: the provisioner's use cases and a host's agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from provisioner.auth import Principal
from provisioner.sessions import Location
from shoal.contract.actions import ActionList, ActionRecord, ActionRequest
from shoal.contract.base import HostId, KeyId, SessionId, TenantId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.sessions import End
from shoal.contract.states import EndReason, Scope, SessionState

KEY = "shk_test_all"
READER = "shk_test_read"
TENANT = TenantId("ten_1")
FULL_KEY, READING_KEY = KeyId("key_1"), KeyId("key_2")


class FakeKeys:
    """Knows two keys, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.keys = {
            KEY: Principal(tenant=TENANT, key=FULL_KEY, scopes=frozenset((Scope.ADMIN,))),
            READER: Principal(tenant=TENANT, key=READING_KEY, scopes=frozenset((Scope.READ,))),
        }

    async def authenticate(self, key: str) -> Principal:
        self.asked += 1
        try:
            return self.keys[key]
        except KeyError:
            raise ShoalError(ErrorCode.UNAUTHENTICATED, "this API key is not known") from None


@dataclass
class FakeLocator:
    """Answers from `places`; a list there is worked off, its last item stays."""

    places: dict[str, list[Location]] = field(default_factory=dict)
    asked: list[tuple[str, float]] = field(default_factory=list)
    tokens: int = 0

    async def locate(self, who: Principal, id: SessionId, *, wait_s: float = 0.0) -> Location:
        self.asked.append((id, wait_s))
        known = self.places.get(id)
        if not known or known[0].tenant != who.tenant:
            raise ShoalError(ErrorCode.NOT_FOUND, f"no session {id}")
        return known.pop(0) if len(known) > 1 else known[0]

    def token(self, who: Principal, location: Location) -> tuple[str, float]:
        self.tokens += 1
        return f"token-{location.host}-{location.epoch}-{self.tokens}", 60.0


class FakeArchive:
    """Journals of ended sessions."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], ActionRecord] = {}
        self.refusal: ShoalError | None = None

    async def action(self, who: Principal, location: Location, action: str) -> ActionRecord:
        try:
            return self.records[(location.session, action)]
        except KeyError:
            raise ShoalError(ErrorCode.NOT_FOUND, f"no action {action}") from None

    async def replay(
        self, who: Principal, location: Location, asked: ActionRequest
    ) -> ActionRecord | ActionList | None:
        return self.records.get((location.session, asked.id or ""))

    async def trajectory(self, who: Principal, location: Location, after_seq: int) -> AsyncIterator[bytes]:
        if self.refusal is not None:
            raise self.refusal
        for (session, _), record in self.records.items():
            if session == location.session and (record.seq or 0) > after_seq:
                yield record.model_dump_json().encode() + b"\n"


class FakeTransfers:
    """Transfers out of sessions: `made` are those that there are."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}

    async def send_out(self, who: Principal, session: SessionId) -> str:
        id = f"trf_{len(self.made)}"
        self.made[id] = session
        return id

    async def check_out(self, who: Principal, session: SessionId, id: str) -> None:
        if self.made.get(id) != session:
            raise ShoalError(ErrorCode.NOT_FOUND, "no such transfer")

    async def read_link(self, id: str, *, media_type: str) -> str:
        return f"https://blobs.example.org/{id}?as={media_type}"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ScriptedAgent:
    """A host's agent that answers by what the test put into `script`, in order; `otherwise` answers the rest."""

    def __init__(self) -> None:
        self.script: list[Handler] = []
        self.otherwise: Handler = echo
        self.seen: list[tuple[str, str, str]] = []
        self.address = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> ScriptedAgent:
        app = web.Application(client_max_size=1 << 40)
        app.router.add_route("*", "/{rest:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening and cut what is open, as a host that dies."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.raw_path, request.headers.get("Authorization", "")))
        handler = self.script.pop(0) if self.script else self.otherwise
        return await handler(request)


async def echo(request: web.Request) -> web.StreamResponse:
    """Answers the body as it came."""
    return web.Response(body=await request.read(), content_type="application/json")


def fails(error: ShoalError, status: int = 400) -> Handler:
    """A handler that answers an error."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.json_response(error.body().model_dump(mode="json"), status=status)

    return answer


async def cuts(request: web.Request) -> web.StreamResponse:
    """A handler that closes the connection instead of answering."""
    await request.read()
    assert request.transport is not None
    request.transport.close()
    await asyncio.Event().wait()
    raise AssertionError("not reached")


def running(session: str, address: str, *, host: str = "hst_1", epoch: int = 1) -> Location:
    """Where a running session is."""
    return Location(
        session=SessionId(session),
        tenant=TENANT,
        state=SessionState.RUNNING,
        epoch=epoch,
        host=HostId(host),
        address=address,
    )


def ended(session: str) -> Location:
    """Where an ended session is."""
    return Location(
        session=SessionId(session),
        tenant=TENANT,
        state=SessionState.ENDED,
        epoch=1,
        end=End(reason=EndReason.TTL),
    )
