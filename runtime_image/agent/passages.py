"""Large files in and out of sandboxes beside the entrance: between the blob store and the guest, through this host.

Each has the id of a transfer, and is one task however often it is asked for: a caller whose poll ended, or whose answer
was lost, asks again and is told how it went.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from runtime_image.agent.control import ControlPlane
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.link import FileReader, FileWriter, GuestLink
from runtime_image.agent.transfer import Transfer, TransferError
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import FileSent
from shoal.contract.transfers import MAX_TRANSFER_BYTES
from shoal.contract.urls import TransferGet, TransferPut

#: Ended ones that are remembered.
_REMEMBERED = 512
#: Files on their way out at once: each is whole on this host's disk for a while, since its size and sum come first.
_OUT_AT_ONCE = 4
_CHECK_DISK_BYTES = 64 << 20

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileTarget:
    """Where a file, or a tree, goes in a session, as the query says."""

    path: str
    is_tar: bool
    mode: int | None
    owner: str | None
    create_parents: bool

    async def open(self, hosted: Hosted, link: GuestLink) -> FileWriter:
        """Begin to write it.

        Raises:
            FileError: The sandbox's system refuses.
        """
        if self.is_tar:
            return await link.open_write_tar(
                self.path, create_parents=self.create_parents, user=hosted.user, cwd=hosted.workdir
            )
        return await link.open_write(
            self.path,
            mode=self.mode,
            owner=self.owner,
            create_parents=self.create_parents,
            user=hosted.user,
            cwd=hosted.workdir,
        )

    @property
    def use(self) -> str:
        """Names this use of a transfer: another path or mode is another."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def told(self, info: dict[str, Any], size: int, sha256: str) -> dict[str, Any]:
        """What the caller is answered once it is in place."""
        answer: dict[str, Any] = {"path": self.path, "size_bytes": size, "sha256": sha256}
        for name in ("kind", "mode", "created", "members"):
            if info.get(name) is not None:
                answer[name] = info[name]
        return answer


