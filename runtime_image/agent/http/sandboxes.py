"""What the control plane commands: sandboxes and their snapshots."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime_image.agent.hosted import Hosted
from runtime_image.agent.http.guard import guarded, json_response, number, read_model, wait_s
from runtime_image.agent.tokens import require_control
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.host import SandboxPatch, SandboxStart, SnapshotTake, SnapshotTaken
from shoal.contract.states import EndReason

if TYPE_CHECKING:
    from runtime_image.agent.service import SandboxService
    from runtime_image.agent.snapshots import Snapshots
    from runtime_image.agent.tokens import TokenVerifier

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class SandboxRoutes:
    """`/v1/sandboxes/...`, for control tokens."""

    def __init__(self, service: SandboxService, snapshots: Snapshots, tokens: TokenVerifier) -> None:
        self._service = service
        self._snapshots = snapshots
        self._tokens = tokens

    def routes(self) -> list[Route]:
        """Its routes."""
        one = "/v1/sandboxes/{session}"
        return [
            Route(one, guarded(self.put), methods=["PUT"]),
            Route(one, guarded(self.get), methods=["GET"]),
            Route(one, guarded(self.patch), methods=["PATCH"]),
            Route(one, guarded(self.delete), methods=["DELETE"]),
            Route(f"{one}/snapshots", guarded(self.take_snapshot), methods=["POST"]),
            Route(f"{one}/snapshots/{{snapshot}}", guarded(self.get_snapshot), methods=["GET"]),
        ]

    def _session(self, request: Request) -> SessionId:
        session = SessionId(_plain("session", request.path_params["session"]))
        require_control(self._tokens.verify(request.headers.get("authorization")), session)
        return session

    async def put(self, request: Request) -> Response:
        """Start, or say that it runs already."""
        session = self._session(request)
        spec = await read_model(request, SandboxStart)
        if spec.session != session:
            raise invalid("session", "is not that of the path")
        hosted = await self._service.start(spec)
        await hosted.wait_while("starting", timeout_s=spec.wait_s)
        return _status(hosted)

    async def get(self, request: Request) -> Response:
        """Its state; waits while it starts or ends."""
        hosted = self._service.get(self._session(request))
        await hosted.wait_while("starting", "ending", timeout_s=wait_s(request))
        return _status(hosted)

    async def patch(self, request: Request) -> Response:
        """Change what may change."""
        session = self._session(request)
        hosted = await self._service.patch(session, await read_model(request, SandboxPatch))
        return _status(hosted)

    async def delete(self, request: Request) -> Response:
        """End it; waits until it is gone when asked."""
        session = self._session(request)
        epoch = number(request, "epoch", 0, least=0)
        raw = request.query_params.get("reason", EndReason.DELETED.value)
        try:
            reason = EndReason(raw)
        except ValueError:
            raise invalid(
                "query.reason", f"is not one of {', '.join(one.value for one in EndReason)}"
            ) from None
        timeout_s = wait_s(request)
        hosted = self._service.find(session, epoch) if epoch else self._service.get(session)
        if hosted is None:
            raise ShoalError(
                ErrorCode.NOT_FOUND, f"This host has no sandbox of epoch {epoch} of that session."
            )
        self._service.end(hosted, reason, request.query_params.get("detail"))
        await hosted.wait_while("ending", timeout_s=timeout_s)
        return _status(hosted)

    async def take_snapshot(self, request: Request) -> Response:
        """Take a snapshot, or say how far it is."""
        session = self._session(request)
        take = await read_model(request, SnapshotTake)
        if self._service.fenced:
            raise ShoalError(ErrorCode.HOST_FENCED, "This host has lost touch with the control plane.")
        _plain("snapshot", take.snapshot)
        taken = await self._snapshots.take(session, take)
        return _snapshot(await taken.wait(take.wait_s))

    async def get_snapshot(self, request: Request) -> Response:
        """How far a snapshot is."""
        session = self._session(request)
        taken = self._snapshots.get(session, request.path_params["snapshot"])
        return _snapshot(await taken.wait(wait_s(request)))


def _plain(name: str, id: str) -> str:
    """An id that may name a directory."""
    if not _PLAIN.fullmatch(id):
        raise invalid(name, "is not an id")
    return id


def _status(hosted: Hosted) -> Response:
    status = hosted.status()
    pending = status.state in ("starting", "ending")
    return json_response(status.model_dump_json(), 202 if pending else 200)


def _snapshot(taken: SnapshotTaken) -> Response:
    return json_response(taken.model_dump_json(), 202 if taken.state in ("copying", "uploading") else 200)
