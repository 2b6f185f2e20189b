"""What this entrance does not carry: answers over its limit, and files that go by the blob store instead.

A file over the limit is answered with 303 to where it can be read. The host's agent puts it there first; while it does,
the 303 leads back to the same route, so that any client that follows redirects ends at the bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from starlette.datastructures import QueryParams
from starlette.types import Send

from api.calls import Call, Kind
from api.routing import Route
from api.settings import ApiSettings
from api.upstream import BROKEN, Failure, Unreachable, Upstream, broken_off, error_of, is_stale
from provisioner.auth import Principal
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import FileSent

#: Seconds that one request waits for a file to be put there; with what came before it stays under 25.
_WAIT_S = 15.0
#: Tells that a log goes on after the last line of this answer.
MORE_HEADER = b"x-shoal-more"


@dataclass(frozen=True, kw_only=True)
class Within:
    """An answer under the limit. `more`: it is the beginning of a log, and goes on after its last seq."""

    content: bytes
    more: bool = False

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is told beside it."""
        return [(MORE_HEADER, b"true")] if self.more else []


class SendsOut(Protocol):
    """Files out of sessions (`provisioner.transfers`)."""

    async def send_out(self, who: Principal, session: SessionId) -> str:
        """A new one's id."""

    async def check_out(self, who: Principal, session: SessionId, id: str) -> None:
        """Whether it is one of this session.

        Raises:
            ShoalError: NOT_FOUND.
        """

    async def read_link(self, id: str, *, media_type: str) -> str:
        """Where it is read."""


class Large:
    """The limit, and the way around it for files."""

    def __init__(self, *, upstream: Upstream, transfers: SendsOut, settings: ApiSettings) -> None:
        self._upstream = upstream
        self._transfers = transfers
        self.limit_bytes = settings.answer_limit_bytes

    async def within(self, call: Call, chunks: AsyncIterator[bytes]) -> Within | None:
        """What this entrance carries of an answer: all of it, or of a log whole lines; None when that cannot be.

        Raises:
            ShoalError: HOST_UNREACHABLE: it broke off.
        """
        assert self.limit_bytes is not None
        held = bytearray()
        try:
            async for chunk in chunks:
                held += chunk
                if len(held) > self.limit_bytes:
                    if call.operation.kind is not Kind.TRAJECTORY:
                        return None
                    end = held.rfind(b"\n", 0, self.limit_bytes) + 1
                    return Within(content=bytes(held[:end]), more=True) if end else None
        except BROKEN as error:
            raise broken_off(error) from error
        return Within(content=bytes(held))

    def refusal(self, call: Call) -> ShoalError:
        """What is told of an answer that is over the limit and no file."""
        return ShoalError(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"the answer is over {self.limit_bytes} bytes, which is all that this entrance carries; what was done is "
            "done. Ask for less (output_limit_bytes, offset and limit, max_results), or write to a file and fetch "
            "it by GET .../files",
            details={"limit_bytes": self.limit_bytes, "direction": "answer"},
        )

    async def begin(self, caller: Principal, call: Call, route: Route, send: Send) -> Failure | None:
        """A file is over the limit: have it sent, and tell where it will be."""
        id = await self._transfers.send_out(caller, SessionId(call.session))
        return await self._go_on(call, route, id, send)

    async def go_on(self, caller: Principal, call: Call, route: Route, send: Send) -> Failure | None:
        """The caller follows its redirect.

        Raises:
            ShoalError: NOT_FOUND when the transfer is not one out of this session.
        """
        id = QueryParams(call.query)["transfer"]
        await self._transfers.check_out(caller, SessionId(call.session), id)
        return await self._go_on(call, route, id, send)

    async def _go_on(self, call: Call, route: Route, id: str, send: Send) -> Failure | None:
        path = QueryParams(call.query).get("path", "")
        where = f"path={quote(path, safe='/')}&transfer={quote(id)}"
        target = f"/v1/sessions/{quote(call.session, safe='')}/files:send?{where}&wait_s={_WAIT_S:g}"
        try:
            response = await self._upstream.send(route, "POST", target, headers={}, data=b"")
        except Unreachable as unreachable:
            return unreachable
        async with response:
            if response.status >= 400:
                error = await error_of(response)
                if is_stale(error):
                    return error
                raise error
            if response.status == 202:
                await _see_other(f"files?{where}", {}, send)
                return None
            try:
                sent = FileSent.model_validate_json(await response.read())
            except BROKEN as error:
                raise broken_off(error) from error
        media_type = "application/x-tar" if sent.kind == "directory" else "application/octet-stream"
        link = await self._transfers.read_link(id, media_type=media_type)
        told = {
            "x-shoal-kind": sent.kind,
            "x-shoal-mode": f"{sent.mode:o}",
            "x-shoal-mtime-ns": str(sent.mtime_ns),
            "x-shoal-size-bytes": str(sent.size_bytes),
            "x-shoal-sha256": sent.sha256,
        }
        await _see_other(link, told, send)
        return None


async def _see_other(location: str, headers: dict[str, str], send: Send) -> None:
    told = {"location": location, "cache-control": "no-store", "content-length": "0", **headers}
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told.items()]
    await send({"type": "http.response.start", "status": 303, "headers": pairs})
    await send({"type": "http.response.body", "body": b""})
