"""What is set for the whole machine, so that many sandboxes together leave room and start programs quickly.

Some kernel tables are sized for one person's computer and counted for all. Two are raised to what systemd
sets on any current distribution (memory limits of the sandboxes bound them instead); processes of all
sandboxes of an agent together are kept below the machine's own limit. The v2 cgroup hierarchy is told that
processes move between groups all the time, which they do: every action has a group of its own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from runtime_image.agent.sandboxes import syscalls
from runtime_image.agent.sandboxes.cgroups import CgroupLayout, bound_processes

_log = logging.getLogger(__name__)

# systemd `sysctl.d/50-pid-max.conf` and its `bump-proc-sys-fs-file-max`, read 2026-11-30. A process costs
# memory that its sandbox is charged for, and so does an open file.
_CEILINGS: Final = {"kernel/pid_max": 4_194_304, "fs/file-max": 2**63 - 1}
_SHARE_OF_PROCESSES: Final = (3, 4)


def raise_ceilings(root: Path = Path("/proc/sys")) -> None:
    """Raises, never lowers; a machine that refuses (a read-only /proc/sys) is logged and left as it is."""
    for name, wanted in _CEILINGS.items():
        try:
            found = int((root / name).read_text())
            if found < wanted:
                (root / name).write_text(str(wanted))
        except OSError as error:
            _log.warning("host.ceiling_not_raised", extra={"sysctl": name, "error": str(error)})


# Makes moving a process into a group not wait for a grace period of every processor, at a little cost to
# forks (Documentation/admin-guide/cgroup-v2.rst, read 2026-11-30). Measured here on Linux 6.18: an action
# after a pause of 50 ms or more took 19.5 ms without and 6.7 ms with it.
QUICK_MOVES: Final = "favordynmods"
_MOUNT_FLAGS: Final = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1 << 10, "relatime": 1 << 21}
_MS_REMOUNT: Final = 32


def favour_quick_moves(layout: CgroupLayout, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """Mounts the v2 hierarchy again with `favordynmods`, all else as it was; returns whether it is so now.

    A machine that refuses (an older kernel, a cgroup namespace) is logged and left as it is: actions are
    slower there, and nothing else.
    """
    flags, options = _mounted_as(layout.unified, mountinfo.read_text())
    if QUICK_MOVES in options:
        return True
    known = [option for option in options if option not in ("rw", "ro")]
    try:
        syscalls.mount(
            "cgroup2", str(layout.unified), "cgroup2", flags | _MS_REMOUNT, ",".join([*known, QUICK_MOVES])
        )
    except OSError as error:
        _log.warning("host.quick_moves_refused", extra={"error": str(error)})
        return False
    return True


def _mounted_as(target: Path, mountinfo: str) -> tuple[int, list[str]]:
    """A mount's flags and its file system's options; the last one mounted there counts."""
    flags, options = 0, list[str]()
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) > 5 and fields[4] == str(target):
            flags = sum(_MOUNT_FLAGS.get(word, 0) for word in fields[5].split(","))
            options = kind[2].split(",")
    return flags, options


def keep_room_for_the_host(layout: CgroupLayout, cgroup_name: str, root: Path = Path("/proc/sys")) -> int:
    """Bounds the processes of all sandboxes of this agent together; returns how many they may be."""
    machine = min(int((root / name).read_text()) for name in ("kernel/pid_max", "kernel/threads-max"))
    most = machine * _SHARE_OF_PROCESSES[0] // _SHARE_OF_PROCESSES[1]
    bound_processes(layout, cgroup_name, most)
    return most