class Passages:
    """What is under way, and how it ended.

    Args:
        spool: A directory of ours; emptied here.
        floor_bytes: What is left free on its disk, at the least.
    """

    def __init__(self, control: ControlPlane, transfer: Transfer, *, spool: Path, floor_bytes: int) -> None:
        self._control = control
        self._transfer = transfer
        self._spool = spool
        self._floor_bytes = floor_bytes
        self._out = asyncio.Semaphore(_OUT_AT_ONCE)
        self._tasks: dict[tuple[str, ...], asyncio.Task[Any]] = {}
        shutil.rmtree(spool, ignore_errors=True)

    async def bring_in(
        self, hosted: Hosted, link: GuestLink, id: str, target: FileTarget, wait_s: float
    ) -> dict[str, Any] | None:
        """Put an announced file in its place; None while that goes on after `wait_s`.

        Raises:
            ShoalError: CONFLICT when nothing was put at its URL, NOT_FOUND, UNAVAILABLE.
            FileError: The sandbox's system refuses.
        """
        key = ("in", hosted.session, str(hosted.epoch), id, target.use)
        return await self._one(hosted, key, lambda: self._bring_in(hosted, link, id, target), wait_s)

    async def send_out(
        self, hosted: Hosted, link: GuestLink, id: str, path: str, wait_s: float
    ) -> FileSent | None:
        """Send a file, or a directory's tar; None while that goes on after `wait_s`.

        Raises:
            ShoalError: PAYLOAD_TOO_LARGE, NOT_FOUND, HOST_REFUSED when this host's disk is too full, UNAVAILABLE.
            FileError: The sandbox's system refuses.
        """
        key = ("out", hosted.session, str(hosted.epoch), id, path)
        return await self._one(hosted, key, lambda: self._send_out(hosted, link, id, path), wait_s)

    async def _one(
        self, hosted: Hosted, key: tuple[str, ...], work: Callable[[], Awaitable[T]], wait_s: float
    ) -> T | None:
        task: asyncio.Task[T] | None = self._tasks.get(key)
        if task is None:
            task = asyncio.create_task(self._counted(hosted, work))
            self._tasks[key] = task
            hosted.tasks.add(task)  # type: ignore[arg-type]  # ended with the session
            task.add_done_callback(hosted.tasks.discard)
            task.add_done_callback(lambda done: self._ended(key, done))
        await asyncio.wait({task}, timeout=wait_s)
        if task.cancelled():
            raise hosted.refusal()
        return task.result() if task.done() else None

    def _ended(self, key: tuple[str, ...], task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            # Asked again, it is tried again; those who wait have the task itself.
            self._tasks.pop(key, None)
        ended = [key for key, task in self._tasks.items() if task.done()]
        for key in ended[:-_REMEMBERED]:
            del self._tasks[key]

    async def _counted(self, hosted: Hosted, work: Callable[[], Awaitable[T]]) -> T:
        hosted.using += 1
        try:
            return await work()
        except TransferError as error:
            if error.missing:
                raise ShoalError(
                    ErrorCode.CONFLICT, "Nothing was put at the transfer's URL yet; put the file there first."
                ) from error
            raise ShoalError(
                ErrorCode.UNAVAILABLE, f"The file did not get across: {error}", retry_after_s=1.0
            ) from error
        finally:
            hosted.using -= 1
            hosted.touch()

    async def _bring_in(self, hosted: Hosted, link: GuestLink, id: str, target: FileTarget) -> dict[str, Any]:
        # The writer first: what the sandbox refuses does not use the transfer up.
        async with await target.open(hosted, link) as writer:
            (url,) = await self._control.urls(
                [TransferGet(transfer=id, session=hosted.session, use=target.use)]
            )
            digest = hashlib.sha256()
            size = 0
            async for chunk in self._transfer.read(url):
                digest.update(chunk)
                size += len(chunk)
                await writer.write(chunk)
            if url.size_bytes not in (None, size) or url.sha256 not in (None, digest.hexdigest()):
                raise ShoalError(
                    ErrorCode.CONFLICT,
                    "What was put at the transfer's URL is not what was announced; nothing was written.",
                    details={"size_bytes": size, "sha256": digest.hexdigest()},
                )
            return target.told(await writer.commit(), size, digest.hexdigest())

    async def _send_out(self, hosted: Hosted, link: GuestLink, id: str, path: str) -> FileSent:
        async with self._out:
            spool = self._spool / f"{id}.{secrets.token_hex(4)}"
            await asyncio.to_thread(self._spool.mkdir, parents=True, exist_ok=True, mode=0o700)
            try:
                async with await link.open_read(path, user=hosted.user, cwd=hosted.workdir) as reader:
                    info = reader.info
                    size, sha256 = await self._spooled(reader, spool)
                (url,) = await self._control.urls(
                    [TransferPut(transfer=id, session=hosted.session, size_bytes=size, sha256=sha256)]
                )
                kind = "application/x-tar" if info.kind == "directory" else "application/octet-stream"
                await self._transfer.put(
                    url.model_copy(update={"headers": {**url.headers, "content-type": kind}}), spool
                )
            finally:
                await asyncio.to_thread(spool.unlink, missing_ok=True)
        return FileSent(
            size_bytes=size, sha256=sha256, kind=info.kind, mode=info.mode, mtime_ns=info.mtime_ns
        )

    async def _spooled(self, reader: FileReader, spool: Path) -> tuple[int, str]:
        digest = hashlib.sha256()
        size = 0
        left = reader.info.size_bytes if reader.info.kind == "file" and reader.info.size_bytes else None
        checked = -1
        with await asyncio.to_thread(spool.open, "wb") as out:
            async for data in reader:
                if (
                    left is not None
                ):  # what a file grows by while it is read is left out, as when it is streamed
                    data = data[: left - size]
                if not data:
                    break
                size += len(data)
                if size > MAX_TRANSFER_BYTES:
                    raise ShoalError(
                        ErrorCode.PAYLOAD_TOO_LARGE,
                        f"It is over {MAX_TRANSFER_BYTES} bytes; fetch it in parts.",
                        details={"limit_bytes": MAX_TRANSFER_BYTES},
                    )
                if size // _CHECK_DISK_BYTES != checked:
                    checked = size // _CHECK_DISK_BYTES
                    free = (await asyncio.to_thread(shutil.disk_usage, self._spool)).free
                    if free < self._floor_bytes + _CHECK_DISK_BYTES:
                        raise ShoalError(
                            ErrorCode.HOST_REFUSED,
                            "The host's disk is too full for it now.",
                            retry_after_s=5.0,
                        )
                digest.update(data)
                await asyncio.to_thread(out.write, data)
        if left is not None and size < left:
            raise ShoalError(ErrorCode.UNAVAILABLE, "The file shrank while it was read; fetch it again.")
        return size, digest.hexdigest()
