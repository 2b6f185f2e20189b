"""What S3 asks of its adapter beyond the port: multipart uploads, conditions, signed URLs, and what AWS does that
emulators do not (by scripted answers)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import resource
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from provisioner.aws.clients import AwsClients
from provisioner.blobs import names, s3_writes
from provisioner.blobs.port import BlobCorrupt, BlobError, BlobExists, BlobTooLarge, BlobUnavailable
from provisioner.blobs.s3 import S3Blobs
from provisioner.blobs.s3_calls import UploadGone
from provisioner.clock import ManualClock
from runtime_image.agent.transfer import TransferError, UrlTransfer
from shoal.client.config import ClientConfig
from shoal.client.places import at, put_at
from shoal.client.pools import AsyncPool
from shoal.client.transfer import StreamSink
from shoal.contract.base import SessionId
from shoal.contract.transfers import UploadUrl
from shoal.contract.urls import Url
from tests.contract.hostile_s3 import HastyClock, HostileS3, refusal
from tests.emulators import aws_clients, fresh_name

PART = s3_writes.PART_BYTES


@pytest.fixture
async def clients(ministack: str) -> AsyncIterator[AwsClients]:
    made = aws_clients(ministack)
    yield made
    await made.close()


@pytest.fixture
async def bucket(clients: AwsClients) -> str:
    name = fresh_name()
    await (await clients.get("s3")).create_bucket(Bucket=name)
    return name


@pytest.fixture
def blobs(clients: AwsClients, bucket: str) -> S3Blobs:
    return S3Blobs(clients, bucket, clock=HastyClock())


async def stream(data: bytes, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, len(data), chunk):
        yield data[start : start + chunk]


async def unfinished(clients: AwsClients, bucket: str) -> list[Any]:
    found = await (await clients.get("s3")).list_multipart_uploads(Bucket=bucket)
    return list(found.get("Uploads", []))


class Scripted(HostileS3):
    """Clients that do no harm but what `before` does."""

    def harm(self, *kinds: str) -> str | None:
        return None


@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_parts_add_up(blobs: S3Blobs, extra: int) -> None:
    """Around the size of a part, and over several: the bytes are the same, as a stream and whole."""
    for count in (1, 3):
        data = os.urandom(count * PART + extra)
        hexed = hashlib.sha256(data).hexdigest()
        assert (await blobs.put("a", stream(data, 777_777), sha256=hexed)).size_bytes == len(data)
        assert hashlib.sha256(await blobs.read("a")).hexdigest() == hexed
        await blobs.put("b", data, sha256=hexed)
        assert hashlib.sha256(await blobs.read("b")).hexdigest() == hexed


async def test_a_failed_upload_leaves_no_parts(clients: AwsClients, bucket: str, blobs: S3Blobs) -> None:
    """A source that breaks, a wrong sum, and a caller that is cancelled: no object, and no parts to pay for."""
    data = os.urandom(3 * PART)

    async def broken() -> AsyncIterator[bytes]:
        yield data
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        await blobs.put("a", broken())
    with pytest.raises(BlobCorrupt):
        await blobs.put("a", stream(data), sha256="0" * 64)

    sent = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield data
        sent.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(blobs.put("a", stuck()))
    await sent.wait()
    assert len(await unfinished(clients, bucket)) == 1
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await blobs.head("a") is None
    assert await unfinished(clients, bucket) == []
    assert blobs.counts["aborts_failed"] == 0


async def test_one_of_many_streams_is_the_first(clients: AwsClients, bucket: str) -> None:
    """Of many conditional multipart uploads at once one succeeds, through lost answers too; none leaves parts."""
    hostile = S3Blobs(HostileS3(clients, 7), bucket, clock=HastyClock())

    async def put(n: int) -> int | None:
        try:
            await hostile.put_if_absent("a", stream(bytes([n]) * (PART + 1)))
        except BlobExists:
            return None
        return n

    winners = [n for n in await asyncio.gather(*(put(n) for n in range(8))) if n is not None]
    assert len(winners) == 1
    assert await hostile.read("a") == bytes([winners[0]]) * (PART + 1)
    s3 = await clients.get("s3")
    for left in await unfinished(clients, bucket):
        # Only beginnings whose answer was lost: nobody knows their ids.
        parts = await s3.list_parts(Bucket=bucket, Key="a", UploadId=left["UploadId"])
        assert parts.get("Parts", []) == []


async def test_a_dropped_upload_is_not_called_a_success(clients: AwsClients, bucket: str) -> None:
    """AWS answers a conflicting completion with 409 and drops the upload: the caller is told that it is not stored,
    or, when the other one was first, that there is an object."""
    first = True

    async def drop(real: Any, operation: str, arguments: dict[str, Any]) -> None:
        nonlocal first
        if operation == "complete_multipart_upload" and first:
            first = False
            where = {key: arguments[key] for key in ("Bucket", "Key", "UploadId")}
            await real.abort_multipart_upload(**where)
            if other:
                await real.put_object(Bucket=bucket, Key="a", Body=b"other")
            raise refusal(operation, 409, "ConditionalRequestConflict")

    blobs = S3Blobs(Scripted(clients, 0, before=drop), bucket, clock=HastyClock())
    other = False
    with pytest.raises(BlobUnavailable):
        await blobs.put_if_absent("a", stream(bytes(PART + 1)))
    assert await blobs.head("a") is None
    first = other = True
    with pytest.raises(BlobExists):
        await blobs.put_if_absent("a", stream(bytes(PART + 1)))
    assert await blobs.read("a") == b"other"


async def test_a_lost_answer_does_not_make_its_winner_a_loser(clients: AwsClients, bucket: str) -> None:
    """A conditional write whose answer was lost is repeated and finds its own object: it was the first, and says so.
    Another's is another's."""

    class LosesOnce(Scripted):
        lost = False

        def harm(self, *kinds: str) -> str | None:
            self.lost, before = True, self.lost
            return None if before else "lost"

    for name, data in (("whole", b"mine"), ("parts", b"m" * (PART + 1))):
        blobs = S3Blobs(LosesOnce(clients, 0), bucket, clock=HastyClock())
        if name == "parts":
            blobs._calls.call = _losing(blobs._calls.call)  # type: ignore[method-assign]
        await blobs.put_if_absent(name, data)
        assert await blobs.read(name) == data
        for theirs in (S3Blobs(clients, bucket), S3Blobs(LosesOnce(clients, 0), bucket, clock=HastyClock())):
            with pytest.raises(BlobExists):
                await theirs.put_if_absent(name, data)


def _losing(call: Any) -> Any:
    """Lets a completed upload's answer be lost, as far as the adapter knows."""

    async def losing(operation: str, **arguments: Any) -> Any:
        answer = await call(operation, **arguments)
        if operation == "complete_multipart_upload":
            raise UploadGone("the repetition found no such upload")
        return answer

    return losing


