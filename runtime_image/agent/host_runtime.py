"""The sandbox runtime of a home: its cgroup and its ids follow from the home, so that all who open it agree."""

from __future__ import annotations

import hashlib
from pathlib import Path

from runtime_image.agent import id_stretch
from runtime_image.agent.guest_runtime import GUEST_MOUNT, guest_argv
from runtime_image.agent.sandboxes import RuntimeSettings


def cgroup_name_of(home: Path) -> str:
    """The cgroup of a home's sandboxes, when none was set."""
    return "shoal-" + hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:10]


def runtime_settings(
    home: Path, *, guest_dir: Path, cgroup_name: str | None = None, id_base: int | None = None
) -> RuntimeSettings:
    """How to open the runtime of a home. A stretch of ids is claimed where `id_base` is None.

    Raises:
        NoStretchError: This machine has none left.
    """
    return RuntimeSettings(
        home=home / "runtime",
        guest_dir=guest_dir,
        guest_argv=tuple(guest_argv()),
        cgroup_name=cgroup_name or cgroup_name_of(home),
        id_base=id_base if id_base is not None else id_stretch.claim(home),
        id_count=id_stretch.RANGES,
        guest_mount=GUEST_MOUNT,
    )
