"""Which of its hard limits a sandbox has run into, told once a while: a count that rises is no reason for a flood."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel

from runtime_image.agent.sandboxes import LimitsHit
from shoal.contract.sessions import Resources

#: At most one event of a kind in this time, seconds; what comes meanwhile is counted in the next.
WINDOW_S: Final = 60.0


class Told(BaseModel):
    """What was told so far: processes killed, starts refused, and whether the disk was full then."""

    memory: int = 0
    pids: int = 0
    disk: bool = False


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One event's kind, words and facts."""

    kind: str
    message: str
    data: dict[str, object]


@dataclass(kw_only=True)
class LimitWatch:
    """One sandbox's. `told` outlives the agent, the windows do not."""

    told: Told = field(default_factory=Told)
    _told_at: dict[str, float] = field(default_factory=dict)

    def look(
        self, hits: LimitsHit, resources: Resources, disk_mib: int, now: float, *, final: bool = False
    ) -> Iterator[Hit]:
        """What is to be told now.

        Args:
            hits: What was counted since the sandbox was made.
            resources: The session's limits.
            disk_mib: How large its disk really is.
            now: Monotonic seconds.
            final: The sandbox ends: there will be no later chance.
        """
        killed = hits.oom_kills - self.told.memory
        if killed > 0 and self._due("limit.memory", now, final=final):
            self.told.memory = hits.oom_kills
            yield Hit(
                kind="limit.memory",
                message=f"Processes were killed for memory: {killed}; the limit is {resources.memory_mib} MiB.",
                data={"count": killed, "limit_mib": resources.memory_mib},
            )
        refused = hits.forks_refused - self.told.pids
        if refused > 0 and self._due("limit.pids", now, final=final):
            self.told.pids = hits.forks_refused
            yield Hit(
                kind="limit.pids",
                message=f"Processes could not be started: {refused}; the limit is {resources.pids} at a time.",
                data={"count": refused, "limit": resources.pids},
            )
        if not hits.disk_full:
            self.told.disk = False
        elif not self.told.disk and self._due("limit.disk", now, final=final):
            self.told.disk = True
            yield Hit(
                kind="limit.disk",
                message=f"The disk of {disk_mib} MiB is full.",
                data={"limit_mib": disk_mib},
            )

    def _due(self, kind: str, now: float, *, final: bool) -> bool:
        before = self._told_at.get(kind)
        if before is not None and now - before < WINDOW_S and not final:
            return False
        self._told_at[kind] = now
        return True
