"""Usage: what sandboxes reserved and used, in the units that costs are computed from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.contract.base import Answer, HostId, SessionId, TenantId, Time
from shoal.contract.states import Substrate

SandboxCondition = Literal["running", "paused", "starting", "broken"]


class UsageRecord(Answer):
    """One sandbox in one interval. `(host, session, epoch, start)` names it: a repeat changes nothing."""

    tenant: TenantId
    run: str | None = None
    session: SessionId
    epoch: int
    host: HostId
    pool: str
    image_digest: str | None = None
    substrate: Substrate
    labels: dict[str, str] = Field(default_factory=dict)
    condition: SandboxCondition
    start: Time
    end: Time
    reserved_cpu_s: float = Field(ge=0)
    used_cpu_s: float = Field(ge=0)
    reserved_memory_mib_s: float = Field(ge=0)
    used_memory_mib_s: float = Field(ge=0)
    disk_mib_s: float = Field(ge=0)
    egress_bytes: int = Field(ge=0, default=0)
    actions: int = Field(ge=0, default=0)


class UsagePage(Answer):
    """Usage records by time."""

    records: list[UsageRecord]
    cursor: str | None = None
