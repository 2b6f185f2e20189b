"""Files and directories in and out: exact, repeated whole, and never outside of where they belong."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shoal import AsyncShoal, RetryPolicy, Shoal
from shoal.client import errors
from shoal.client.transfer import CHECKSUM_HEADER, TAR, unpack
from shoal.contract.errors import ErrorCode, ShoalError
from tests.unit.client.fake_service import NOW, FakeService, error, lose

QUICK = RetryPolicy(retry_for_s=2.0, base_s=0.001, cap_s=0.01)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def shoal(service: FakeService) -> Shoal:
    return Shoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK)


def test_an_upload_is_repeated_whole_with_its_checksum(shoal: Shoal, service: FakeService) -> None:
    """A lost answer sends the same bytes again from their start; size and sum go with them."""
    raw = os.urandom(3_000_000)
    service.fail("PUT", lose)
    shoal.session("code:1").upload(io.BytesIO(raw), "/w/a", mode=0o600, owner="root")
    puts = [request for request in service.requests if request.method == "PUT"]
    assert [request.content == raw for request in puts] == [True, True]
    assert puts[1].headers[CHECKSUM_HEADER] == hashlib.sha256(raw).hexdigest()
    assert puts[1].headers["content-length"] == str(len(raw))
    assert dict(puts[1].url.params) == {"path": "/w/a", "mode": "0600", "owner": "root"}


def test_a_download_that_breaks_off_starts_anew(shoal: Shoal, service: FakeService, tmp_path: Path) -> None:
    """What came before the break is not kept twice."""
    service.files["/w/a"] = b"x" * 100_000

    class Broken(httpx.SyncByteStream):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield b"half"
            raise httpx.ReadError("reset")

    service.fail("GET .*/files", lambda request, act: httpx.Response(200, stream=Broken()))
    box = shoal.session("code:1")
    box.download("/w/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"x" * 100_000
    assert box.read_bytes("/w/a") == b"x" * 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "nothing is left beside it"


def test_a_download_that_does_not_match_its_sum_replaces_nothing(
    shoal: Shoal, service: FakeService, tmp_path: Path
) -> None:
    """The file that was there stays."""
    (tmp_path / "a").write_text("old")
    wrong = {CHECKSUM_HEADER: "0" * 64}
    service.fail("GET .*/files", lambda request, act: httpx.Response(200, content=b"new", headers=wrong))
    with pytest.raises(errors.ServiceError, match="checksum"):
        shoal.session("code:1").download("/w/a", tmp_path / "a")
    assert (tmp_path / "a").read_text() == "old"


def test_a_missing_file_is_pythons_own_error(shoal: Shoal, service: FakeService) -> None:
    """What the sandbox's system says is raised as Python would say it."""
    refusal = error(ErrorCode.NOT_FOUND, status=404, errno="ENOENT", path="/no", message="No such file")
    service.fail("GET .*/files", refusal)
    with pytest.raises(FileNotFoundError) as caught:
        shoal.session("code:1").read_bytes("/no")
    assert caught.value.filename == "/no"


