"""The two cgroup layouts, on files that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_image.agent.sandboxes import Limits, NotSupported, host
from runtime_image.agent.sandboxes.cgroups import (
    CgroupLayout,
    SandboxCgroup,
    bound_processes,
    cpu_quota_usec,
    cpu_shares,
    cpu_weight,
)

HYBRID = """\
25 20 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
27 25 0:24 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
28 25 0:25 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
29 25 0:26 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/systemd,name=systemd
30 25 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""
PURE = "31 25 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"


def test_a_hybrid_machine_is_recognised() -> None:
    """Controllers by v1, grouping by the v2 mount beside them."""
    layout = CgroupLayout.detect(HYBRID)
    assert layout.kind == "hybrid"
    assert layout.unified == Path("/sys/fs/cgroup/unified")
    assert layout.controllers["cpu"] == layout.controllers["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert set(layout.controllers) == {"cpu", "cpuacct", "memory", "pids", "name=systemd"}
    assert layout.hierarchies()[0] == layout.unified
    assert len(layout.hierarchies()) == 5


def test_a_pure_v2_machine_is_recognised() -> None:
    """One hierarchy does both."""
    layout = CgroupLayout.detect(PURE)
    assert layout.kind == "v2"
    assert layout.hierarchies() == [Path("/sys/fs/cgroup")]


def test_no_v2_hierarchy_is_told_with_its_remedy() -> None:
    """Kill groups need it; there is no fallback."""
    with pytest.raises(NotSupported, match="mount -t cgroup2"):
        CgroupLayout.detect("\n".join(HYBRID.splitlines()[:-1]))


@pytest.mark.parametrize(
    ("millis", "shares", "weight", "quota"),
    [(1000, 1024, 39, 100_000), (10, 10, 1, 1000), (1, 2, 1, 1000), (64_000, 65_536, 2500, 6_400_000)],
)
def test_cpu_in_the_kernels_units(millis: int, shares: int, weight: int, quota: int) -> None:
    """Shares, weight and quota of the same amount, never below what the kernel takes."""
    assert cpu_shares(millis) == shares
    assert cpu_weight(millis) == weight
    assert cpu_quota_usec(millis) == quota


def fill(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def test_limits_and_usage_on_pure_v2(tmp_path: Path) -> None:
    """The v2 files, in their units."""
    cgroup = SandboxCgroup(CgroupLayout(kind="v2", unified=tmp_path, controllers={}), "shoal", "box")
    fill(
        tmp_path / "shoal" / "box",
        {
            "cpu.max": "max 100000", "cpu.weight": "100", "memory.max": "max", "pids.max": "max",
            "cpu.stat": "usage_usec 1234\nuser_usec 1000\n", "memory.current": "4096\n", "memory.peak": "8192\n",
            "pids.current": "3\n", "memory.events": "low 0\noom 5\noom_kill 2\noom_group_kill 0\n",
        },
    )  # fmt: skip
    cgroup.set_limits(Limits(cpu_millis=500, memory_mib=64, pids=20))
    written = {name: (cgroup.unified / name).read_text() for name in ("cpu.max", "memory.max", "pids.max")}
    assert written["cpu.max"] == "50000 100000"
    assert written["memory.max"] == str(64 << 20)
    assert written["pids.max"] == "20"
    assert cgroup.usage() == (1234, 4096, 8192, 3, 2)
    (cgroup.unified / "memory.peak").unlink()
    assert cgroup.usage()[2] is None


def test_usage_on_v1_is_in_the_same_units(tmp_path: Path) -> None:
    """Nanoseconds become microseconds; kills come from the memory controller."""
    roots = {name: tmp_path / name for name in ("cpu", "cpuacct", "memory", "pids")}
    cgroup = SandboxCgroup(
        CgroupLayout(kind="hybrid", unified=tmp_path / "unified", controllers=roots), "shoal", "box"
    )
    fill(roots["cpuacct"] / "shoal" / "box", {"cpuacct.usage": "5000999\n"})
    fill(roots["pids"] / "shoal" / "box", {"pids.current": "7\n"})
    fill(
        roots["memory"] / "shoal" / "box",
        {
            "memory.usage_in_bytes": "10\n", "memory.max_usage_in_bytes": "20\n",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        },
    )  # fmt: skip
    assert cgroup.usage() == (5000, 10, 20, 7, 4)


@pytest.mark.parametrize("swap_is_counted", [True, False])
def test_v1_memory_can_grow_and_shrink(tmp_path: Path, swap_is_counted: bool) -> None:
    """Memory and memory+swap end equal, whatever the order the kernel wants."""
    roots = {name: tmp_path / name for name in ("cpu", "memory", "pids")}
    cgroup = SandboxCgroup(
        CgroupLayout(kind="hybrid", unified=tmp_path / "unified", controllers=roots), "shoal", "box"
    )
    fill(roots["cpu"] / "shoal/box", {"cpu.cfs_period_us": "", "cpu.cfs_quota_us": "", "cpu.shares": ""})
    fill(roots["pids"] / "shoal/box", {"pids.max": ""})
    files = {"memory.limit_in_bytes": str(1 << 30)}
    if swap_is_counted:
        files["memory.memsw.limit_in_bytes"] = str(1 << 30)
    memory = roots["memory"] / "shoal/box"
    fill(memory, files)
    for mib in (2048, 512, 4096):
        cgroup.set_limits(Limits(memory_mib=mib))
        assert {(memory / name).read_text() for name in files} == {str(mib << 20)}


def test_removing_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    """Kill, wait and remove are repeatable."""
    cgroup = SandboxCgroup(CgroupLayout(kind="v2", unified=tmp_path, controllers={}), "shoal", "gone")
    assert not cgroup.exists()
    cgroup.kill()
    cgroup.wait_empty(timeout_s=1)
    cgroup.remove(timeout_s=1)
    assert cgroup.stray_pids() == set()


def test_a_cgroup_goes_with_its_groups(tmp_path: Path) -> None:
    """Children first."""
    cgroup = SandboxCgroup(CgroupLayout(kind="v2", unified=tmp_path, controllers={}), "shoal", "box")
    (cgroup.unified / "group-a" / "nested").mkdir(parents=True)
    (cgroup.unified / "group-b").mkdir()
    assert cgroup.exists()
    cgroup.remove(timeout_s=1)
    assert not cgroup.exists()


def test_processes_of_all_sandboxes_are_bounded_on_pure_v2(tmp_path: Path) -> None:
    """Controllers are switched on above, the bound is set on the agent's cgroup."""
    fill(tmp_path / "shoal", {"cgroup.subtree_control": "", "pids.max": "max"})
    (tmp_path / "cgroup.subtree_control").write_text("")
    bound_processes(CgroupLayout(kind="v2", unified=tmp_path, controllers={}), "shoal", 99)
    assert (tmp_path / "shoal" / "pids.max").read_text() == "99"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_ceilings_are_raised_never_lowered(tmp_path: Path) -> None:
    """And a machine that refuses is left alone."""
    fill(tmp_path / "kernel", {"pid_max": "32768"})
    fill(tmp_path / "fs", {"file-max": str(2**63 - 1)})
    host.raise_ceilings(tmp_path)
    assert (tmp_path / "kernel" / "pid_max").read_text() == "4194304"
    assert (tmp_path / "fs" / "file-max").read_text() == str(2**63 - 1)
    host.raise_ceilings(tmp_path / "absent")


MOUNTED = (
    "30 1 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - "
    "cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot{more}\n"
)


def test_the_hierarchy_is_mounted_again_with_all_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remount sets every option anew, so that each one there was is given again, flags of the mount included."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(host.syscalls, "mount", lambda *arguments: calls.append(arguments))
    (tmp_path / "mountinfo").write_text(MOUNTED.format(more=""))
    layout = CgroupLayout(kind="v2", unified=Path("/sys/fs/cgroup"), controllers={})
    assert host.favour_quick_moves(layout, tmp_path / "mountinfo")
    nosuid_nodev_noexec_relatime_remount = 2 | 4 | 8 | 1 << 21 | 32
    options = "nsdelegate,memory_recursiveprot,favordynmods"
    assert calls == [("cgroup2", "/sys/fs/cgroup", "cgroup2", nosuid_nodev_noexec_relatime_remount, options)]


def test_a_hierarchy_that_is_as_wanted_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second agent of a machine mounts nothing; one that is refused goes on."""
    layout = CgroupLayout(kind="v2", unified=Path("/sys/fs/cgroup"), controllers={})

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(host.syscalls, "mount", refuse)
    (tmp_path / "mountinfo").write_text(MOUNTED.format(more=",favordynmods"))
    assert host.favour_quick_moves(layout, tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(MOUNTED.format(more=""))
    assert not host.favour_quick_moves(layout, tmp_path / "mountinfo")
