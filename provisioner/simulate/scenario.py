"""What is simulated: scenarios as TOML files, unknown keys refused, and the arrivals they make."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from provisioner.placement import Room, disk_class
from provisioner.settings import PoolSettings

SCENARIOS = Path(__file__).parent / "scenarios"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoadModel(_Part):
    """Sessions that are asked for.

    Attributes:
        at_s: When the first is asked for; `within_s` later the last, evenly drawn in between.
        sessions: How many at a time.
        every_s, times: Repeats it.
        hold_s: How long a session lives from when it runs: drawn evenly between the two.
        image: Names the kind; sessions of one image share warm sandboxes and layers.
        cpu_millis, memory_mib, disk_mib: What one reserves.
    """

    at_s: float = Field(default=0.0, ge=0)
    within_s: float = Field(default=1.0, ge=0)
    sessions: int = Field(ge=1)
    every_s: float = Field(default=600.0, gt=0)
    times: int = Field(default=1, ge=1)
    hold_s: tuple[float, float] = (300.0, 300.0)
    image: str = "code"
    cpu_millis: int = Field(default=100, ge=1)
    memory_mib: int = Field(default=512, ge=1)
    disk_mib: int = Field(default=1024, ge=1)

    @property
    def room(self) -> Room:
        """What one holds on its host."""
        return Room(
            cpu_millis=self.cpu_millis,
            memory_mib=self.memory_mib,
            disk_mib=disk_class(self.disk_mib),
            sandboxes=1,
        )


class PrepareModel(_Part):
    """Sandboxes asked for ahead: at `at_s`, for `by_s`, kept `ttl_s` from then, as load number `load` uses."""

    at_s: float = Field(ge=0)
    by_s: float | None = None
    sandboxes: int = Field(ge=1)
    ttl_s: float = Field(default=600.0, gt=0)
    load: int = 0


class HostModel(_Part):
    """How hosts come up. Sources in docs/simulate.md.

    Attributes:
        launch_s: Seconds from an instance's launch to a booted system: the median; `sigma` spreads it (log-normal).
        join_s: From there until ECS knows the instance.
        task_s: From StartTask to the agent's registration, its image being on the machine.
        slow_share, slow_times: So many launches take so many times as long.
        fail_share: So many never join.
        billed_after_s: Seconds from a termination's call to the end of billing.
    """

    launch_s: float = 26.0
    sigma: float = 0.12
    join_s: float = 6.0
    task_s: float = 5.0
    slow_share: float = Field(default=0.0, ge=0, le=1)
    slow_times: float = 3.0
    fail_share: float = Field(default=0.0, ge=0, le=1)
    billed_after_s: float = 1.0


class AgentModel(_Part):
    """What a host's agent does.

    Attributes:
        rtt_s: A round trip between a replica and a host.
        write_s: A write of the store.
        cold_s, warm_s: A sandbox from nothing, and from a warm one, while others start.
        at_once: Sandboxes that one host starts at a time: a start is some 45 ms of one core (docs/performance.md).
        refill_per_s: Warm sandboxes that one host makes.
        heartbeat_s: How often it reports; `late_s`: by how much a report's arrival is late at the most.
    """

    rtt_s: float = 0.004
    write_s: float = 0.006
    cold_s: float = 0.15
    warm_s: float = 0.02
    at_once: int = 32
    refill_per_s: float = 10.0
    heartbeat_s: float = 1.0
    late_s: float = 0.0


class SpotModel(_Part):
    """Spot instances taken back: at `at_s`, so large a share of those there are, without notice being of any use."""

    at_s: float
    share: float = Field(gt=0, le=1)


class Scenario(_Part):
    """One run.

    Attributes:
        name, about: For the report.
        seed: Everything that is drawn comes from it.
        duration_s: The end of the run.
        replicas: Processes of the control plane, each with its own view and its own memory.
        refresh_s: How old a replica's view of hosts whose heartbeats others took may be.
        pool: As in `PoolSettings`.
        reconcile_s, host_start_s: As in `ProvisionerSettings`.
        spread_at_s: Moments at which the spread of sessions over hosts is taken.
        first_wave_s: Sessions asked for before this moment meet a pool without hosts; the queue times of the others are
            told apart.
    """

    name: str
    about: str = ""
    seed: int = 1
    duration_s: float
    replicas: int = Field(default=4, ge=1)
    refresh_s: float = Field(default=0.5, gt=0)
    pool: PoolSettings
    reconcile_s: float = 2.0
    host_start_s: float = 300.0
    load: tuple[LoadModel, ...]
    prepare: tuple[PrepareModel, ...] = ()
    hosts: HostModel = HostModel()
    agent: AgentModel = AgentModel()
    spot: tuple[SpotModel, ...] = ()
    spread_at_s: tuple[float, ...] = ()
    first_wave_s: float = 0.0

    @model_validator(mode="after")
    def _shape_known(self) -> Scenario:
        if self.pool.host_capacity is None:
            raise ValueError("a scenario's pool needs host_capacity: it is what its hosts have")
        return self


@dataclass(frozen=True, slots=True)
class Arrival:
    """A session that is asked for. `load` is its place in the scenario."""

    at_s: float
    hold_s: float
    load: int


def arrivals(scenario: Scenario) -> list[Arrival]:
    """All of them, in time's order; the same for the same seed."""
    chance = random.Random(f"{scenario.seed} arrivals")

    def drawn() -> Iterator[Arrival]:
        for number, load in enumerate(scenario.load):
            for time in range(load.times):
                start_s = load.at_s + time * load.every_s
                for _ in range(load.sessions):
                    yield Arrival(
                        at_s=start_s + chance.uniform(0.0, load.within_s),
                        hold_s=chance.uniform(*load.hold_s),
                        load=number,
                    )

    return sorted(drawn(), key=lambda each: each.at_s)


def names() -> list[str]:
    """The scenarios that come with it."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def read(name: str) -> Scenario:
    """A scenario by name, or from a file of that path.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is not TOML, or says what no scenario says.
    """
    path = SCENARIOS / f"{name}.toml"
    if not path.exists():
        path = Path(name)
    told = tomllib.loads(path.read_text(encoding="utf-8"))
    return Scenario.model_validate({"name": path.stem, **told})
