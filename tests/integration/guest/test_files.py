"""File operations by a real guest: exact, atomic, as the right user, and never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import signal
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime_image.agent.link import FileError, LinkError, WorkerKilledError

if TYPE_CHECKING:
    from .conftest import Box

EVERY_BYTE = bytes(range(256)) * 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that other users may reach."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    return tmp_path


async def do(box: Box, op: str, path: Path | str, **fields: Any) -> dict[str, Any]:
    """One operation."""
    return await box.link.file_op({"op": op, "path": str(path), **fields})


@pytest.mark.parametrize("size", [0, 1, 32 << 10, (32 << 10) + 1, 5 << 20])
async def test_write_and_read_are_exact(box: Box, place: Path, size: int) -> None:
    """Contents of every size and every byte, with the file's facts."""
    content = (EVERY_BYTE * (size // 512 + 1))[:size]
    written = await do(box, "write", place / "f", content=content)
    assert (written["size_bytes"], written["created"], written["mode"]) == (size, True, 0o644)
    assert (place / "f").read_bytes() == content
    result = await do(box, "read", place / "f")
    assert (result["content"], result["eof"], result["truncated"]) == (content, True, False)
    info = (place / "f").stat()
    assert (result["size_bytes"], result["mtime_ns"], result["uid"]) == (size, info.st_mtime_ns, 0)


@pytest.mark.parametrize(
    ("fields", "expected", "eof"),
    [
        ({"offset": 2}, b"e\ntwo\n\nfour", True),
        ({"offset": 1, "limit": 3}, b"ne\n", False),
        ({"limit": 0}, b"", False),
        ({"offset": 99}, b"", True),
        ({"lines": True, "offset": 1, "limit": 2}, b"two\n\n", False),
        ({"lines": True, "offset": 3}, b"four", True),
        ({"lines": True, "limit": 0}, b"", False),
        ({"lines": True, "offset": 9}, b"", True),
    ],
)
async def test_parts_of_a_file(
    box: Box, place: Path, fields: dict[str, Any], expected: bytes, eof: bool
) -> None:
    """By bytes and by lines, 0-based; `eof` says whether there is more."""
    (place / "f").write_bytes(b"one\ntwo\n\nfour")
    result = await do(box, "read", place / "f", **fields)
    assert (result["content"], result["eof"]) == (expected, eof)


async def test_a_file_over_the_limit_is_cut_and_says_so(box: Box, place: Path) -> None:
    """Reading all of a huge file gives its beginning."""
    with (place / "big").open("wb") as file:
        file.truncate(1 << 30)
    result = await do(box, "read", place / "big")
    assert (len(result["content"]), result["truncated"], result["size_bytes"]) == (16 << 20, True, 1 << 30)


async def test_an_overwrite_keeps_mode_owner_and_symlink(box: Box, place: Path) -> None:
    """Written aside and renamed, through the link; readers see the old or the new, never a part."""
    file = place / "f"
    file.write_text("old")
    file.chmod(0o751)
    os.chown(file, 1234, 4321)
    (place / "link").symlink_to("f")
    with file.open() as opened:
        result = await do(box, "write", place / "link", content=b"new")
        assert opened.read() == "old"
    info = file.stat()
    assert (file.read_text(), info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (
        "new",
        1234,
        4321,
        0o751,
    )
    assert (place / "link").is_symlink()
    assert result["created"] is False
    assert sorted(os.listdir(place)) == ["f", "link"]


async def test_mode_owner_and_parents_when_asked_for(box: Box, place: Path) -> None:
    """New files are as asked for, of the user the operation runs as."""
    await do(
        box, "write", place / "a/b/c", content=b"x", create_parents=True, mode=0o2640, owner="nobody:daemon"
    )
    info = (place / "a/b/c").stat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (65534, 1, 0o2640)
    place.chmod(0o777)
    await do(box, "write", place / "n", content=b"x", user="nobody")
    assert (place / "n").stat().st_uid == 65534


@pytest.mark.parametrize(
    ("op", "path", "fields", "errno_name"),
    [
        ("read", "absent", {}, "ENOENT"),
        ("read", ".", {}, "EISDIR"),
        ("read", "fifo", {}, "EINVAL"),
        ("read", "/dev/zero", {}, "EINVAL"),
        ("read", "loop", {}, "ELOOP"),
        ("read", "secret", {"user": "nobody"}, "EACCES"),
        ("read", "f", {"offset": -1}, "EINVAL"),
        ("write", "absent/f", {"content": b""}, "ENOENT"),
        ("write", ".", {"content": b""}, "EISDIR"),
        ("write", "fifo", {"content": b""}, "EINVAL"),
        ("write", "f", {"content": b"", "user": "nobody"}, "EACCES"),
        ("write", "f/g", {"content": b""}, "ENOTDIR"),
        ("write", "f", {"content": b"", "owner": "nobody-of-that-name"}, "ENOENT"),
        ("edit", "absent", {"old": "a", "new": "b"}, "ENOENT"),
        ("edit", "f", {"old": "", "new": "b"}, "EINVAL"),
        ("edit", "fifo", {"old": "a", "new": "b"}, "EINVAL"),
        ("list", "absent", {}, "ENOENT"),
        ("search", "f", {"pattern": "("}, "EINVAL"),
        ("search", "absent", {"pattern": "a"}, "ENOENT"),
        ("mkdir", "f", {}, "EEXIST"),
        ("remove", "absent", {}, "ENOENT"),
        ("remove", "full", {}, "ENOTEMPTY"),
        ("stat", "f/g", {}, "ENOTDIR"),
        ("stat", "f\0", {}, "EINVAL"),
        ("nonsense", "f", {}, "EINVAL"),
    ],
)  # fmt: skip
async def test_file_errors_are_results(
    box: Box, place: Path, op: str, path: str, fields: dict[str, Any], errno_name: str
) -> None:
    """Nothing blocks, nothing is left behind, and the name of the error is exact."""
    (place / "f").write_text("x")
    (place / "full/er").mkdir(parents=True)
    (place / "secret").write_text("s")
    (place / "secret").chmod(0o600)
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    before = sorted(os.listdir(place))
    async with asyncio.timeout(10):
        result = await do(box, op, path, cwd=str(place), **fields)
    assert result["error"]["errno"] == errno_name, result
    assert sorted(os.listdir(place)) == before


async def test_proc_is_readable(box: Box) -> None:
    """Files without a size have content all the same."""
    result = await do(box, "read", "/proc/self/status")
    assert result["content"].startswith(b"Name:")
    async with await box.link.open_read("/proc/self/status") as reader:
        assert b"".join([piece async for piece in reader]).startswith(b"Name:")


async def test_list_and_stat(box: Box, place: Path) -> None:
    """Kinds, depth, globs, targets, odd names; bounded."""
    (place / "d/e").mkdir(parents=True)
    (place / "d/e/deep.py").write_text("x")
    (place / "d/a.py").write_text("xy")
    os.mkfifo(place / "d/pipe")
    (place / "d/link").symlink_to("a.py")
    os.symlink(b"nowhere", os.fsencode(place / "d") + b"/\xff\n")

    async def names(**fields: Any) -> list[bytes]:
        found = await do(box, "list", place / "d", **fields)
        return [os.path.relpath(entry["path"], os.fsencode(place / "d")) for entry in found["entries"]]

    assert await names() == [b"a.py", b"e", b"link", b"pipe", b"\xff\n"]
    assert await names(depth=2) == [b"a.py", b"e", b"e/deep.py", b"link", b"pipe", b"\xff\n"]
    assert await names(depth=9, glob="*.py") == [b"a.py", b"e/deep.py"]
    assert await names(depth=9, glob="e/**/*.py") == [b"e/deep.py"]
    assert await names(depth=9, glob="[!a]*.{py,js}") == [b"e/deep.py"]
    found = await do(box, "list", place / "d", max_entries=2)
    assert (len(found["entries"]), found["truncated"]) == (2, True)
    entries = {entry["path"]: entry for entry in (await do(box, "list", place / "d"))["entries"]}
    link = entries[os.fsencode(place / "d/link")]
    assert (link["kind"], link["link_target"]) == ("symlink", b"a.py")
    assert entries[os.fsencode(place / "d/pipe")]["kind"] == "fifo"
    assert (await do(box, "stat", place / "d/link"))["kind"] == "file"
    assert (await do(box, "stat", place / "d/link", follow=False))["link_target"] == b"a.py"
    assert (await do(box, "list", place / "d/a.py"))["entries"][0]["size_bytes"] == 2


async def test_search(box: Box, place: Path) -> None:
    """By line, on text, with line numbers; binary and unreadable files are counted, links not followed."""
    (place / "src").mkdir()
    (place / "src/a.py").write_text("one\ndef föö():\n    pass\r\n")
    (place / "src/b.txt").write_bytes(b"def bar\xff\nend")
    (place / "src/bin").write_bytes(b"def\0")
    (place / "src/link.py").symlink_to("a.py")
    os.mkfifo(place / "src/fifo")

    async def found(pattern: str, **fields: Any) -> list[tuple[bytes, int, bytes]]:
        result = await do(box, "search", place / "src", pattern=pattern, **fields)
        return [(os.path.basename(m["path"]), m["line"], m["text"]) for m in result["matches"]]

    assert await found(r"^def \w+") == [(b"a.py", 2, "def föö():".encode()), (b"b.txt", 1, b"def bar\xff")]
    assert await found("pass$") == [(b"a.py", 3, b"    pass")]
    assert await found("DEF", ignore_case=True, glob="*.txt") == [(b"b.txt", 1, b"def bar\xff")]
    assert await found("():", literal=True) == [(b"a.py", 2, "def föö():".encode())]
    assert await found(r"(?<!\n)nd\Z") == [(b"b.txt", 2, b"end")]
    assert await found(r"one\ndef") == []
    result = await do(box, "search", place / "src", pattern=".", max_results=2)
    assert (len(result["matches"]), result["truncated"]) == (2, True)
    result = await do(box, "search", place / "src", pattern="zzz")
    assert (result["files"], result["skipped"], result["matches"]) == (2, 1, [])


async def test_a_malicious_pattern_is_killed_with_its_group_and_bothers_nobody(box: Box, place: Path) -> None:
    """The helper of a search is in its action's kill group; meanwhile the guest serves others."""
    (place / "f").write_text("a" * 60)
    file = place / "procs"
    op = {"op": "search", "path": str(place / "f"), "pattern": "(a+)+b"}
    with file.open("wb") as procs:
        searching = asyncio.create_task(box.link.file_op(op, procs_fd=procs.fileno()))
        assert (await box.run("echo hi")).stdout == b"hi\n"
    await box.until(lambda: file.read_bytes() == b"0")
    assert not searching.done()
    (helper,) = box.children()
    os.kill(helper, signal.SIGKILL)
    with pytest.raises(WorkerKilledError):
        await searching


async def test_a_cancelled_search_ends(box: Box, place: Path) -> None:
    """Nobody waits: the helper is killed and reaped."""
    (place / "f").write_text("a" * 60)
    searching = asyncio.create_task(do(box, "search", place / "f", pattern="(a+)+b"))
    assert (await box.run("echo hi")).stdout == b"hi\n"
    assert len(box.children()) == 1
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching
    await box.until(lambda: not box.children())


async def test_streams_are_exact_and_need_no_memory(box: Box, place: Path) -> None:
    """256 MiB up and down: same bytes, guest and its helpers small, in place only at commit."""
    block = os.urandom(1 << 20)
    digest = hashlib.sha256()
    async with await box.link.open_write(str(place / "big"), mode=0o600) as writer:
        for _ in range(256):
            await writer.write(block)
            digest.update(block)
        assert not (place / "big").exists()
        assert (await writer.commit())["size_bytes"] == 256 << 20
    assert stat.S_IMODE((place / "big").stat().st_mode) == 0o600
    back = hashlib.sha256()
    async with await box.link.open_read(str(place / "big")) as reader:
        assert (reader.info.kind, reader.info.size_bytes) == ("file", 256 << 20)
        async for piece in reader:
            back.update(piece)
    assert back.digest() == digest.digest()
    assert box.rss_mib() < 20


async def test_an_upload_that_breaks_off_leaves_nothing(box: Box, place: Path) -> None:
    """Abort, an exception, an agent that dies: the old file stays, and no part of the new one."""
    (place / "f").write_text("old")
    writer = await box.link.open_write(str(place / "f"))
    await writer.write(b"new")
    await writer.abort()
    with contextlib.suppress(ZeroDivisionError):
        async with await box.link.open_write(str(place / "f")) as writer:
            await writer.write(b"new")
            raise ZeroDivisionError
    writer = await box.link.open_write(str(place / "f"))
    await writer.write(b"new" * 100_000)
    box.link.close()
    await writer.abort()
    await box.reconnect()
    await box.until(lambda: os.listdir(place) == ["f"])
    assert (place / "f").read_text() == "old"


async def test_streams_that_cannot_be_opened_say_why(box: Box, place: Path) -> None:
    """FileError with the errno, before anything is sent."""
    with pytest.raises(FileError) as caught:
        await box.link.open_read(str(place / "absent"))
    assert caught.value.errno_name == "ENOENT"
    with pytest.raises(FileError) as caught:
        await box.link.open_write(str(place / "no/f"))
    assert caught.value.errno_name == "ENOENT"
    with pytest.raises(FileError) as caught:
        await box.link.open_read("/dev/zero")
    assert caught.value.errno_name == "EINVAL"


@pytest.mark.parametrize("op", ["write", "stream", "edit"])
async def test_a_full_disk_is_a_file_error(box: Box, place: Path, op: str) -> None:
    """ENOSPC is told, the old content stays, no temporary file remains, and the guest works on."""
    small = place / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=True)
    try:
        (small / "f").write_text("old")
        big = "x" * (1 << 20)
        if op == "stream":
            async with await box.link.open_write(str(small / "f")) as writer:
                await writer.write(big.encode())
                with pytest.raises(FileError) as caught:
                    await writer.commit()
            assert caught.value.errno_name == "ENOSPC"
        else:
            fields = {"content": big.encode()} if op == "write" else {"old": "old", "new": big}
            assert (await do(box, op, small / "f", **fields))["error"]["errno"] == "ENOSPC"
        assert os.listdir(small) == ["f"]
        assert (small / "f").read_text() == "old"
        assert (await box.run("echo hi")).stdout == b"hi\n"
    finally:
        subprocess.run(["umount", str(small)], check=True)


async def test_a_tree_as_a_tar_and_back(box: Box, place: Path) -> None:
    """Modes, symbolic and hard links, times, empty directories, odd names survive the round trip."""
    tree = place / "tree"
    (tree / "sub/empty").mkdir(parents=True)
    (tree / "sub/run.sh").write_bytes(EVERY_BYTE)
    (tree / "sub/run.sh").chmod(0o4755)
    os.link(tree / "sub/run.sh", tree / "hard")
    (tree / "soft").symlink_to("sub/run.sh")
    (tree / "to-dir").symlink_to("sub")
    (tree / ("n" * 200)).write_text("long")
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff\xfe")).write_text("odd")
    os.utime(tree / "sub/run.sh", ns=(1, 1_234_567_891_250_000_000))
    os.utime(tree / "sub", ns=(1, 1_111_111_111_500_000_000))
    async with await box.link.open_read(str(tree)) as reader:
        assert reader.info.kind == "directory"
        archive = b"".join([piece async for piece in reader])
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        names = opened.getnames()
    assert names[0] == "."
    async with await box.link.open_write_tar(str(place / "copy")) as writer:
        await writer.write(archive)
        assert (await writer.commit())["members"] == len(names)

    def facts(root: Path) -> dict[bytes, object]:
        found: dict[bytes, object] = {}
        for where, directories, files in os.walk(os.fsencode(root)):
            for name in [*directories, *files]:
                path = os.path.join(where, name)
                info = os.lstat(path)
                what: object = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
                if stat.S_ISREG(info.st_mode):
                    what = (Path(os.fsdecode(path)).read_bytes(), info.st_nlink, info.st_mtime_ns)
                elif stat.S_ISDIR(info.st_mode):
                    what = info.st_mtime_ns
                found[os.path.relpath(path, os.fsencode(root))] = (stat.filemode(info.st_mode), what)
        return found

    assert facts(place / "copy") == facts(tree)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out"])
async def test_a_tar_that_leads_out_is_refused(box: Box, place: Path, name: str) -> None:
    """Names are below the target or nothing."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    async with await box.link.open_write_tar(str(place / "t")) as writer:
        await writer.write(buffer.getvalue())
        with pytest.raises(FileError) as caught:
            await writer.commit()
    assert caught.value.errno_name == "EINVAL"
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"mtime": "\u00b2"},
        {"mtime": "9" * 5000},
        {"mtime": "9" * 30},
        {"GNU.sparse.map": "a,b"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"},
    ],
)
async def test_a_tar_whose_numbers_are_none_is_refused_as_a_tar(
    box: Box, place: Path, headers: dict[str, str]
) -> None:
    """Nonsense in an extended header is the archive's fault, told as EINVAL, and never an error of the guest's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("f")
        member.size, member.pax_headers = 1, headers
        archive.addfile(member, io.BytesIO(b"x"))
    async with await box.link.open_write_tar(str(place / "t")) as writer:
        await writer.write(buffer.getvalue())
        with pytest.raises(FileError, match="not a tar") as refused:
            await writer.commit()
    assert refused.value.errno_name == "EINVAL"


async def test_set_id_bits_outlast_the_write(box: Box, place: Path) -> None:
    """A write takes set-id bits off a file; the mode that was asked for is the one it has in the end."""
    await do(box, "write", place / "f", content=b"x" * 100_000, mode=0o6755)
    assert stat.S_IMODE((place / "f").stat().st_mode) == 0o6755
    await do(box, "write", place / "f", content=b"y")
    assert stat.S_IMODE((place / "f").stat().st_mode) == 0o6755


@pytest.mark.parametrize("owner", ["nosuch", "9" * 5000, "-1", "0:nosuch", "\u00b2"])
async def test_an_owner_that_is_none_leaves_nothing_beside(box: Box, place: Path, owner: str) -> None:
    """A write that is refused for its owner leaves no name, not even one aside."""
    refused = await do(box, "write", place / "f", content=b"x", owner=owner)
    assert set(refused) == {"error"}, refused
    assert os.listdir(place) == []


async def test_what_is_no_tar_is_refused(box: Box, place: Path) -> None:
    """Noise and a tar that breaks off are file errors."""
    for content in (os.urandom(5000), b"", b"x" * 512):
        async with await box.link.open_write_tar(str(place / "t")) as writer:
            await writer.write(content)
            with pytest.raises(FileError):
                await writer.commit()


async def test_mkdir_and_remove(box: Box, place: Path) -> None:
    """With parents, modes and owners; recursively, without following links."""
    made = await do(box, "mkdir", place / "a/b", parents=True, mode=0o700, owner="nobody")
    assert (made["created"], made["mode"], made["uid"]) == (True, 0o700, 65534)
    assert (await do(box, "mkdir", place / "a/b", parents=True))["created"] is False
    (place / "keep").mkdir()
    (place / "keep/f").write_text("x")
    (place / "a/link").symlink_to(place / "keep")
    assert await do(box, "remove", place / "a", recursive=True) == {"removed": True}
    assert (place / "keep/f").exists()
    assert await do(box, "remove", place / "a", missing_ok=True) == {"removed": False}


async def test_closing_a_stream_wakes_who_waits_for_it(box: Box, place: Path) -> None:
    """A reader or writer that is closed elsewhere does not leave its task waiting for ever."""
    async with await box.link.open_write(str(place / "g")) as writer:
        await writer.write(b"x")
        waiting = asyncio.create_task(writer._call.next())
        await asyncio.sleep(0)
        await writer.abort()
        with pytest.raises(LinkError, match="closed"):
            await waiting
    await box.until(lambda: not box.children())
    assert os.listdir(place) == []
