"""System calls that Python's standard library does not offer, by the C core of ctypes.

`ctypes` itself would cost each sandbox half a MiB; its core does the calls.
"""

from __future__ import annotations

import _ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

# Linux capability numbers (capability.h) that processes of a sandbox may have: what ordinary
# package managers and servers need. Not among them, and so gone for good: SYS_ADMIN, SYS_PTRACE,
# SYS_MODULE, SYS_RAWIO, SYS_BOOT, SYS_TIME, MKNOD, NET_ADMIN, NET_RAW, BPF, PERFMON and the rest.
_KEPT = (
    0,  # CHOWN
    1,  # DAC_OVERRIDE
    3,  # FOWNER
    4,  # FSETID
    5,  # KILL
    6,  # SETGID
    7,  # SETUID
    8,  # SETPCAP
    10,  # NET_BIND_SERVICE
    18,  # SYS_CHROOT
    29,  # AUDIT_WRITE
    31,  # SETFCAP
)
_LAST_CAPABILITY = 40


def _prctl(option: int, argument: int = 0, third: int = 0) -> int:
    # None: what the interpreter itself is linked with, its libc.
    this: Any = None
    address = _ctypes.dlsym(_ctypes.dlopen(this, 0), "prctl")
    return int(_ctypes.call_function(address, (option, argument, third, 0, 0)))


def harden() -> None:
    """Make this process untouchable by the processes it will start.

    Not dumpable: no ptrace, no /proc/1/mem, environ or fd for anyone without SYS_PTRACE, which the
    bounding set loses here. Also the reaper of orphans where it is not PID 1 (in tests).

    Raises:
        OSError: the kernel refused what the isolation rests on.
    """
    for option, argument in (
        (_PR_SET_DUMPABLE, 0),
        (_PR_SET_NO_NEW_PRIVS, 1),
        (_PR_SET_CHILD_SUBREAPER, 1),
    ):
        if _prctl(option, argument) < 0:
            raise OSError(f"prctl({option}) failed")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in _KEPT:
            # Fails where the runtime already took SETPCAP away together with these.
            _prctl(_PR_CAPBSET_DROP, capability)


def die_with_parent() -> None:
    """Be killed when the guest ends, also where it is not PID 1 and the kernel would not see to it."""
    _prctl(_PR_SET_PDEATHSIG, 9)