async def test_throttles_are_waited_out_within_bounds_and_counted(clients: AwsClients, bucket: str) -> None:
    """SlowDown for ever ends as BlobUnavailable after a few pauses; every one is counted."""

    async def slow(real: Any, operation: str, arguments: dict[str, Any]) -> None:
        raise refusal(operation, 503, "SlowDown")

    blobs = S3Blobs(Scripted(clients, 0, before=slow), bucket, clock=HastyClock())
    with pytest.raises(BlobUnavailable, match="SlowDown"):
        await blobs.head("a")
    assert blobs.counts["throttled"] == 5
    assert blobs.counts["repeated"] == 4


async def test_a_refusal_is_not_repeated(clients: AwsClients, blobs: S3Blobs) -> None:
    """A bucket that is not there, or no permission, is told at once, and not as if it might pass."""
    with pytest.raises(BlobError) as caught:
        await S3Blobs(clients, fresh_name(), clock=HastyClock()).put("a", b"x")
    assert not isinstance(caught.value, BlobUnavailable)


async def test_damage_on_the_way_is_found_by_s3(clients: AwsClients, bucket: str) -> None:
    """What arrives must hash to what was sent: S3 refuses it, it is sent again, and then given up."""
    tries = 0

    async def damage(real: Any, operation: str, arguments: dict[str, Any]) -> None:
        nonlocal tries
        tries += 1
        arguments["Body"].write(b"X")
        arguments["Body"].seek(0)

    blobs = S3Blobs(Scripted(clients, 0, before=damage), bucket, clock=HastyClock())
    with pytest.raises(BlobCorrupt):
        await blobs.put("a", b"hello")
    assert tries == 5
    assert await S3Blobs(clients, bucket).head("a") is None


