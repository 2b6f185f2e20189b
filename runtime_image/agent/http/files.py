"""Raw files and directories, streamed both ways in constant memory; and the trajectory.

`GET .../files?path=` answers the bytes, or for a directory a tar (`application/x-tar`). `PUT` writes the body: to a
file, aside and then renamed; or, with `Content-Type: application/x-tar`, unpacked into the directory `path`. A PUT's
answer has `sha256` and `size_bytes`; with `X-Shoal-Sha256` on the request the content is checked before it shows. A GET
with `checksum=true` reads the file twice and has the header `X-Shoal-Sha256`.

What an entrance does not carry goes by the blob store: a PUT with `transfer=` takes its bytes from there, and
`POST .../files:send?path=&transfer=` puts a file there. Both answer 202 while it goes on, and are asked again then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from runtime_image.agent.hosted import Hosted
from runtime_image.agent.http.actions import session_of
from runtime_image.agent.http.guard import flag, guarded, json_response, number, wait_s
from runtime_image.agent.link import FileError, FileReader, FileWriter, GuestLink
from runtime_image.agent.passages import FileTarget, Passages
from shoal.contract.base import MAX_WAIT_S
from shoal.contract.errors import ErrorCode, ShoalError, invalid

if TYPE_CHECKING:
    from runtime_image.agent.service import SandboxService
    from runtime_image.agent.tokens import TokenVerifier

SHA256_HEADER = "x-shoal-sha256"
TAR = "application/x-tar"


class FileRoutes:
    """`/v1/sessions/{session}/files` and `/trajectory`, for session tokens."""

    def __init__(self, service: SandboxService, tokens: TokenVerifier, passages: Passages) -> None:
        self._service = service
        self._tokens = tokens
        self._passages = passages

    def routes(self) -> list[Route]:
        """Its routes."""
        base = "/v1/sessions/{session}"
        return [
            Route(base + "/files", guarded(self.get), methods=["GET", "HEAD"]),
            Route(base + "/files", guarded(self.put), methods=["PUT"]),
            Route(base + "/files:send", guarded(self.send), methods=["POST"]),
            Route(base + "/trajectory", guarded(self.trajectory), methods=["GET"]),
        ]

    async def trajectory(self, request: Request) -> Response:
        """The session's log as JSON lines."""
        hosted = session_of(request, self._service, self._tokens, write=False)
        lines = hosted.records.lines(number(request, "after_seq", 0))
        first = await anext(lines, None)

        async def body() -> AsyncIterator[bytes]:
            if first is not None:
                yield first
            async for line in lines:
                yield line

        return StreamingResponse(body(), media_type="application/x-ndjson")

    async def get(self, request: Request) -> Response:
        """A file's bytes, or a directory as a tar."""
        hosted = session_of(request, self._service, self._tokens, write=False)
        hosted.require_running()
        path, link = _path(request), _link(hosted)
        try:
            digest = await _digest(link, hosted, path) if flag(request, "checksum", False) else None
            reader = await link.open_read(path, user=hosted.user, cwd=hosted.workdir)
        except FileError as error:
            raise file_refused(path, error) from error
        info = reader.info
        headers = {
            "x-shoal-mode": f"{info.mode:o}",
            "x-shoal-mtime-ns": str(info.mtime_ns),
            "x-shoal-kind": info.kind,
        }
        if digest is not None:
            headers[SHA256_HEADER] = digest
        if info.kind == "file" and info.size_bytes:
            headers["content-length"] = str(info.size_bytes)
        media_type = TAR if info.kind == "directory" else "application/octet-stream"
        if request.method == "HEAD":
            await reader.aclose()
            return Response(headers=headers, media_type=media_type)
        return StreamingResponse(_send(hosted, reader), headers=headers, media_type=media_type)

    async def put(self, request: Request) -> Response:
        """Write a file, or unpack a tar into a directory."""
        hosted = session_of(request, self._service, self._tokens, write=True)
        hosted.require_running()
        if hosted.rewound:
            raise ShoalError(
                ErrorCode.SESSION_REWOUND, "The session's disk went back; acknowledge it to go on."
            )
        link = _link(hosted)
        target = FileTarget(
            path=_path(request),
            is_tar=request.headers.get("content-type", "").partition(";")[0].strip().lower() == TAR,
            mode=_mode(request),
            owner=request.query_params.get("owner"),
            create_parents=flag(request, "create_parents", True),
        )
        transfer = request.query_params.get("transfer")
        try:
            if transfer is not None:
                told = await self._passages.bring_in(
                    hosted, link, transfer, target, wait_s(request, MAX_WAIT_S)
                )
                return _going_on(transfer) if told is None else json_response(json.dumps(told))
            writer = await target.open(hosted, link)
        except FileError as error:
            raise file_refused(target.path, error) from error
        hosted.using += 1
        try:
            async with writer:
                return await _receive(request, writer, target)
        finally:
            hosted.using -= 1
            hosted.touch()

    async def send(self, request: Request) -> Response:
        """Put a file, or a directory's tar, at its transfer's URL."""
        hosted = session_of(request, self._service, self._tokens, write=False)
        hosted.require_running()
        path, link = _path(request), _link(hosted)
        transfer = request.query_params.get("transfer")
        if not transfer:
            raise invalid("query.transfer", "is missing")
        try:
            sent = await self._passages.send_out(hosted, link, transfer, path, wait_s(request, MAX_WAIT_S))
        except FileError as error:
            raise file_refused(path, error) from error
        return _going_on(transfer) if sent is None else json_response(sent.model_dump_json())


