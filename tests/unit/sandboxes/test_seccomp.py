"""The system call list, as data and as what runc is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_image.agent.sandboxes import seccomp

WORDS = st.integers(0, 2**32 - 1)

# What a sandbox may never reach, whatever else changes in the list.
REFUSED = {
    "add_key", "bpf", "clone3", "delete_module", "fanotify_init", "finit_module", "fsconfig", "fsmount",
    "fsopen", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl",
    "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mount", "mount_setattr", "move_mount",
    "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "quotactl", "reboot", "request_key",
    "setdomainname", "sethostname", "setns", "settimeofday", "swapon", "syslog", "umount2", "userfaultfd",
    "vhangup",
}  # fmt: skip


def allowed(profile: dict[str, Any], name: str, *arguments: int) -> bool:
    """What the kernel would decide: any rule that matches allows."""
    for rule in profile["syscalls"]:
        if name in rule["names"] and rule["action"] == "SCMP_ACT_ALLOW":
            conditions = rule.get("args", [])
            assert all(c["op"] == "SCMP_CMP_MASKED_EQ" for c in conditions)
            if all(arguments[c["index"]] & c["value"] == c["valueTwo"] for c in conditions):
                return True
    return False


def test_everything_is_refused_unless_named() -> None:
    """Default deny with EPERM, for native calls only."""
    profile = seccomp.profile("x86_64")
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert profile["defaultErrnoRet"] == 1
    assert profile["architectures"] == ["SCMP_ARCH_X86_64"]
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_dangerous_calls_are_not_in_the_list(name: str) -> None:
    """No rule allows them, with any arguments."""
    assert not allowed(seccomp.profile("x86_64"), name, *[0] * 6)


def test_clone3_answers_enosys_so_that_libc_uses_clone() -> None:
    """EPERM would make thread creation fail instead."""
    rules = [rule for rule in seccomp.profile("x86_64")["syscalls"] if "clone3" in rule["names"]]
    assert rules == [{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]


@given(st.integers(0, 2**64 - 1))
def test_no_flag_that_makes_a_namespace_passes(flags: int) -> None:
    """For clone and unshare, whatever else is set."""
    profile = seccomp.profile("x86_64")
    makes_one = flags & (
        0x10000000 | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
    )
    assert allowed(profile, "clone", flags) == (not makes_one)
    assert allowed(profile, "unshare", flags) == (not makes_one and not flags & 0x80)


@given(st.integers(0, 2**32 - 1))
def test_terminal_input_is_refused_in_every_spelling(high: int) -> None:
    """The kernel reads 32 bits of the request; so does the filter."""
    profile = seccomp.profile("x86_64")
    for number in (0x5412, 0x541C):
        assert not allowed(profile, "ioctl", 0, high << 32 | number)
    assert allowed(profile, "ioctl", 0, 0x5401)


@pytest.mark.parametrize(
    ("family", "passes"),
    [(1, True), (2, True), (10, True), (16, True), (17, False), (38, False), (40, False)],
)
def test_only_ordinary_socket_families(family: int, passes: bool) -> None:
    """unix, inet, inet6 and netlink; not packet, not the kernel's crypto, not vsock."""
    assert allowed(seccomp.profile("x86_64"), "socket", family, 1, 0) is passes


@given(st.lists(WORDS, min_size=1, max_size=4), WORDS)
def test_unlike_matches_exactly_the_other_words(forbidden: list[int], word: int) -> None:
    """A word matches one of the masks if and only if it is not forbidden."""
    if bin(_differing(forbidden)).count("1") > 10:
        forbidden = forbidden[:1]
    pairs = list(seccomp.unlike(forbidden))
    for candidate in (word, *forbidden, *(value ^ 1 for value in forbidden)):
        assert any(candidate & mask == value for mask, value in pairs) == (candidate not in forbidden)


def _differing(words: list[int]) -> int:
    found = 0
    for word in words:
        found |= word ^ words[0]
    return found


def test_the_list_has_no_call_twice() -> None:
    """Each call is decided in one place; what a place has several entries for differs in the argument looked at."""
    document = json.loads(Path(seccomp.__file__).with_name("seccomp.json").read_text())
    names = list(document["allow"])
    for entry in document["errno"]:
        names += entry["names"]
    names += {entry["name"] for entry in document["only"]}
    names += {entry["name"] for entry in document["except"]}
    looked_at = [(entry["name"], entry["index"]) for entry in document["only"]]
    assert len(looked_at) == len(set(looked_at))
    assert len(names) == len(set(names))
    assert document["allow"] == sorted(document["allow"])
