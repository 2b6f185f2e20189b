"""Objects by URL from a store over HTTP: in parts where it can, whole where it cannot, and never a mixture."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from runtime_image.agent import transfer as module
from runtime_image.agent.transfer import TransferError, UrlTransfer
from shoal.contract.urls import Url


class ObjectStore:
    """One object. `fail` makes the next answers bad: a status, or `cut` for a body that breaks off."""

    def __init__(self) -> None:
        self.data = b""
        self.ranges = True
        self.fail: list[int | str] = []
        self.asked: Counter[str] = Counter()
        self.etag = '"1"'
        self.url = ""
        self.change_after = 0
        self.paused: list[float] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.headers.get("range", request.method)] += 1
        how = self.fail.pop(0) if self.fail else 200
        if isinstance(how, int) and how != 200:
            return web.Response(status=how)
        if request.method == "PUT":
            self.data = await request.read()
            return web.Response()
        if self.change_after and sum(self.asked.values()) > self.change_after:
            self.etag, self.data = '"2"', self.data[::-1]
            self.change_after = 0
        if request.headers.get("if-match", self.etag) != self.etag:
            return web.Response(status=412)
        body, status, headers = self.data, 200, {"etag": self.etag}
        if self.ranges and "range" in request.headers:
            start, end = (int(each) for each in request.headers["range"].removeprefix("bytes=").split("-"))
            if start >= len(self.data):
                return web.Response(status=416)
            body, status = self.data[start : end + 1], 206
            headers["content-range"] = f"bytes {start}-{start + len(body) - 1}/{len(self.data)}"
        if how == "cut":
            response = web.StreamResponse(
                status=status, headers={**headers, "content-length": str(len(body))}
            )
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(status=status, body=body, headers=headers)


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectStore]:
    monkeypatch.setattr(module, "_PART_BYTES", 1000)
    made = ObjectStore()
    app = web.Application()
    app.router.add_route("*", "/o", made.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = "http://{}:{}/o".format(*runner.addresses[0][:2])
    yield made
    await runner.cleanup()


@pytest.fixture
async def transfer(store: ObjectStore) -> AsyncIterator[UrlTransfer]:
    async def pause(seconds: float) -> None:
        store.paused.append(seconds)

    made = UrlTransfer(pause=pause)
    yield made
    await made.close()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 12_345])
async def test_bytes_come_whole(
    store: ObjectStore, transfer: UrlTransfer, tmp_path: Path, size: int, ranges: bool
) -> None:
    """Of any size around those of parts, from a store with ranges and from one without; over what was there before."""
    store.data, store.ranges = os.urandom(size), ranges
    (tmp_path / "into").write_bytes(b"before" * 10_000)
    assert await transfer.get(Url(url=store.url), tmp_path / "into") == size
    assert (tmp_path / "into").read_bytes() == store.data
    assert len(store.asked) == (max(1, -(-size // 1000)) if ranges else 1)


@pytest.mark.parametrize("bad", [503, 429, "cut"])
async def test_a_busy_store_is_asked_again(
    store: ObjectStore, transfer: UrlTransfer, tmp_path: Path, bad: int | str
) -> None:
    """Both ways, each part by itself, within bounds; what was refused is not."""
    store.data, store.fail = os.urandom(5000), [bad, 200, bad, 200, bad]
    assert await transfer.get(Url(url=store.url), tmp_path / "into") == 5000
    assert (tmp_path / "into").read_bytes() == store.data
    assert store.paused == [0.2] * 3
    store.fail = [503, 503]
    await transfer.put(Url(url=store.url), tmp_path / "into")
    store.fail = [503] * 10
    with pytest.raises(TransferError, match="503"):
        await transfer.put(Url(url=store.url), tmp_path / "into")
    assert len(store.fail) == 6
    store.fail = [403]
    with pytest.raises(TransferError, match="403"):
        await transfer.get(Url(url=store.url), tmp_path / "into")
    store.fail = [404]
    with pytest.raises(TransferError) as missing:
        await transfer.get(Url(url=store.url), tmp_path / "into")
    assert missing.value.missing


async def test_parts_of_two_objects_are_not_mixed(
    store: ObjectStore, transfer: UrlTransfer, tmp_path: Path
) -> None:
    """Replaced in the middle, the old one cannot be had any more: that is an error, not a file."""
    store.data, store.change_after = os.urandom(5000), 2
    with pytest.raises(TransferError, match="412"):
        await transfer.get(Url(url=store.url), tmp_path / "into")


async def test_a_read_that_breaks_off_is_told(store: ObjectStore, transfer: UrlTransfer) -> None:
    """A stream that was half used cannot be repeated here."""
    store.data = os.urandom(5000)
    assert b"".join([chunk async for chunk in transfer.read(Url(url=store.url))]) == store.data
    store.fail = ["cut"]
    with pytest.raises(TransferError):
        async for _ in transfer.read(Url(url=store.url)):
            pass
    store.fail = [404]
    with pytest.raises(TransferError) as missing:
        async for _ in transfer.read(Url(url=store.url)):
            pass
    assert missing.value.missing