def _going_on(transfer: str) -> Response:
    return json_response(json.dumps({"transfer": transfer, "status": "running"}), status=202)


async def _receive(request: Request, writer: FileWriter, target: FileTarget) -> Response:
    digest = hashlib.sha256()
    size = 0
    async for chunk in request.stream():
        if chunk:
            digest.update(chunk)
            size += len(chunk)
            await writer.write(chunk)
    wanted = request.headers.get(SHA256_HEADER)
    if wanted is not None and wanted.strip().lower() != digest.hexdigest():
        refusal = invalid(f"header.{SHA256_HEADER}", "does not match the content; nothing was written")
        refusal.details["sha256"] = digest.hexdigest()
        raise refusal
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) != size:
        raise ClientDisconnect
    try:
        info = await writer.commit()
    except FileError as error:
        raise file_refused(target.path, error) from error
    return json_response(json.dumps(target.told(info, size, digest.hexdigest())))


async def _send(hosted: Hosted, reader: FileReader) -> AsyncIterator[bytes]:
    # What a file grows by while it is read is left out; one that shrinks makes the server cut the connection.
    left = reader.info.size_bytes if reader.info.kind == "file" and reader.info.size_bytes else None
    hosted.using += 1
    try:
        async for data in reader:
            if left is not None:
                data = data[:left]
                left -= len(data)
            if data:
                yield data
            if left == 0:
                return
    finally:
        hosted.using -= 1
        hosted.touch()
        await reader.aclose()


async def _digest(link: GuestLink, hosted: Hosted, path: str) -> str | None:
    digest = hashlib.sha256()
    async with await link.open_read(path, user=hosted.user, cwd=hosted.workdir) as reader:
        if reader.info.kind != "file":
            return None
        async for data in reader:
            digest.update(data)
    return digest.hexdigest()


def _link(hosted: Hosted) -> GuestLink:
    if hosted.link is None:
        raise hosted.refusal()
    return hosted.link


def _path(request: Request) -> str:
    path = request.query_params.get("path")
    if not path:
        raise invalid("query.path", "is missing")
    if "\0" in path or len(path) > 4096:
        raise invalid("query.path", "is not a path")
    return path


def _mode(request: Request) -> int | None:
    raw = request.query_params.get("mode")
    if raw is None:
        return None
    try:
        mode = int(raw, 8)
    except ValueError:
        raise invalid("query.mode", "is not an octal number such as 644") from None
    if not 0 <= mode <= 0o7777:
        raise invalid("query.mode", "is not between 0 and 7777")
    return mode


def file_refused(path: str, error: FileError) -> ShoalError:
    """What the sandbox's system said about a file, as the answer to a transfer, which has no observation."""
    code = ErrorCode.NOT_FOUND if error.errno_name == "ENOENT" else ErrorCode.CONFLICT
    # The sandbox names the file it failed at: not always the one that was asked for, and not twice if it is.
    message = error.message.removesuffix(f": {path}")
    return ShoalError(
        code,
        f"{path}: {message}",
        details={"errno": error.errno_name, "path": path, "message": message},
    )
