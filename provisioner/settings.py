"""What can be set of the provisioner; read once, unknown keys refused."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shoal.contract.host import Capacity
from shoal.contract.states import Substrate


class PoolSettings(BaseSettings):
    """One pool of hosts of one shape.

    Attributes:
        name: How sessions ask for it.
        min_hosts, max_hosts: Bounds that scaling keeps.
        host_capacity: What one host lets sandboxes reserve, overcommit included: what the planner packs with until
            a host of the pool has told its own. None: as the pool's hosts last told; the very first time one host is
            started, to tell.
        substrates: What its hosts offer.
        idle_to_zero_s: Seconds without any demand until the pool goes down to `min_hosts`.
        scale_in_cooldown_s: Seconds a host must have been idle before it is taken away while others stay.
        scale_in_margin: Idle hosts are taken away only while the others keep room for so much more of what runs and
            waits, as a share of it: a ripple of demand then starts none again.
        drain_below: Busy hosts filled to no more than this share take no new sessions once the others have had room for
            theirs throughout a cool-down; their sessions end in their time, and they are taken back when they are
            needed. 0 leaves busy hosts alone: right where all sessions of a step end together.
        max_step: The most hosts started in one look of the reconciler; None starts all that are short at once.
        headroom_sandboxes, headroom_share: Room kept free for bursts, in sandboxes of the kind asked for most of late:
            so many, or that share of what runs and waits, whichever is more. None is kept while nothing runs or waits.
        warm_default: Warm sandboxes kept per pool and kind of sandbox that was asked for lately.
        warm_max: The most warm sandboxes of one kind that recent demand alone makes; prepares are not bound by it.
        warm_keep_s: Seconds after the last demand for a kind until its warm sandboxes go.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    name: str = "default"
    min_hosts: int = Field(default=0, ge=0)
    max_hosts: int = Field(default=1, ge=1)
    host_capacity: Capacity | None = None
    substrates: tuple[Substrate, ...] = (Substrate.CONTAINER,)
    idle_to_zero_s: float = Field(default=300.0, ge=0)
    scale_in_cooldown_s: float = Field(default=60.0, ge=0)
    scale_in_margin: float = Field(default=0.1, ge=0)
    drain_below: float = Field(default=0.0, ge=0, le=1)
    max_step: int | None = Field(default=None, ge=1)
    headroom_sandboxes: int = Field(default=0, ge=0)
    headroom_share: float = Field(default=0.0, ge=0)
    warm_default: int = Field(default=2, ge=0)
    warm_max: int = Field(default=16, ge=0)
    warm_keep_s: float = Field(default=900.0, ge=0)


class ProvisionerSettings(BaseSettings):
    """Policy of sessions and hosts, by code or the environment (`SHOAL_PROVISIONER_HEARTBEAT_S`).

    Attributes:
        pools: At least one; the first is where sessions go that name none.
        heartbeat_s: How often hosts report.
        lease_s: How long a host works on without an acknowledged heartbeat; then it freezes.
        lost_margin_s: How much later than that the control plane declares it lost. Must exceed `heartbeat_s`.
        reconcile_s: How often the reconciler looks without being woken.
        look_s: The longest time without a look where something outside wakes it, such as a schedule of 60 s: prepares
            start their hosts so much sooner. None is `reconcile_s`, and on Lambda 60.
        host_start_s: How long a started host may take to register; where its provider has a queue (AWS Batch), from
            when it runs.
        host_queue_s: How long a host may stand in its provider's queue until it is given up.
        start_wait_s: How long the first placement waits for a sandbox to run before it records `starting`.
        start_attempts: Sandbox starts that may fail before the session does.
        sample: How many hosts placement compares (2 to 4).
        placing_lease_s: How long a replica may take to place a session before others do it.
        keep_ended_s: How long an ended session stays readable.
        seq_gap: By how much seq jumps when a host died with an unknown number of steps, so that none is used again.
        signing_key_s: How long a signing key signs; it is accepted for as long again.
        history_limit: The most items of one list page.
    """

    model_config = SettingsConfigDict(env_prefix="SHOAL_PROVISIONER_", extra="forbid", frozen=True)

    pools: tuple[PoolSettings, ...] = (PoolSettings(),)
    heartbeat_s: float = Field(default=1.0, gt=0)
    lease_s: float = Field(default=30.0, gt=0)
    lost_margin_s: float = Field(default=10.0, gt=0)
    reconcile_s: float = Field(default=2.0, gt=0)
    look_s: float | None = Field(default=None, gt=0)
    host_start_s: float = Field(default=60.0, gt=0)
    host_queue_s: float = Field(default=3600.0, gt=0)
    start_wait_s: float = Field(default=2.0, ge=0)
    start_attempts: int = Field(default=3, ge=1)
    sample: int = Field(default=4, ge=1)
    placing_lease_s: float = Field(default=30.0, gt=0)
    keep_ended_s: float = Field(default=7 * 86_400, gt=0)
    seq_gap: int = Field(default=100_000, ge=1)
    signing_key_s: float = Field(default=86_400.0, gt=0)
    history_limit: int = Field(default=1000, ge=1, le=1000)

    def pool(self, name: str | None) -> PoolSettings | None:
        """The pool of that name, the first for None; None when there is none."""
        if name is None:
            return self.pools[0]
        return next((pool for pool in self.pools if pool.name == name), None)
