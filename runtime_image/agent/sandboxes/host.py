"""Ceilings of the whole machine that sandboxes share, so that many of them together leave room.

Some kernel tables are sized for one person's computer and counted for all. Two are raised to what systemd
sets on any current distribution (memory limits of the sandboxes bound them instead); processes of all
sandboxes of an agent together are kept below the machine's own limit.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

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


def keep_room_for_the_host(layout: CgroupLayout, cgroup_name: str, root: Path = Path("/proc/sys")) -> int:
    """Bounds the processes of all sandboxes of this agent together; returns how many they may be."""
    machine = min(int((root / name).read_text()) for name in ("kernel/pid_max", "kernel/threads-max"))
    most = machine * _SHARE_OF_PROCESSES[0] // _SHARE_OF_PROCESSES[1]
    bound_processes(layout, cgroup_name, most)
    return most
