"""The SDK against a real server: what the README promises of it."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path

import pytest

from shoal.client import AsyncShoal, Shoal
from shoal.contract.errors import ErrorCode, ShoalError

pytestmark = pytest.mark.root


def unique(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:12]}"


def test_a_script_that_runs_again_fast_forwards(shoal: Shoal) -> None:
    """A named session left by an exception is kept; the same script replays its steps and goes on after them."""
    name = unique("task")

    def script(*, die: bool) -> list[bool]:
        replayed = []
        with shoal.session("minimal:1", run="sdk", name=name) as box:
            for _ in range(3):
                replayed.append(box.exec("echo x >> /count").record.replayed)
            if die:
                raise KeyboardInterrupt
            assert box.exec("wc -l < /count").stdout.strip() == "3"
        return replayed

    with pytest.raises(KeyboardInterrupt):
        script(die=True)
    assert script(die=False) == [True, True, True]


def test_leaving_the_block_ends_the_session(shoal: Shoal) -> None:
    """And what it did stays readable."""
    with shoal.session("minimal:1") as box:
        box.exec("echo kept")
        id = box.id
    with pytest.raises(ShoalError) as refused:
        shoal.session(id=id).exec("true")
    assert refused.value.code is ErrorCode.SESSION_ENDED
    assert [record.seq for record in shoal.session(id=id, wait=False).trajectory()] == [1]


def test_directories_travel_both_ways(shoal: Shoal, tmp_path: Path) -> None:
    """Names, contents, modes and links."""
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "blob").write_bytes(bytes(range(256)) * 5000)
    (source / "link").symlink_to("deep/run.sh")
    with shoal.session("minimal:1") as box:
        box.upload(source, "/job")
        assert box.exec("/job/link").stdout == "ran\n"
        box.download("/job", tmp_path / "out")
        with pytest.raises(FileNotFoundError):
            box.read_bytes("/nothing")
    assert (tmp_path / "out" / "blob").read_bytes() == (source / "blob").read_bytes()
    assert (tmp_path / "out" / "link").readlink() == Path("deep/run.sh")
    assert (tmp_path / "out" / "deep" / "run.sh").stat().st_mode & 0o777 == 0o755


def test_a_handle_goes_through_pickle(shoal: Shoal) -> None:
    """What Ray does with it: another process acts in the same session, in ids of its own."""
    with shoal.session("minimal:1") as box:
        box.exec("echo one > /f")
        client, copy = pickle.loads(pickle.dumps((shoal, box)))
        with client:
            assert copy.exec("cat /f").stdout == "one\n"
        assert box.exec("echo two").stdout == "two\n"


async def test_a_group_forks_from_a_snapshot_and_plays_at_once(async_shoal: AsyncShoal) -> None:
    """16 members of one snapshot, each in a disk of its own, ended by one call."""
    async with async_shoal.session("minimal:1") as box:
        await box.exec("echo base > /f")
        snapshot = await box.snapshot()
    small = {"cpu_millis": 500, "memory_mib": 64, "disk_mib": 256}
    async with await async_shoal.sessions(snapshot=snapshot, count=16, resources=small) as group:
        results = await group.map(lambda member: member.exec("cat /f; echo mine >> /f; wc -l < /f"))
        assert [result.stdout for result in results] == ["base\n2\n"] * 16
        ids = [member.id for member in group]
    for id in ids:
        session = async_shoal.session(id=id, wait=False)
        info = await (await session).refresh()
        assert info.state in ("ending", "ended")