def test_a_directory_goes_and_comes_as_a_tar(shoal: Shoal, service: FakeService, tmp_path: Path) -> None:
    """Modes, links, empty directories and times survive both ways."""
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "run.sh").write_text("echo")
    (tree / "run.sh").chmod(0o750)
    os.utime(tree / "run.sh", (1_000_000_000, 1_000_000_000))
    (tree / "link").symlink_to("/usr/bin/python3")
    os.link(tree / "run.sh", tree / "same.sh")
    box = shoal.session("code:1")
    box.upload(tree, "/w/tree")
    assert service.requests[-1].headers["content-type"] == TAR
    tarred = service.files["/w/tree"]

    def answer(request: httpx.Request, act: Callable[[], httpx.Response]) -> httpx.Response:
        return httpx.Response(200, content=tarred, headers={"content-type": TAR})

    service.fail("GET .*/files", answer, answer)
    box.download("/w/tree", tmp_path / "back")
    back = tmp_path / "back"
    assert sorted(path.name for path in back.iterdir()) == ["empty", "link", "run.sh", "same.sh"]
    assert (back / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (back / "run.sh").stat().st_mtime == 1_000_000_000
    assert os.readlink(back / "link") == "/usr/bin/python3"
    assert os.path.samefile(back / "run.sh", back / "same.sh")
    with pytest.raises(IsADirectoryError):
        box.read_bytes("/w/tree")


def hostile(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    path = tmp_path / "hostile.tar"
    with tarfile.open(path, "w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def named(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    return info


def test_what_a_sandbox_sends_does_not_leave_the_destination(tmp_path: Path) -> None:
    """Absolute names, dots, hard links out, and writing through a link that came along: none writes outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    into = tmp_path / "into"
    attacks = [
        [(named("../outside/a"), b"x")],
        [(named(str(outside / "b").lstrip("/")), b"x"), (named("/../outside/b"), b"x")],
        [(named("steal", tarfile.LNKTYPE, "../outside/secret"), b"")],
        [(named("way", tarfile.SYMTYPE, str(outside)), b""), (named("way/c"), b"x")],
        [(named("../outside/d", tarfile.SYMTYPE, "x"), b"")],
        [(named(".."), b"x")],
        [
            (named("file"), b"x"),
            (named("to", tarfile.SYMTYPE, str(outside)), b""),
            (named("by", tarfile.LNKTYPE, "to"), b""),  # becomes a second symbolic link, before the others
            (named("by/e", tarfile.LNKTYPE, "file"), b""),
        ],
    ]
    for members in attacks:
        archive = hostile(tmp_path, *members)
        try:
            unpack(archive, into)
        except (tarfile.TarError, OSError):
            pass
        assert [path.name for path in outside.iterdir()] == ["secret"]
        assert not (into / "steal").exists()


def test_what_arrives_is_the_callers(tmp_path: Path) -> None:
    """No set-id bits, no foreign owner, nothing that others may write; hard links to a symbolic link are one."""
    program, link, folder = (
        named("program"),
        named("link", tarfile.SYMTYPE, "/gone"),
        named("d", tarfile.DIRTYPE),
    )
    program.mode, program.uid, program.gid, folder.mode = 0o6777, 12345, 12345, 0o022
    same = named("same", tarfile.LNKTYPE, "link")
    unpack(hostile(tmp_path, (program, b"x"), (link, b""), (same, b""), (folder, b"")), tmp_path / "into")
    found = (tmp_path / "into" / "program").stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o755, os.geteuid(), os.getegid())
    assert (tmp_path / "into" / "d").stat().st_mode & 0o7777 == 0o700
    assert os.readlink(tmp_path / "into" / "same") == "/gone"


def test_devices_are_left_out(tmp_path: Path) -> None:
    """A tar of a sandbox's /dev makes no device here."""
    unpack(hostile(tmp_path, (named("null", tarfile.CHRTYPE), b""), (named("ok"), b"x")), tmp_path / "into")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["ok"]


async def test_the_async_client_streams_too(service: FakeService, tmp_path: Path) -> None:
    """Up from a path, down to a path."""
    (tmp_path / "a").write_bytes(b"\x00" * 2_500_000)
    async with AsyncShoal("http://127.0.0.1:1", "key", transport=service.transport, policy=QUICK) as shoal:
        box = await shoal.session("code:1")
        await box.upload(tmp_path / "a", "/w/a")
        await box.download("/w/a", tmp_path / "b")
        assert await box.read_bytes("/w/a") == (tmp_path / "b").read_bytes() == b"\x00" * 2_500_000


class Beside:
    """The service behind an entrance that carries little, and its blob store at another address."""

    def __init__(self, service: FakeService, *, limit_bytes: int, announces: bool = True) -> None:
        self._service = service
        self._limit = limit_bytes
        self._announces = announces
        self.objects: dict[str, bytes] = {}
        self.seen: list[tuple[str, str, bool]] = []
        self.polls = 2
        self.transport = httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        request.read()
        url = request.url
        self.seen.append((request.method, url.host, "authorization" in request.headers))
        if url.host == "blobs.example.org":
            if request.method == "PUT":
                assert request.headers["x-bound"] == "to this"
                self.objects[url.path] = request.content
                return httpx.Response(200)
            return httpx.Response(200, content=self.objects[url.path])
        if url.path == "/v1/transfers" and self._announces:
            asked = json.loads(request.content)
            put = {"url": "https://blobs.example.org/in?signed", "headers": {"x-bound": "to this"}}
            made = {"id": "trf_1", "put": {**put, "expires_at": NOW}, "expires_at": NOW, **asked}
            return httpx.Response(201, json=made)
        if url.path.endswith("/files"):
            return self._files(request)
        return self._service.transport.handle_request(request)

    def _files(self, request: httpx.Request) -> httpx.Response:
        path = request.url.params["path"]
        if request.method == "PUT":
            if "transfer" in request.url.params:
                self.polls -= 1
                if self.polls:
                    return httpx.Response(202, json={"status": "running"})
                self._service.files[path] = self.objects["/in"]
                return httpx.Response(200, json={})
            if len(request.content) > self._limit:
                return httpx.Response(413, text="<html>Request Too Long</html>")
            self._service.files[path] = request.content
            return httpx.Response(200, json={})
        content = self._service.files[path]
        if len(content) <= self._limit:
            return httpx.Response(200, content=content)
        self.objects["/out"] = content
        if "transfer" not in request.url.params:
            return httpx.Response(303, headers={"location": f"files?path={path}&transfer=trf_2"})
        told = {"x-shoal-kind": "file", "x-shoal-sha256": hashlib.sha256(content).hexdigest()}
        return httpx.Response(303, headers={"location": "https://blobs.example.org/out?signed", **told})


@pytest.mark.parametrize("size", [100, 50_000, 5_000_000])
def test_what_the_entrance_does_not_carry_goes_beside_it(service: FakeService, size: int) -> None:
    """Announced, or refused by some gateway first: it arrives, comes back, and the key goes to nobody else."""
    beside = Beside(service, limit_bytes=10_000)
    data = os.urandom(size)
    with Shoal("http://127.0.0.1:1", "key", transport=beside.transport, policy=QUICK) as shoal:
        box = shoal.session("code:1")
        box.upload(data, "/w/a")
        assert service.files["/w/a"] == data
        assert box.read_bytes("/w/a") == data
    assert ("/in" in beside.objects) == ("/out" in beside.objects) == (size > 10_000)
    assert {(host, keyed) for _, host, keyed in beside.seen} <= {
        ("127.0.0.1", True),
        ("blobs.example.org", False),
    }


def test_a_damaged_download_from_beside_is_found(service: FakeService) -> None:
    """The sum that the service told with the redirect holds for the bytes of the blob store."""
    beside = Beside(service, limit_bytes=10)
    service.files["/w/a"] = b"what it should be"
    real = beside.answer

    def damaged(request: httpx.Request) -> httpx.Response:
        answer = real(request)
        if request.url.host == "blobs.example.org":
            return httpx.Response(200, content=b"what it is instead")
        return answer

    transport = httpx.MockTransport(damaged)
    with Shoal("http://127.0.0.1:1", "key", transport=transport, policy=QUICK) as shoal:
        box = shoal.session("code:1")
        with pytest.raises(ShoalError, match="checksum"):
            box.read_bytes("/w/a")


def test_a_service_without_transfers_is_told_as_it_refuses(service: FakeService) -> None:
    """An older service, or one that carries any size: the file itself is sent, and what it says stands."""
    beside = Beside(service, limit_bytes=10_000_000, announces=False)
    data = os.urandom(5_000_000)
    with Shoal("http://127.0.0.1:1", "key", transport=beside.transport, policy=QUICK) as shoal:
        box = shoal.session("code:1")
        box.upload(data, "/w/a")
        assert service.files["/w/a"] == data
        with pytest.raises(ShoalError) as refused:
            box.upload(data * 3, "/w/b")
        assert refused.value.code is ErrorCode.PAYLOAD_TOO_LARGE
