"""What every start and teardown on a host shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from runtime_image.agent.sandboxes.cgroups import CgroupLayout, SandboxCgroup
from runtime_image.agent.sandboxes.disks import DiskStore
from runtime_image.agent.sandboxes.identities import IdentityPool
from runtime_image.agent.sandboxes.model import RuntimeSettings
from runtime_image.agent.sandboxes.records import Places

Observer = Callable[[str], None]
"""Called with a step's name before it is done; what it raises is that step's failure."""


def _unobserved(_step: str) -> None:
    return


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machinery:
    """What every launch on a host shares."""

    settings: RuntimeSettings
    layout: CgroupLayout
    identities: IdentityPool
    disk_store: DiskStore
    skeleton: Path
    """A layer below all others with the mount points, so that runc makes none in the upper."""
    observe: Observer = _unobserved

    def places(self, sandbox_id: str) -> Places:
        """The paths of a sandbox."""
        return Places(
            directory=self.settings.home / "sandboxes" / sandbox_id,
            merged=self.settings.run_dir / self.settings.cgroup_name / sandbox_id,
            runc_state=self.settings.home / "runc" / sandbox_id,
        )

    def cgroup(self, sandbox_id: str) -> SandboxCgroup:
        """The cgroup of a sandbox."""
        return SandboxCgroup(self.layout, self.settings.cgroup_name, sandbox_id)
