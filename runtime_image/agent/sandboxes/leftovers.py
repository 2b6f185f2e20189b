"""Finding what earlier agents left behind, from the kernel's own lists and not from our records alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from runtime_image.agent.sandboxes import records, syscalls
from runtime_image.agent.sandboxes.cgroups import sandbox_ids_with_cgroups
from runtime_image.agent.sandboxes.machinery import Machinery


def sandbox_ids(machinery: Machinery) -> set[str]:
    """Every sandbox id of which anything is on this machine: files, mounts, cgroups, runc state."""
    settings = machinery.settings
    return (
        records.sandbox_ids(settings.home / "sandboxes")
        | records.sandbox_ids(settings.home / "runc")
        | records.sandbox_ids(settings.run_dir / settings.cgroup_name)
        | sandbox_ids_with_cgroups(machinery.layout, settings.cgroup_name)
    )


def loops_below(directory: Path) -> dict[str, str]:
    """Loop devices whose backing file is (or was) below `directory`: device path to file."""
    found: dict[str, str] = {}
    prefix = f"{directory}/"
    for entry in os.scandir("/sys/block"):
        if entry.name.startswith("loop"):
            with contextlib.suppress(OSError):
                backing = Path(entry.path, "loop", "backing_file").read_text().rstrip("\n")
                if backing.startswith(prefix):
                    found[f"/dev/{entry.name}"] = backing
    return found


def detach_loops(machinery: Machinery, keep: set[str]) -> None:
    """Detaches loop devices of ours that no kept sandbox uses."""
    home = machinery.settings.home / "sandboxes"
    for device, backing in loops_below(home.resolve()).items():
        if Path(backing).relative_to(home.resolve()).parts[0] not in keep:
            with contextlib.suppress(OSError):
                syscalls.detach_loop(device)
