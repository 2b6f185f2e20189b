"""The agent port over HTTP: one connection pool, a deadline on every call, route tokens, errors as `ShoalError`."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ValidationError

from provisioner.agents.port import HostRef
from provisioner.route_tokens import RouteSigner
from shoal.contract.base import SessionId, SnapshotId
from shoal.contract.errors import ErrorBody, ErrorCode, ShoalError
from shoal.contract.host import SandboxPatch, SandboxStart, SandboxStatus, SnapshotTake, SnapshotTaken
from shoal.contract.states import EndReason

M = TypeVar("M", bound=BaseModel)
#: Seconds an agent may take beyond what it was asked to wait.
DEADLINE_S = 10.0
_CONNECT_S = 3.0


class HttpAgents:
    """The `AgentClient` port. Make and use it inside one event loop."""

    def __init__(self, signer: RouteSigner, *, deadline_s: float = DEADLINE_S) -> None:
        self._signer = signer
        self._deadline_s = deadline_s
        self._http: aiohttp.ClientSession | None = None

    async def start(self, host: HostRef, start: SandboxStart) -> SandboxStatus:
        """As the port says."""
        body = start.model_dump_json().encode()
        path = _sandbox(start.session)
        return await self._call("PUT", host, path, SandboxStatus, body=body, wait_s=start.wait_s)

    async def status(self, host: HostRef, session: SessionId, *, wait_s: float = 0.0) -> SandboxStatus:
        """As the port says."""
        query = {"wait_s": f"{wait_s:g}"}
        return await self._call("GET", host, _sandbox(session), SandboxStatus, query=query, wait_s=wait_s)

    async def patch(self, host: HostRef, session: SessionId, patch: SandboxPatch) -> SandboxStatus:
        """As the port says."""
        body = patch.model_dump_json(exclude_unset=True).encode()
        return await self._call("PATCH", host, _sandbox(session), SandboxStatus, body=body)

    async def end(
        self, host: HostRef, session: SessionId, *, epoch: int, reason: EndReason, wait_s: float = 0.0
    ) -> SandboxStatus:
        """As the port says."""
        query = {"epoch": str(epoch), "reason": reason.value, "wait_s": f"{wait_s:g}"}
        return await self._call("DELETE", host, _sandbox(session), SandboxStatus, query=query, wait_s=wait_s)

    async def take_snapshot(self, host: HostRef, session: SessionId, take: SnapshotTake) -> SnapshotTaken:
        """As the port says."""
        body = take.model_dump_json().encode()
        path = _sandbox(session) + "/snapshots"
        return await self._call("POST", host, path, SnapshotTaken, body=body, wait_s=take.wait_s)

    async def snapshot_status(
        self, host: HostRef, session: SessionId, snapshot: SnapshotId, *, wait_s: float = 0.0
    ) -> SnapshotTaken:
        """As the port says."""
        path = f"{_sandbox(session)}/snapshots/{quote(snapshot, safe='')}"
        query = {"wait_s": f"{wait_s:g}"}
        return await self._call("GET", host, path, SnapshotTaken, query=query, wait_s=wait_s)

    async def close(self) -> None:
        """As the port says."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # One control plane starts hundreds of sandboxes at once; each start holds a connection while it waits.
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=30.0)
            self._http = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._http

    async def _call(
        self,
        method: str,
        host: HostRef,
        path: str,
        kind: type[M],
        *,
        body: bytes | None = None,
        query: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> M:
        headers = {"authorization": "Bearer " + self._signer.control(host.id, host.address)}
        if body is not None:
            headers["content-type"] = "application/json"
        deadline = aiohttp.ClientTimeout(
            total=self._deadline_s + wait_s, connect=None, sock_connect=_CONNECT_S
        )
        try:
            async with self._session().request(
                method, host.address + path, params=query, data=body, headers=headers, timeout=deadline
            ) as response:
                data = await response.read()
                status = response.status
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(host, error, sent=False) from error
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise _unreachable(host, error, sent=True) from error
        if status < 300:
            try:
                return kind.model_validate_json(data)
            except ValidationError as error:
                raise ShoalError(
                    ErrorCode.HOST_UNREACHABLE,
                    f"Host {host.id} answered what this version does not understand.",
                    details={"host": host.id, "sent": True},
                ) from error
        raise _refusal(host, status, data)


def _sandbox(session: SessionId) -> str:
    return "/v1/sandboxes/" + quote(session, safe="")


def _unreachable(host: HostRef, error: BaseException, *, sent: bool) -> ShoalError:
    details: dict[str, Any] = {"host": host.id, "sent": sent, "cause": type(error).__name__}
    return ShoalError(ErrorCode.HOST_UNREACHABLE, f"Host {host.id} did not answer.", details=details)


def _refusal(host: HostRef, status: int, data: bytes) -> ShoalError:
    try:
        return ShoalError.from_detail(ErrorBody.model_validate_json(data).error)
    except ValidationError:
        return ShoalError(
            ErrorCode.HOST_UNREACHABLE,
            f"Host {host.id} answered {status}.",
            details={"host": host.id, "sent": True, "status": status},
        )
