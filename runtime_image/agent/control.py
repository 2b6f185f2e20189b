"""The agent's way to the control plane: a port, and its adapter over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from shoal.contract.errors import ErrorBody, ErrorCode, ShoalError
from shoal.contract.host import Heartbeat, HeartbeatReply, Register, Registered
from shoal.contract.urls import Url, UrlAsked, Urls, UrlsAsked

_Model = TypeVar("_Model", bound=BaseModel)

#: URLs that one call may ask for.
_URLS_A_CALL = 100


class ControlPlane(Protocol):
    """What an agent asks of the control plane. Every call may be repeated without harm.

    Each raises ShoalError: the control plane's own refusal, or `unavailable` when it did not answer in time.
    """

    async def register(self, register: Register) -> Registered:
        """Introduce this host; later calls use the token of the answer."""

    def resume(self, host: str, token: str) -> None:
        """Be a host that registered before."""

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Report everything, and hear what to do."""

    async def urls(self, items: Sequence[UrlAsked]) -> list[Url]:
        """Presigned URLs, in the order asked."""

    async def leave(self) -> None:
        """Say that this host is going; it has nothing left."""

    async def close(self) -> None:
        """Drop the connections."""


class HttpControlPlane:
    """The control plane behind an address."""

    def __init__(self, base_url: str, *, timeout_s: float = 10.0) -> None:
        self._base = base_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._http: aiohttp.ClientSession | None = None
        self._host = ""
        self._token = ""

    async def register(self, register: Register) -> Registered:
        """Introduce this host."""
        answer = await self._post("/internal/v1/hosts:register", register, Registered)
        self.resume(answer.host, answer.token)
        return answer

    def resume(self, host: str, token: str) -> None:
        """Be a host that registered before."""
        self._host, self._token = host, token

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Report everything, and hear what to do."""
        return await self._post(f"/internal/v1/hosts/{self._host}/heartbeat", beat, HeartbeatReply)

    async def urls(self, items: Sequence[UrlAsked]) -> list[Url]:
        """Presigned URLs, in the order asked."""
        found: list[Url] = []
        for start in range(0, len(items), _URLS_A_CALL):
            asked = UrlsAsked(items=list(items[start : start + _URLS_A_CALL]))
            found += (await self._post(f"/internal/v1/hosts/{self._host}/urls", asked, Urls)).urls
        return found

    async def leave(self) -> None:
        """Say that this host is going."""
        await self._send(f"/internal/v1/hosts/{self._host}/leave", b"{}")

    async def close(self) -> None:
        """Drop the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _post(self, path: str, body: BaseModel, answer: type[_Model]) -> _Model:
        raw = await self._send(path, body.model_dump_json().encode())
        try:
            return answer.model_validate_json(raw)
        except ValidationError as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, f"the control plane's answer to {path} does not fit the contract"
            ) from error

    async def _send(self, path: str, body: bytes) -> bytes:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=self._timeout)
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            async with self._http.post(self._base + path, data=body, headers=headers) as response:
                raw = await response.read()
                status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, f"the control plane did not answer {path}: {type(error).__name__}"
            ) from error
        if status >= 400:
            raise _refusal(path, status, raw)
        return raw


def _refusal(path: str, status: int, raw: bytes) -> ShoalError:
    try:
        return ShoalError.from_detail(ErrorBody.model_validate_json(raw).error)
    except ValidationError:
        code = ErrorCode.UNAUTHENTICATED if status in (401, 403) else ErrorCode.UNAVAILABLE
        return ShoalError(code, f"the control plane answered {status} to {path}")
