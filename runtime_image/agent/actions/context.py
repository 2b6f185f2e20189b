"""What the execution of a step needs of its sandbox."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runtime_image.agent.clock import Clock
from runtime_image.agent.link import GuestLink
from runtime_image.agent.ports import KillGroup, OomCounter, RuntimePort
from runtime_image.agent.sandboxes import Sandbox
from runtime_image.layers import LayerIndex


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A live sandbox and the defaults of what runs in it.

    Attributes:
        saw_ooms: Told each count that was read: what was an action's is not blamed for the guest's own end later.
        lasting: Kill groups of named shells and contexts.
        lowers: The layers below the writable one, bottom first.
        snapshot_index: The index of the writable layer at a snapshot of this sandbox; None for other snapshots.
    """

    link: GuestLink
    runtime: RuntimePort
    sandbox: Sandbox
    clock: Clock
    workdir: str
    user: str | None
    env: Mapping[str, str]
    ooms: OomCounter
    saw_ooms: Callable[[int], None]
    lowers: tuple[Path, ...]
    snapshot_index: Callable[[str], LayerIndex | None]
    lasting: dict[str, KillGroup] = field(default_factory=dict)

    def group(self, name: str) -> KillGroup:
        """A kill group of this sandbox."""
        return self.runtime.kill_group(self.sandbox, name)

    def lasting_group(self, kind: str, name: str) -> KillGroup:
        """The kill group of a named shell or context: all its steps share it, it goes with the sandbox."""
        key = f"{kind}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        group = self.lasting.get(key)
        if group is None:
            group = self.lasting[key] = self.group(key)
        return group

    def oom_kills(self) -> int:
        """How many processes the memory limit has killed so far; 0 when the sandbox is gone."""
        try:
            count = self.ooms.read()
        except OSError:
            return 0
        self.saw_ooms(count)
        return count
