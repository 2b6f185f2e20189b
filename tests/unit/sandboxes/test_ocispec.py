"""The runtime configuration says what DESIGN's isolation promises."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from runtime_image.agent.sandboxes import Defences, Limits
from runtime_image.agent.sandboxes.ocispec import Bundle, build

BUNDLE = Bundle(
    rootfs=Path("/run/shoal/a/box"),
    argv=("/.shoal/guest",),
    hostname="sandbox",
    env={"A": "b"},
    limits=Limits(cpu_millis=250, memory_mib=64, pids=33, shm_mib=8),
    cgroup_path="/shoal/box",
    id_base=1_000_000,
    userns_path="/proc/1/fd/7",
    netns_path="/proc/1/fd/8",
    guest_dir=Path("/var/guest"),
    guest_mount="/.shoal",
    swap_is_counted=True,
    seccomp={"defaultAction": "SCMP_ACT_ERRNO"},
    defences=Defences(),
)


def spec(**changes: Any) -> dict[str, Any]:
    defences = dataclasses.replace(Defences(), **changes)
    built = build(dataclasses.replace(BUNDLE, defences=defences))
    json.dumps(built)
    return built


def test_every_namespace_is_its_own() -> None:
    """User, mount, pid, network, ipc, uts and cgroup."""
    kinds = {entry["type"] for entry in spec()["linux"]["namespaces"]}
    assert kinds == {"user", "mount", "pid", "network", "ipc", "uts", "cgroup"}


def test_root_inside_is_the_ranges_first_id() -> None:
    """65,536 ids from the base."""
    assert spec()["linux"]["uidMappings"] == [{"containerID": 0, "hostID": 1_000_000, "size": 65_536}]
    assert spec()["linux"]["gidMappings"] == spec()["linux"]["uidMappings"]


def test_capabilities_hold_none_that_reaches_the_host() -> None:
    """Nothing inheritable or ambient, so another user inside has none."""
    held = spec()["process"]["capabilities"]
    assert set(held) == {"bounding", "effective", "permitted"}
    refused = {
        "ADMIN",
        "PTRACE",
        "MODULE",
        "MKNOD",
        "RAWIO",
        "BOOT",
        "TIME",
        "RAW",
        "BPF",
        "PERFMON",
        "RESOURCE",
    }
    assert not [name for name in held["bounding"] if name.rpartition("_")[2] in refused]


def test_only_kernel_filesystems_and_the_guest_are_mounted() -> None:
    """No directory of the host but the guest's own and the processor's topology, both read-only."""
    binds = {entry["source"]: entry["options"] for entry in spec()["mounts"] if entry["type"] == "bind"}
    assert set(binds) == {"/var/guest", "/sys/devices/system"}
    assert all("ro" in options and "nosuid" in options and "nodev" in options for options in binds.values())
    assert {entry["type"] for entry in spec()["mounts"]} == {"bind", "tmpfs", "devpts", "mqueue", "proc"}


def test_limits_are_in_the_kernels_units() -> None:
    """Memory and swap together are the memory: no swap."""
    resources = spec()["linux"]["resources"]
    assert resources["memory"] == {"limit": 64 << 20, "swap": 64 << 20}
    assert resources["cpu"] == {"shares": 256, "quota": 25_000, "period": 100_000}
    assert resources["pids"] == {"limit": 33}
    assert resources["devices"] == [{"allow": False, "access": "rwm"}]
    shm = next(entry for entry in spec()["mounts"] if entry["destination"] == "/dev/shm")
    assert "size=8m" in shm["options"]
    unlimited = build(dataclasses.replace(BUNDLE, swap_is_counted=False))
    assert "swap" not in unlimited["linux"]["resources"]["memory"]


def test_the_environment_is_exactly_what_was_given() -> None:
    """Nothing of the agent's own leaks in."""
    assert spec()["process"]["env"] == ["A=b"]


@pytest.mark.parametrize(
    "path", ["/proc/kcore", "/proc/keys", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags"]
)
def test_the_kernels_tables_are_masked(path: str) -> None:
    """By name: what DESIGN lists."""
    assert path in spec()["linux"]["maskedPaths"]


@pytest.mark.parametrize("defence", [field.name for field in dataclasses.fields(Defences)])
def test_every_switch_changes_the_sandbox(defence: str) -> None:
    """Except those that other modules read; a switch that did nothing would make its control a lie."""
    elsewhere = {"user_namespace_limits", "own_accounts", "root_mount_flags"}
    assert (spec(**{defence: False}) != spec()) == (defence not in elsewhere)