async def test_a_download_goes_on_where_it_broke_off_or_not_at_all(clients: AwsClients, bucket: str) -> None:
    """The rest comes from the same object; one that was replaced meanwhile is not mixed with the old one."""
    data = os.urandom(3_000_000)
    hostile = HostileS3(clients, 3)
    blobs = S3Blobs(hostile, bucket, clock=HastyClock())
    await blobs.put("a", data)
    for _ in range(10):
        assert await blobs.read("a") == data
    assert blobs.counts["resumed"] > 0

    class Cut(Scripted):
        def harm(self, *kinds: str) -> str | None:
            return "cut_short" if "cut_short" in kinds and started else None

    started = False
    blobs = S3Blobs(Cut(clients, 0), bucket, clock=HastyClock())
    reading = blobs.get("a")
    await anext(reading)
    started = True
    await S3Blobs(clients, bucket).put("a", data[::-1])
    with pytest.raises(BlobUnavailable, match="replaced"):
        await anext(reading)


async def test_more_names_than_a_page_are_listed_in_order(blobs: S3Blobs, clients: AwsClients) -> None:
    """Lists go over pages; what was deleted is gone at once."""
    blobs._calls.call = _small_pages(blobs._calls.call)  # type: ignore[method-assign]
    for n in range(25):
        await blobs.put(f"n/{n:02}", b"")
    await blobs.delete("n/07")
    listed = [info.name async for info in blobs.list("n/")]
    assert listed == [f"n/{n:02}" for n in range(25) if n != 7]


def _small_pages(call: Any) -> Any:
    async def small(operation: str, **arguments: Any) -> Any:
        if operation == "list_objects_v2":
            arguments["MaxKeys"] = 10
        return await call(operation, **arguments)

    return small


def test_names_of_a_family_spread() -> None:
    """Two hex digits of a hash stand behind each family, so that S3 can split it 256 ways."""
    sessions = [SessionId(f"ses_{n}") for n in range(5000)]
    digests = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(5000)]
    for made in (
        [names.journal(session, 1) for session in sessions],
        [names.snapshot(session) for session in sessions],
        [names.layer(digest) for digest in digests],
        [names.manifest(digest) for digest in digests],
        [names.transfer(session) for session in sessions],
    ):
        assert len({name.split("/")[1] for name in made}) == 256
        assert {len(name.split("/")[1]) for name in made} == {2}


async def test_agents_put_and_get_by_url_what_they_were_allowed(
    clients: AwsClients, bucket: str, tmp_path: Path, ministack: str
) -> None:
    """A layer's URL takes that layer and nothing else; a reading one reads; neither does the other's work."""
    blobs = S3Blobs(clients, bucket)
    transfer = UrlTransfer()
    layer = tmp_path / "layer"
    layer.write_bytes(os.urandom(2_000_000))
    data = layer.read_bytes()
    hexed = hashlib.sha256(data).hexdigest()
    name = names.layer(f"sha256:{hexed}")

    put = await blobs.presign("put", name, sha256=hexed, size_bytes=len(data))
    signed = urllib.parse.parse_qs(urllib.parse.urlsplit(put.url).query)["X-Amz-SignedHeaders"][0]
    assert signed == "content-length;host;x-amz-checksum-sha256"
    other = tmp_path / "other"
    other.write_bytes(data[::-1])
    with pytest.raises(TransferError):
        await transfer.put(Url(url=put.url, headers=put.headers), other)
    assert await blobs.head(name) is None
    await transfer.put(Url(url=put.url, headers=put.headers), layer)
    assert await blobs.read(name) == data

    get = await blobs.presign("get", name)
    into = tmp_path / "into"
    assert await transfer.get(Url(url=get.url, headers=get.headers), into) == len(data)
    assert into.read_bytes() == data

    journal = await blobs.presign("put", names.journal(SessionId("ses_1"), 1))
    await transfer.put(Url(url=journal.url, headers=journal.headers), other)
    with pytest.raises(TransferError):
        await transfer.get(Url(url=journal.url, headers={}), into)
    for wrong in (
        get.url.replace(name, names.journal(SessionId("ses_1"), 1)),
        get.url.replace("X-Amz-Expires=900", "X-Amz-Expires=90000"),
        f"{ministack}/{bucket}/{name}?X-Amz-Signature=00&X-Amz-Algorithm=AWS4-HMAC-SHA256",
    ):
        with pytest.raises(TransferError, match="403"):
            await transfer.get(Url(url=wrong), into)
    with pytest.raises(BlobTooLarge):
        await blobs.presign("put", name, size_bytes=(5 << 30) + 1)
    missing = await blobs.presign("get", "layers/none")
    with pytest.raises(TransferError) as caught:
        await transfer.get(Url(url=missing.url), into)
    assert caught.value.missing
    await transfer.close()


