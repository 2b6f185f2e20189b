"""The blob port's promises, on every adapter."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from provisioner.blobs.fake import FakeBlobs
from provisioner.blobs.local import LocalBlobs
from provisioner.blobs.port import (
    BlobCorrupt,
    BlobExists,
    BlobFull,
    BlobMissing,
    Blobs,
    BlobUnavailable,
)
from provisioner.blobs.s3 import S3Blobs
from tests.contract.hostile_s3 import HastyClock, HostileS3
from tests.emulators import aws_clients, fresh_name

#: `s3-bad-day` is S3 through a client that loses answers, is throttled, conflicts and breaks bodies off.
ADAPTERS = ("fake", "local", "s3", "s3-bad-day")


@pytest.fixture(params=ADAPTERS)
async def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Blobs]:
    if request.param == "fake":
        yield FakeBlobs()
    elif request.param == "local":
        yield LocalBlobs(tmp_path / "blobs")
    else:
        clients = aws_clients(request.getfixturevalue("ministack"))
        bucket = fresh_name()
        await (await clients.get("s3")).create_bucket(Bucket=bucket)
        if request.param == "s3":
            yield S3Blobs(clients, bucket, prefix="some/where/")
        else:
            seed = random.randrange(1 << 30)
            print(f"seed {seed}")
            yield S3Blobs(HostileS3(clients, seed), bucket, clock=HastyClock())
        await clients.close()


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def whole(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in stream])


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_bytes_come_back_as_they_went(blobs: Blobs) -> None:
    """Objects are exact: empty, binary, streamed in pieces of any size, larger than a chunk."""
    large = os.urandom(3_000_000)
    assert (await blobs.put("a/empty", b"")).size_bytes == 0
    assert (await blobs.put("a/large", pieces(large[:7], b"", large[7:]))).size_bytes == len(large)
    assert await whole(blobs.get("a/large")) == large
    assert await blobs.read("a/empty") == b""
    info = await blobs.head("a/large")
    assert info is not None
    assert info.size_bytes == len(large)


async def test_what_is_missing_says_so(blobs: Blobs) -> None:
    """A missing object is BlobMissing to readers, None to head, and no failure to delete."""
    with pytest.raises(BlobMissing):
        await blobs.read("nope")
    with pytest.raises(BlobMissing):
        await whole(blobs.get("nope"))
    assert await blobs.head("nope") is None
    await blobs.delete("nope")


async def test_put_replaces_and_delete_takes(blobs: Blobs) -> None:
    """A put replaces; a delete takes away."""
    await blobs.put("a", b"1")
    await blobs.put("a", b"22")
    assert await blobs.read("a") == b"22"
    await blobs.delete("a")
    assert await blobs.head("a") is None


async def test_a_wrong_checksum_stores_nothing(blobs: Blobs) -> None:
    """Bytes that do not match what was promised leave no object, and do not touch the one there is."""
    await blobs.put("a", b"old")
    with pytest.raises(BlobCorrupt):
        await blobs.put("a", b"new", sha256=sha(b"other"))
    assert await blobs.read("a") == b"old"
    await blobs.put("a", pieces(b"n", b"ew"), sha256=sha(b"new"))
    assert await blobs.read("a") == b"new"


async def test_one_of_many_is_the_first(blobs: Blobs) -> None:
    """Of 64 conditional puts at once one succeeds, and its bytes are what is there."""

    async def put(n: int) -> int | None:
        try:
            await blobs.put_if_absent("manifest", str(n).encode())
        except BlobExists:
            return None
        return n

    winners = [n for n in await asyncio.gather(*(put(n) for n in range(64))) if n is not None]
    assert len(winners) == 1
    assert await blobs.read("manifest") == str(winners[0]).encode()


async def test_a_broken_stream_stores_nothing(blobs: Blobs) -> None:
    """A source that fails half way leaves nothing, not even half an object."""

    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        await blobs.put("a", broken())
    assert await blobs.head("a") is None
    assert [info async for info in blobs.list()] == []


async def test_lists_by_prefix_in_order(blobs: Blobs) -> None:
    """Lists name what starts with the prefix, in order, with sizes; the prefix need not end at a slash."""
    for name in ("b/2", "a/1", "a/10", "a/2/x", "ab"):
        await blobs.put(name, name.encode())
    assert [info.name async for info in blobs.list()] == ["a/1", "a/10", "a/2/x", "ab", "b/2"]
    assert [info.name async for info in blobs.list("a/1")] == ["a/1", "a/10"]
    assert [info.size_bytes async for info in blobs.list("ab")] == [2]
    assert [info async for info in blobs.list("zzz")] == []


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", ".hidden", "a/.b", "a\0b", "a b", "a/", "x" * 600]
)
async def test_names_cannot_leave_their_place(blobs: Blobs, name: str) -> None:
    """What is no plain relative name is refused everywhere."""
    for call in (
        blobs.put(name, b""),
        blobs.put_if_absent(name, b""),
        blobs.read(name),
        blobs.head(name),
        blobs.delete(name),
        blobs.presign("get", name),
        blobs.presign("put", name),
    ):
        with pytest.raises(ValueError):
            await call


async def test_read_is_for_small_objects(blobs: Blobs) -> None:
    """A whole read of something larger than its limit is refused."""
    await blobs.put("a", b"12345")
    with pytest.raises(ValueError):
        await blobs.read("a", limit=4)
    assert await blobs.read("a", limit=5) == b"12345"


async def test_presigned_urls_name_one_object(blobs: Blobs) -> None:
    """A URL for each method, for that object alone."""
    get, put = await blobs.presign("get", "a/b"), await blobs.presign("put", "a/b")
    assert "a/b" in get.url
    assert "a/b" in put.url


async def test_local_urls_are_files_below_the_root(tmp_path: Path) -> None:
    """On one machine a URL is the file's own path: what a host puts there by rename is what readers get."""
    blobs = LocalBlobs(tmp_path / "with space" / "blobs")
    url = (await blobs.presign("put", "layers/aa/x")).url
    path = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
    assert path.is_relative_to(tmp_path / "with space" / "blobs")
    (path.parent / ".aside").write_bytes(b"bytes")
    assert [info async for info in blobs.list()] == []
    (path.parent / ".aside").rename(path)
    assert await blobs.read("layers/aa/x") == b"bytes"


async def test_local_is_private(tmp_path: Path) -> None:
    """Nobody else of the machine may enter, also when the directory was there before."""
    root = tmp_path / "blobs"
    root.mkdir(mode=0o755)
    LocalBlobs(root)
    assert root.stat().st_mode & 0o777 == 0o700


async def test_a_full_disk_is_typed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space left is BlobFull; nothing half made stays."""
    blobs = LocalBlobs(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BlobFull):
        await blobs.put("a", b"x")
    assert list(tmp_path.iterdir()) == []


async def test_the_fake_fails_and_loses_answers_as_scripted() -> None:
    """A scripted failure comes before the effect, a lost answer after it."""
    blobs = FakeBlobs()
    blobs.fail_call(1)
    with pytest.raises(BlobUnavailable):
        await blobs.put("a", b"x")
    assert blobs.objects == {}
    blobs.fail_call(1, after=True)
    with pytest.raises(BlobUnavailable):
        await blobs.put("a", b"x")
    assert blobs.objects == {"a": b"x"}
