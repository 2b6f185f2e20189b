"""The agent client over real HTTP: paths, tokens, errors, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from provisioner.agents.http import HttpAgents
from provisioner.agents.port import HostRef
from provisioner.clock import SystemClock
from provisioner.route_tokens import RouteSigner
from provisioner.store.fake import FakeStore
from runtime_image.agent.tokens import TokenVerifier, require_control
from shoal.contract.base import HostId, SessionId, SnapshotId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxPatch, SandboxStatus, SnapshotTake, SnapshotTaken
from shoal.contract.states import EndReason

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SESSION = SessionId("ses_1")


class Host:
    """An agent's HTTP side, with one handler for all."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.answer: Handler = self.status
        self.tokens: list[str] = []

    async def status(self, request: web.Request) -> web.Response:
        status = SandboxStatus(session=SESSION, epoch=1, state="running")
        return web.Response(body=status.model_dump_json(), content_type="application/json")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs, await request.read()))
        self.tokens.append(request.headers["authorization"])
        return await self.answer(request)


@pytest.fixture
async def host() -> Host:
    return Host()


@pytest.fixture
async def signer() -> RouteSigner:
    signer = RouteSigner(FakeStore(), SystemClock(), key_life_s=1000)
    await signer.refresh()
    return signer


@pytest.fixture
async def ref(host: Host) -> AsyncIterator[HostRef]:
    server = web.Server(host.handle)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield HostRef(id=HostId("hst_1"), address=f"http://127.0.0.1:{port}")
    await runner.cleanup()


@pytest.fixture
async def agents(signer: RouteSigner) -> AsyncIterator[HttpAgents]:
    agents = HttpAgents(signer, deadline_s=0.3)
    yield agents
    await agents.close()


async def test_calls_go_to_the_contracts_paths(
    host: Host, ref: HostRef, agents: HttpAgents, signer: RouteSigner
) -> None:
    """Each command is the contract's method and path, with a control token that the agent's verifier takes."""
    await agents.status(ref, SESSION, wait_s=2)
    await agents.patch(ref, SESSION, SandboxPatch(epoch=1, idle_timeout_s=None))
    await agents.end(ref, SESSION, epoch=2, reason=EndReason.DELETED, wait_s=1.5)

    async def taken(request: web.Request) -> web.Response:
        answer = SnapshotTaken(snapshot=SnapshotId("snp_1"), session=SESSION, epoch=1, state="uploaded")
        return web.Response(body=answer.model_dump_json())

    host.answer = taken
    await agents.take_snapshot(ref, SESSION, SnapshotTake(snapshot=SnapshotId("snp_1"), epoch=1))
    await agents.snapshot_status(ref, SESSION, SnapshotId("snp_1"), wait_s=1)
    assert [(method, path) for method, path, _ in host.requests] == [
        ("GET", "/v1/sandboxes/ses_1?wait_s=2"),
        ("PATCH", "/v1/sandboxes/ses_1"),
        ("DELETE", "/v1/sandboxes/ses_1?epoch=2&reason=deleted&wait_s=1.5"),
        ("POST", "/v1/sandboxes/ses_1/snapshots"),
        ("GET", "/v1/sandboxes/ses_1/snapshots/snp_1?wait_s=1"),
    ]
    assert host.requests[1][2] == b'{"epoch":1,"idle_timeout_s":null}'

    verifier = TokenVerifier(SystemClock())
    verifier.trust("hst_1", signer.public_keys)
    require_control(verifier.verify(host.tokens[0]), SESSION)


async def test_an_agents_refusal_comes_through_typed(host: Host, ref: HostRef, agents: HttpAgents) -> None:
    """What the agent says no with is the same error here."""

    async def refuse(request: web.Request) -> web.Response:
        error = ShoalError(ErrorCode.HOST_REFUSED, "full", details={"left": 0})
        return web.Response(status=409, body=error.body().model_dump_json())

    host.answer = refuse
    with pytest.raises(ShoalError) as raised:
        await agents.status(ref, SESSION)
    assert raised.value.code is ErrorCode.HOST_REFUSED
    assert raised.value.details == {"left": 0}


async def test_a_closed_port_certainly_did_not_hear(agents: HttpAgents) -> None:
    """A refused connection says that nothing was sent."""
    closed = HostRef(id=HostId("hst_1"), address="http://127.0.0.1:9")
    with pytest.raises(ShoalError) as raised:
        await agents.status(closed, SESSION)
    assert raised.value.code is ErrorCode.HOST_UNREACHABLE
    assert raised.value.details["sent"] is False


@pytest.mark.parametrize("how", ["silence", "cut", "nonsense", "bare 502"])
async def test_an_answer_that_does_not_come_may_have_been_heard(
    host: Host, ref: HostRef, agents: HttpAgents, how: str
) -> None:
    """Silence, a cut connection, nonsense: unreachable, and it may have been carried out."""
    never = asyncio.Event()

    async def bad(request: web.Request) -> web.Response:
        if how == "silence":
            await never.wait()
        if how == "cut":
            assert request.transport is not None
            request.transport.close()
        if how == "bare 502":
            return web.Response(status=502, text="<html>")
        return web.Response(text="nonsense")

    host.answer = bad
    with pytest.raises(ShoalError) as raised:
        await agents.status(ref, SESSION)
    assert raised.value.code is ErrorCode.HOST_UNREACHABLE
    assert raised.value.details["sent"] is True
    never.set()
