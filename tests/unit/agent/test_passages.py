"""Large files through a host: one task however often it is asked for, nothing half done, the host's own disk spared."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime_image.agent import passages as module
from runtime_image.agent.control import ControlPlane
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.link import GuestLink
from runtime_image.agent.passages import FileTarget, Passages
from runtime_image.agent.transfer import TransferError
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.urls import Url, UrlAsked

TARGET = FileTarget(path="/a", is_tar=False, mode=None, owner=None, create_parents=True)
DATA = b"x" * 1000
SHA = hashlib.sha256(DATA).hexdigest()


class Store:
    """The control plane's URLs and the blob store behind them."""

    def __init__(self) -> None:
        self.asked: list[UrlAsked] = []
        self.objects: dict[str, bytes] = {"in": DATA}
        self.kinds: list[str | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.told: dict[str, Any] = {"size_bytes": len(DATA), "sha256": SHA}

    async def urls(self, items: Sequence[UrlAsked]) -> list[Url]:
        self.asked += items
        return [Url(url="in" if item.op == "transfer_get" else "out", **self.told) for item in items]

    async def read(self, url: Url) -> AsyncIterator[bytes]:
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        if url.url not in self.objects:
            raise TransferError("none", missing=True)
        yield self.objects[url.url]

    async def put(self, url: Url, source: Path) -> None:
        await self.gate.wait()
        self.kinds.append(url.headers.get("content-type"))
        self.objects[url.url] = source.read_bytes()


class Guest:
    """A sandbox's files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.aborted = 0
        self.grown = b""

    async def open_write(self, path: str, **options: Any) -> Any:
        return _Writer(self, path)

    async def open_read(self, path: str, **options: Any) -> Any:
        return _Reader(self.files[path], self.grown)


class _Writer:
    def __init__(self, guest: Guest, path: str) -> None:
        self._guest, self._path, self._held, self._done = guest, path, b"", False

    async def __aenter__(self) -> _Writer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._guest.aborted += not self._done

    async def write(self, data: bytes) -> None:
        self._held += data

    async def commit(self) -> dict[str, Any]:
        self._guest.files[self._path] = self._held
        self._done = True
        return {"kind": "file", "mode": 0o644}


class _Reader:
    def __init__(self, data: bytes, grown: bytes) -> None:
        self._data = data + grown
        self.info = SimpleNamespace(kind="file", size_bytes=len(data), mode=0o600, mtime_ns=7)

    async def __aenter__(self) -> _Reader:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), 300):
            yield self._data[start : start + 300]


class House:
    def __init__(self, tmp_path: Path) -> None:
        self.store, self.guest = Store(), Guest()
        self.spool = tmp_path / "spool"
        self.hosted = cast(
            "Hosted",
            SimpleNamespace(
                session="ses_1",
                epoch=1,
                user=None,
                workdir="/",
                tasks=set(),
                using=0,
                touch=lambda: None,
                refusal=lambda: ShoalError(ErrorCode.SANDBOX_LOST, "it ended"),
            ),
        )
        control = cast("ControlPlane", self.store)
        self.passages = Passages(control, self.store, spool=self.spool, floor_bytes=0)  # type: ignore[arg-type]

    async def bring_in(self, id: str = "trf_1", wait_s: float = 25.0) -> dict[str, Any] | None:
        link = cast("GuestLink", self.guest)
        return await self.passages.bring_in(self.hosted, link, id, TARGET, wait_s)

    async def send_out(self, id: str = "trf_1", wait_s: float = 25.0) -> Any:
        link = cast("GuestLink", self.guest)
        return await self.passages.send_out(self.hosted, link, id, "/a", wait_s)


@pytest.fixture
async def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def code(call: Any) -> ErrorCode:
    with pytest.raises(ShoalError) as raised:
        await call
    return raised.value.code


async def test_asked_again_it_is_the_same_task(house: House) -> None:
    """While it runs, and after it ended: the URL is asked for once, and each caller is told the same."""
    house.store.gate.clear()
    assert await house.bring_in(wait_s=0) is None
    waiting = asyncio.create_task(house.bring_in())
    assert await house.bring_in(wait_s=0) is None
    assert house.hosted.using == 1
    house.store.gate.set()
    told = await waiting
    assert told == {"path": "/a", "size_bytes": 1000, "sha256": SHA, "kind": "file", "mode": 0o644}
    assert await house.bring_in() == told
    assert len(house.store.asked) == 1
    assert (house.guest.files, house.hosted.using) == ({"/a": DATA}, 0)


async def test_what_failed_may_be_tried_again(house: House) -> None:
    """A broken way is passing, and leaves nothing; the next try writes it whole."""
    house.store.failures = [TransferError("broke off")]
    assert await code(house.bring_in()) is ErrorCode.UNAVAILABLE
    assert (house.guest.files, house.guest.aborted) == ({}, 1)
    assert await house.bring_in() is not None
    assert house.guest.files == {"/a": DATA}


@pytest.mark.parametrize("told", [{"size_bytes": 999}, {"sha256": "0" * 64}])
async def test_other_bytes_than_announced_are_not_written(house: House, told: dict[str, Any]) -> None:
    """Size and sum are looked at before the file shows; and nothing there is the caller's to mend."""
    house.store.told |= told
    assert await code(house.bring_in()) is ErrorCode.CONFLICT
    house.store.objects.clear()
    assert await code(house.bring_in("trf_2")) is ErrorCode.CONFLICT
    assert (house.guest.files, house.guest.aborted) == ({}, 2)


async def test_a_file_out_is_told_as_it_went(house: House) -> None:
    """Size, sum, mode; what it grew by meanwhile is left out; the copy on the host's disk is gone."""
    house.guest.files["/a"] = DATA
    house.guest.grown = b"y" * 500
    house.store.gate.clear()
    assert await house.send_out(wait_s=0) is None
    house.store.gate.set()
    sent = await house.send_out()
    assert (sent.size_bytes, sent.sha256, sent.mode, sent.kind) == (1000, SHA, 0o600, "file")
    assert house.store.objects["out"] == DATA
    assert house.store.kinds == ["application/octet-stream"]
    assert list(house.spool.iterdir()) == []


async def test_a_host_does_not_fill_its_disk_with_them(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is the host's refusal, too large a file the caller's to split; neither leaves anything."""
    house.guest.files["/a"] = DATA
    monkeypatch.setattr(module, "MAX_TRANSFER_BYTES", 999)
    assert await code(house.send_out()) is ErrorCode.PAYLOAD_TOO_LARGE
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(module, "MAX_TRANSFER_BYTES", 5000)
    assert await code(house.send_out()) is ErrorCode.HOST_REFUSED
    assert list(house.spool.iterdir()) == []


async def test_they_end_with_their_session(house: House) -> None:
    """What is under way is among the session's tasks, which its end cancels: nothing is written after."""
    house.store.gate.clear()
    waiting = asyncio.create_task(house.bring_in())
    assert await house.bring_in(wait_s=0) is None
    (task,) = house.hosted.tasks
    task.cancel()
    assert await code(waiting) is ErrorCode.SANDBOX_LOST
    assert (house.guest.files, house.guest.aborted, house.hosted.using) == ({}, 1, 0)
    assert house.hosted.tasks == set()
