"""What an agent is told when it starts: by flags (`--control-url`) or the environment (`SHOAL_AGENT_CONTROL_URL`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class AgentSettings(BaseSettings):
    """Settings of one host's agent, read once.

    Attributes:
        control_url: Where the control plane listens, such as `http://127.0.0.1:8700`.
        join_token: The one-time token of the capacity driver; used at the first registration only.
        home: This host's directory: journals, runtime records, disks. One agent at a time per home.
        listen: `address:port`; port 0 takes any free one.
        advertise: The address told to the control plane, `http://address:port`; None is where it listens.
        layers_dir: Unpacked layers; None is `home/layers`. Agents of one machine may share one.
        guest_dir: Where the guest's runtime is built; None is `home/guest`. May be shared, too.
        cgroup_name: The agent's cgroup; None derives one from the home's path. Unique on the machine.
        id_base: First host id of the sandboxes' ranges; None claims a stretch that no other home of the machine has.
        holder: Path of the holder's socket; None when no holder keeps descriptors: nothing survives then.
        max_sandboxes: The most sandboxes at once, warm ones included.
        cpu_millis: Cores in thousandths before overcommit; None is all there are.
        memory_mib: Memory before overcommit, MiB; None is all but the reserve.
        disk_mib: Disk before overcommit, MiB; None is nine tenths of what is free at the start.
        cpu_overcommit, memory_overcommit, disk_overcommit: How often a unit may be reserved. Sandboxes rarely use
            what they ask for; the hard limits of each hold whatever this says.
        memory_reserve_mib: Kept for the agent and the system.
        disk_floor_mib: With less free disk than this new sandboxes are refused, whatever is reserved.
        start_concurrency: Cold starts at once, for sessions.
        warm_concurrency: Cold starts at once, to refill the warm pool.
        orphan_s: Seconds without any answer of the control plane, or without ever having registered, after which the
            agent ends its sandboxes and itself, so that no machine runs for nobody; None is never. Longer than any
            outage of the control plane that sandboxes, frozen by then, are to survive.
        usage_interval_s: How long one usage record is at the most.
        flush_grace_s: How long a SIGTERM waits for the journals to reach the blob store.
    """

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_AGENT_", extra="forbid", frozen=True, cli_kebab_case=True, cli_avoid_json=True
    )

    control_url: str
    join_token: SecretStr
    home: Path
    listen: str = Field(default="127.0.0.1:0", pattern=r"^.+:\d{1,5}$")
    advertise: str | None = None
    layers_dir: Path | None = None
    guest_dir: Path | None = None
    cgroup_name: str | None = None
    id_base: int | None = Field(default=None, ge=65_536)
    holder: Path | None = None
    max_sandboxes: int = Field(default=256, ge=1, le=960)
    cpu_millis: int | None = Field(default=None, ge=100)
    memory_mib: int | None = Field(default=None, ge=128)
    disk_mib: int | None = Field(default=None, ge=256)
    cpu_overcommit: float = Field(default=8.0, ge=1)
    memory_overcommit: float = Field(default=2.0, ge=1)
    disk_overcommit: float = Field(default=8.0, ge=1)
    memory_reserve_mib: int = Field(default=1024, ge=0)
    disk_floor_mib: int = Field(default=2048, ge=0)
    start_concurrency: int = Field(default=4, ge=1)
    warm_concurrency: int = Field(default=1, ge=1)
    orphan_s: float | None = Field(default=None, gt=0)
    usage_interval_s: float = Field(default=60.0, gt=0)
    flush_grace_s: float = Field(default=20.0, ge=0)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen at."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


def read_settings(argv: Sequence[str]) -> AgentSettings:
    """The settings that flags and environment give; flags win. Exits with a message when they do not fit."""
    return AgentSettings(_cli_parse_args=list(argv))
