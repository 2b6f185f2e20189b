"""What an entrance that buffers does not carry goes by the blob store: a real service with a limit of 1 MB, as in front
of Lambda, real hosts, and the SDK that notices nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.client import AsyncShoal, Shoal
from shoal.contract.errors import ErrorCode, ShoalError
from tests.e2e.conftest import Server, a_server, register

pytestmark = pytest.mark.root

LIMIT = 1_000_000


@pytest.fixture(scope="module")
def limited() -> Iterator[Server]:
    """A service whose entrance carries 1 MB."""
    with a_server(SHOAL_API_ANSWER_LIMIT_BYTES=str(LIMIT)) as started:
        register(started, "minimal")
        yield started


@pytest.fixture
def shoal(limited: Server) -> Iterator[Shoal]:
    with limited.shoal() as opened:
        yield opened


def test_files_of_any_size_go_both_ways(shoal: Shoal, tmp_path: Path) -> None:
    """Bytes, mode and refusals are as without a limit: under it, over it, and over what is asked for first."""
    with shoal.session("minimal:1") as box:
        for size in (0, LIMIT - 1, LIMIT + 1, 30_000_000):
            data = os.urandom(size)
            box.upload(data, "/data/file", mode=0o750)
            told = box.exec("sha256sum /data/file; stat -c %a /data/file").stdout.split()
            assert (told[0], told[2]) == (hashlib.sha256(data).hexdigest(), "750")
            assert box.read_bytes("/data/file") == data
            box.download("/data/file", tmp_path / "file")
            assert (tmp_path / "file").read_bytes() == data
        with pytest.raises(FileNotFoundError) as missing:
            box.read_bytes("/data/none")
        assert str(missing.value).count("/data/none") == 1
        box.exec("echo > /data/is-a-file")
        with pytest.raises(OSError, match="is-a-file"):
            box.upload(os.urandom(5_000_000), "/data/is-a-file/below")


def test_directories_go_the_same_way(shoal: Shoal, tmp_path: Path) -> None:
    """As tars of unknown length: names, contents, modes and links."""
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "blob").write_bytes(os.urandom(6_000_000))
    (source / "link").symlink_to("deep/run.sh")
    with shoal.session("minimal:1") as box:
        box.upload(source, "/job")
        assert box.exec("/job/link").check().stdout == "ran\n"
        box.download("/job", tmp_path / "out")
    assert (tmp_path / "out" / "blob").read_bytes() == (source / "blob").read_bytes()
    assert os.readlink(tmp_path / "out" / "link") == "deep/run.sh"
    assert (tmp_path / "out" / "deep" / "run.sh").stat().st_mode & 0o777 == 0o755


async def test_the_asynchronous_twin_does_it_too(limited: Server, tmp_path: Path) -> None:
    """Up and down."""
    data = os.urandom(5_000_000)
    async with limited.async_shoal() as shoal:
        assert isinstance(shoal, AsyncShoal)
        async with await shoal.session("minimal:1") as box:
            await box.upload(data, "/file")
            assert await box.read_bytes("/file") == data


def test_any_client_that_follows_redirects_gets_the_bytes(limited: Server, shoal: Shoal) -> None:
    """No SDK needed to download; what may be used once, by whom, and for what is held."""
    data = os.urandom(3_000_000)
    with shoal.session("minimal:1") as box, limited.client(follow_redirects=True) as http:
        files = f"/v1/sessions/{box.id}/files"
        box.upload(data, "/file")
        assert http.get(files, params={"path": "/file"}).content == data

        asked = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        transfer = http.post("/v1/transfers", json=asked).json()
        take = {"path": "/other", "transfer": transfer["id"]}
        early = http.put(files, params=take)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "conflict")
        with httpx.Client(base_url=limited.url) as keyless:
            wrong = keyless.put(transfer["put"]["url"], content=data[::-1])
            assert wrong.status_code == 422
            assert keyless.put(transfer["put"]["url"], content=data[1:]).status_code == 422
            assert keyless.get(transfer["put"]["url"]).status_code == 404
            assert keyless.put(transfer["put"]["url"], content=data).status_code == 204
        for _ in range(2):  # repeating a use is harmless
            taken = http.put(files, params=take)
            assert (taken.status_code, taken.json()["sha256"]) == (200, asked["sha256"])
        again = http.put(files, params={**take, "path": "/third"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
        strange = http.put(files, params={**take, "transfer": "trf_none"})
        assert (strange.status_code, strange.json()["error"]["code"]) == (404, "not_found")


def test_what_is_no_file_says_so(shoal: Shoal) -> None:
    """Too much output and too much input are typed, and the step's effects are there."""
    with shoal.session("minimal:1") as box:
        with pytest.raises(ShoalError) as refused:
            box.exec("echo x > /done; head -c 1048576 /dev/zero | tr '\\0' x")
        assert refused.value.code is ErrorCode.PAYLOAD_TOO_LARGE
        assert box.exec("cat /done").stdout == "x\n"
        with pytest.raises(ShoalError) as refused:
            box.exec("cat > /dev/null", stdin=b"x" * 1_500_000)
        assert refused.value.code is ErrorCode.PAYLOAD_TOO_LARGE


def test_a_long_trajectory_comes_whole(shoal: Shoal) -> None:
    """Over the limit it comes in pages, which the SDK puts together; also when the session has ended."""
    with shoal.session("minimal:1") as box:
        for n in range(6):
            box.exec(f"head -c 300000 /dev/zero | tr '\\0' {n}")
        assert [record.seq for record in box.trajectory()] == list(range(1, 7))
        id = box.id
    ended = shoal.session(id=id, wait=False)
    assert [record.seq for record in ended.trajectory()] == list(range(1, 7))
