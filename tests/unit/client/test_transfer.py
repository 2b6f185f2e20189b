"""Files and directories in and out: exact, repeated whole, and never outside of where they belong."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shoal import AsyncShoal, RetryPolicy, Shoal
from shoal.client import errors
from shoal.client.transfer import CHECKSUM_HEADER, TAR, unpack
from shoal.contract.errors import ErrorCode
from tests.unit.client.fake_service import FakeService, error, lose

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
