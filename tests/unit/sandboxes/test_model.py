"""Records and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_image.agent.sandboxes import Limits, NoIdRange, SandboxSpec, records
from runtime_image.agent.sandboxes.disks import disk_class
from runtime_image.agent.sandboxes.identities import Identity, IdentityPool
from runtime_image.agent.sandboxes.model import DISK_CLASSES_MIB, ID_RANGE_SIZE, Defences
from runtime_image.agent.sandboxes.records import Places, Record

RECORD = Record(
    sandbox_id="box",
    id_base=65_536,
    disk_class_mib=256,
    limits=Limits(memory_mib=99),
    created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)


@given(st.integers(1, DISK_CLASSES_MIB[-1]))
def test_a_disk_is_rounded_up_to_its_class(disk_mib: int) -> None:
    """The smallest that holds it."""
    chosen = disk_class(disk_mib)
    assert chosen in DISK_CLASSES_MIB
    assert chosen >= disk_mib
    assert all(smaller < disk_mib for smaller in DISK_CLASSES_MIB if smaller < chosen)


def test_a_disk_beyond_the_largest_class_is_refused() -> None:
    """Never silently smaller than asked."""
    with pytest.raises(ValueError, match="at most"):
        disk_class(DISK_CLASSES_MIB[-1] + 1)


@pytest.mark.parametrize("sandbox_id", ["", "../x", "a/b", "a b", "é", "x" * 65, ".", "a.b"])
def test_an_id_that_could_be_a_path_is_refused(sandbox_id: str) -> None:
    """Ids become directory and cgroup names."""
    with pytest.raises(ValueError):
        SandboxSpec(sandbox_id=sandbox_id, layers=(Path("/"),))


@pytest.mark.parametrize("field", ["cpu_millis", "memory_mib", "disk_mib", "pids", "shm_mib", "open_files"])
def test_limits_of_nothing_are_refused(field: str) -> None:
    """A sandbox below them would not even start."""
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(Limits(), **{field: 0})


def places(tmp_path: Path) -> Places:
    return Places(directory=tmp_path, merged=tmp_path / "merged", runc_state=tmp_path / "runc")


def test_a_record_survives(tmp_path: Path) -> None:
    """First without, then with the process."""
    here = places(tmp_path)
    assert records.read(here) is None
    records.write(here, RECORD)
    assert records.read(here) == RECORD
    records.write_running(here, pid=7, pid_started=8)
    assert records.read(here) == dataclasses.replace(RECORD, pid=7, pid_started=8)
    assert sorted(os.listdir(tmp_path)) == ["record.json", "running.json"]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", json.dumps({"limits": {}}), "null"])
def test_a_broken_record_is_none(tmp_path: Path, text: str) -> None:
    """As after a full disk; the sweep then removes the sandbox."""
    (tmp_path / "record.json").write_text(text)
    assert records.read(places(tmp_path)) is None


def test_a_pid_that_is_somebody_else_is_not_the_sandbox() -> None:
    """Pids are used again; start times tell."""
    with subprocess.Popen(["sleep", "100"]) as process:
        started = records.process_started(process.pid)
        assert started is not None
        mine = dataclasses.replace(RECORD, pid=process.pid, pid_started=started)
        assert mine.lives()
        assert not dataclasses.replace(mine, pid_started=started - 1).lives()
        process.kill()
    assert not mine.lives()
    assert not RECORD.lives()


class FakePool(IdentityPool):
    """Namespaces are pipes: no kernel, no root. `fails` makes the next batch fail."""

    fails = False

    def _make(self, id_bases: list[int]) -> None:
        if self.fails:
            raise OSError(1, "scripted")
        for id_base in id_bases:
            read, write = os.pipe()
            self._ready[id_base] = Identity(id_base=id_base, userns_fd=read, netns_fd=write)


def test_ranges_rest_as_long_as_possible() -> None:
    """First freed, first used again; never two owners at once."""
    pool = FakePool(id_base=0, id_count=3, defences=Defences())
    leased = [pool.lease(name) for name in "abc"]
    assert [found.id_base // ID_RANGE_SIZE for found in leased] == [0, 1, 2]
    with pytest.raises(NoIdRange):
        pool.lease("d")
    pool.release("b")
    pool.release("b")
    pool.release("a")
    again = [pool.lease("e"), pool.lease("f")]
    assert [found.id_base // ID_RANGE_SIZE for found in again] == [1, 0]
    assert pool.leased_count() == 3
    for found in (*leased, *again):
        found.close()
    pool.close()


def test_a_found_range_is_not_leased() -> None:
    """What an adopted sandbox has is its own until released."""
    pool = FakePool(id_base=0, id_count=2, defences=Defences())
    pool.mark_leased("old", 0)
    pool.mark_leased("elsewhere", 77)
    fresh = pool.lease("new")
    assert fresh.id_base == ID_RANGE_SIZE
    with pytest.raises(NoIdRange):
        pool.lease("more")
    pool.release("old")
    more = pool.lease("more")
    assert more.id_base == 0
    fresh.close()
    more.close()
    pool.close()


def test_a_failed_batch_gives_the_range_back() -> None:
    """The next lease may succeed."""
    pool = FakePool(id_base=0, id_count=1, defences=Defences())
    pool.fails = True
    with pytest.raises(OSError, match="scripted"):
        pool.lease("a")
    assert pool.leased_count() == 0
    pool.fails = False
    pool.lease("a").close()
    pool.close()