async def test_urls_end(clients: AwsClients, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL of the past is refused (its date is set back here; the emulator checks the real clock)."""
    import botocore.auth

    blobs = S3Blobs(clients, bucket)
    await blobs.put("a", b"x")
    real = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: real() - timedelta(seconds=120))
    old = (await blobs.presign("get", "a", expires_s=60)).url
    good = (await blobs.presign("get", "a", expires_s=600)).url
    async with aiohttp.ClientSession() as http:
        async with http.get(old) as response:
            assert response.status == 403
        async with http.get(good) as response:
            assert (response.status, await response.read()) == (200, b"x")


async def test_keys_of_kms_and_locks_of_audit(clients: AwsClients) -> None:
    """With a key every object and every signed PUT names it; only audit objects are locked."""
    s3 = await clients.get("s3")
    bucket = fresh_name()
    await s3.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    clock = ManualClock()
    blobs = S3Blobs(
        clients, bucket, prefix="p/", kms_key_id="key-1", audit_retention=timedelta(days=9000), clock=clock
    )
    for name in ("audit/aa/1", "snapshots/aa/1"):
        await blobs.put(name, b"x")
    found = await s3.head_object(Bucket=bucket, Key="p/audit/aa/1")
    assert found["ServerSideEncryption"] == "aws:kms"
    assert found["SSEKMSKeyId"].endswith("key-1")
    assert found["ObjectLockMode"] == "GOVERNANCE"
    assert found["ObjectLockRetainUntilDate"] == clock.now() + timedelta(days=9000)
    assert "ObjectLockMode" not in await s3.head_object(Bucket=bucket, Key="p/snapshots/aa/1")
    put = await blobs.presign("put", "journals/aa/1")
    async with aiohttp.ClientSession() as http:
        async with http.put(put.url, data=b"x") as response:
            assert response.status == 403, "without the key's headers"
        async with http.put(put.url, data=b"x", headers=put.headers) as response:
            assert response.status == 200
    assert (await s3.head_object(Bucket=bucket, Key="p/journals/aa/1"))["SSEKMSKeyId"].endswith("key-1")


@pytest.mark.slow
async def test_a_large_object_takes_little_memory(blobs: S3Blobs) -> None:
    """One GiB goes up and comes down in a bounded part of that."""
    block = os.urandom(1 << 20)

    async def source() -> AsyncIterator[bytes]:
        for n in range(1024):
            yield n.to_bytes(4, "big") + block[4:]

    await blobs.put("warm", stream(bytes(PART * 6)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (await blobs.put("large", source())).size_bytes == 1 << 30
    size = 0
    async for chunk in blobs.get("large"):
        size += len(chunk)
    assert size == 1 << 30
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 96


async def test_the_sdk_puts_and_reads_at_signed_urls(
    clients: AwsClients, bucket: str, ministack: str, tmp_path: Path
) -> None:
    """What a trainer's client sends is what was signed: size, sum, no key of the service; other bytes are refused."""
    blobs = S3Blobs(clients, bucket)
    data = os.urandom(3_000_000)
    place = await blobs.presign(
        "put", "transfers/ab/trf_1", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)
    )
    upload = UploadUrl(url=place.url, headers=place.headers, expires_at=datetime.now(UTC))
    pool = AsyncPool(ClientConfig(url="http://127.0.0.1:1", api_key="shk_secret"))
    refused = await pool.send(put_at(upload, lambda: iter([data[::-1]]), len(data)))
    assert (refused.status, b"BadDigest" in refused.content) == (400, True)
    unsized = {name: value for name, value in place.headers.items() if name != "content-length"}
    async with (
        aiohttp.ClientSession() as http,
        http.put(place.url, data=io.BytesIO(data[1:]), headers=unsized) as shorter,
    ):
        assert shorter.status == 403, "another length is not what was signed"
    assert await blobs.head("transfers/ab/trf_1") is None
    assert (await pool.send(put_at(upload, lambda: iter([data]), len(data)))).status == 200
    info = await blobs.head("transfers/ab/trf_1")
    assert info is not None
    assert info.sha256 == hashlib.sha256(data).hexdigest()
    with (tmp_path / "into").open("w+b") as file:
        sink = StreamSink(file)
        get = await blobs.presign("get", "transfers/ab/trf_1")
        assert (await pool.send(replace(at(get.url, ""), sink=sink))).status == 200
        sink.finish({"x-shoal-sha256": info.sha256})
    assert (tmp_path / "into").read_bytes() == data
    await pool.close()
