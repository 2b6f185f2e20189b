"""Pools: hosts of one shape, and capacity made ready before a run starts."""

from __future__ import annotations

from pydantic import Field, model_validator

from shoal.contract.base import Answer, Name, SnapshotId, Time, WaitSeconds, Wire
from shoal.contract.sessions import ResourcesAsked
from shoal.contract.states import Substrate


class Prepare(Wire):
    """`POST /v1/pools/{pool}/prepare`: have `sandboxes` warm ones ready. `by`: when they are needed; None is now.
    `ttl_s`: how long they are kept for it when nobody claims them."""

    sandboxes: int = Field(ge=1, le=100_000)
    image: str | None = None
    snapshot: SnapshotId | None = None
    resources: ResourcesAsked = Field(default_factory=ResourcesAsked)
    substrate: Substrate = Substrate.CONTAINER
    run: Name | None = None
    by: Time | None = None
    ttl_s: int = Field(default=3600, ge=10, le=604_800)
    wait_s: WaitSeconds = 0.0

    @model_validator(mode="after")
    def _one_source(self) -> Prepare:
        if (self.image is None) == (self.snapshot is None):
            raise ValueError("give exactly one of `image` and `snapshot`")
        return self


class Prepared(Answer):
    """How far a prepare is; `waiting_for` says what is missing."""

    id: str
    pool: str
    sandboxes: int
    ready: int
    hosts: int
    image: str | None = None
    snapshot: SnapshotId | None = None
    substrate: Substrate
    run: str | None = None
    by: Time | None = None
    expires_at: Time
    done: bool
    waiting_for: str | None = None


class PreparedPage(Answer):
    """The prepares of a pool that have not expired."""

    prepared: list[Prepared]
    cursor: str | None = None


class Pool(Answer):
    """A pool now. `busy`: sandboxes of sessions; `warm`: ready ones; `pending`: sessions that wait;
    `not_scaling`: why no host is being added although somebody waits."""

    name: str
    min_hosts: int
    max_hosts: int
    hosts: dict[str, int] = Field(default_factory=dict)
    substrates: list[Substrate] = Field(default_factory=list)
    busy: int
    warm: int
    pending: int
    not_scaling: str | None = None


class PoolPage(Answer):
    """Pools by name."""

    pools: list[Pool]
    cursor: str | None = None
