"""Turns our system call list (`seccomp.json`) into the OCI form that runc compiles.

Our form says what a filter can decide exactly. An argument that the kernel cuts to 32 bits must be
compared under a mask: `ioctl(fd, 1 << 32 | TIOCSTI)` is TIOCSTI to the kernel, and not equal to it for
an unmasked comparison.
"""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_PROFILE: Final = Path(__file__).with_name("seccomp.json")
_ARCHITECTURES: Final = {"x86_64": ["SCMP_ARCH_X86_64"], "aarch64": ["SCMP_ARCH_AARCH64"]}
_EPERM: Final = 1
_WORD: Final = 0xFFFF_FFFF


@functools.cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_PROFILE.read_text())
    return loaded


def profile(machine: str | None = None) -> dict[str, Any]:
    """The OCI `linux.seccomp` object for a machine (`platform.machine()` by default).

    Only the machine's native calls: another instruction set (32-bit, x32) is killed by the filter.
    Raises KeyError for a machine we have no list for.
    """
    document = _document()
    rules: list[dict[str, Any]] = [{"names": list(document["allow"]), "action": "SCMP_ACT_ALLOW"}]
    for entry in document["errno"]:
        rules.append({"names": list(entry["names"]), "action": "SCMP_ACT_ERRNO", "errnoRet": entry["errno"]})
    for entry in document["only"]:
        for value in entry["values"]:
            rules.append(_allow_masked(entry, entry["mask"], value))
    for entry in document["except"]:
        for mask, value in unlike(entry["values"]):
            rules.append(_allow_masked(entry, mask, value))
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "architectures": _ARCHITECTURES[machine or platform.machine()],
        "syscalls": rules,
    }


def unlike(values: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(mask, value) pairs, of which a 32-bit word matches at least one exactly when it is none of `values`."""
    forbidden = sorted({value & _WORD for value in values})
    agreeing = _WORD
    for value in forbidden:
        agreeing &= ~(value ^ forbidden[0]) & _WORD
    for bit in range(32):
        if agreeing >> bit & 1:
            yield 1 << bit, ~forbidden[0] & (1 << bit)
    differing = _WORD & ~agreeing
    taken = {value & differing for value in forbidden}
    combination = differing
    # Every subset of the bits in which the forbidden words differ.
    while True:
        if combination not in taken:
            yield differing, combination
        if combination == 0:
            return
        combination = (combination - 1) & differing


def _allow_masked(entry: Mapping[str, Any], mask: int, value: int) -> dict[str, Any]:
    argument = {"index": entry["index"], "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
    return {"names": [entry["name"]], "action": "SCMP_ACT_ALLOW", "args": [argument]}
