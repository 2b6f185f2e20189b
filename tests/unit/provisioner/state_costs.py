"""What the use cases ask of the store, in DynamoDB's request units, by family of items; and the page that tells it.

`python -m tests.unit.provisioner.state_costs` writes the tables of docs/dynamodb.md anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from costs.prices import prices
from provisioner import keys
from provisioner.auth import DEFAULT_TENANT
from provisioner.settings import ProvisionerSettings
from provisioner.store.fake import FakeStore
from provisioner.store.port import Key, Op, Page, Put, Stored
from provisioner.store.units import Consumed, MeteredStore
from shoal.contract.base import HostId, SessionId
from shoal.contract.host import Capacity
from shoal.contract.sessions import SessionCreate
from shoal.contract.snapshots import SnapshotCreate
from shoal.contract.states import Substrate
from shoal.contract.usage import UsageRecord
from tests.unit.provisioner.world import IMAGE, WHO, World, pool

PAGE = Path(__file__).parents[3] / "docs" / "dynamodb.md"
#: What the layout is made for.
CREATES_S = 5_000
ALIVE = 380_000
HOSTS = 1_000
USAGE_S = 60
#: What one partition takes a second.
WRITE_LIMIT, READ_LIMIT = 1_000, 3_000
SESSIONS = 200
ACTIONS = 20
LARGE = Capacity(cpu_millis=4_000_000, memory_mib=4_000_000, disk_mib=40_000_000, sandboxes=4000)


class Metered(FakeStore):
    """A fake store that counts what its calls would consume."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.meter = MeteredStore(FakeStore(**about))

    async def get(self, key: Key) -> Stored | None:
        return await self.meter.get(key)

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        return await self.meter.get_many(keys)

    async def query(self, pk: str, **how: Any) -> Page:
        return await self.meter.query(pk, **how)

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        await self.meter.transact(ops, token=token)

    def since(self) -> Consumed:
        """What was consumed since the last question."""
        consumed, self.meter.consumed = self.meter.consumed, Consumed()
        return consumed


def family(pk: str) -> str:
    """The family of a partition: its name up to the first `#`."""
    return pk.partition("#")[0]


def by_family(partitions: Mapping[str, float], per: int = 1) -> dict[str, float]:
    """Units by family, for each of so many."""
    found: Counter[str] = Counter()
    for pk, units in partitions.items():
        found[family(pk)] += units  # type: ignore[assignment]
    return {name: round(units / per, 3) for name, units in sorted(found.items())}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Units by family: of a session from its create to its end, of a session made in a group of two and one of 16, of a
    snapshot, of a usage record, and of a host's heartbeat while nothing changes.

    Attributes:
        host_second: Units of a host with `sandboxes` sandboxes, a second, all told.
    """

    session_writes: dict[str, float]
    session_reads: dict[str, float]
    action_writes: float
    pair_writes: dict[str, float]
    group_writes: dict[str, float]
    snapshot_writes: dict[str, float]
    usage_writes: dict[str, float]
    sandboxes: int
    host_second_writes: float
    host_second_reads: float
    growth: float


async def large_tenant(world: World) -> None:
    """A tenant that has been large: its quota is in all its shards, its lists are over all of theirs."""
    each = {"room_sessions": 2_000, "room_cpu_millis": 4_000_000, "room_memory_mib": 4_000_000}
    everything = {name.removeprefix("room_"): amount * keys.QUOTA_SHARDS for name, amount in each.items()}
    book = {"limits": "-/-/-", "peak": 2_000 * keys.QUOTA_SHARDS, "moves": 1, **everything}
    ops: list[Op] = [Put(key=keys.book(DEFAULT_TENANT), item=book)]
    ops += [Put(key=keys.quota(DEFAULT_TENANT, shard), item=each) for shard in range(keys.QUOTA_SHARDS)]
    for start in range(0, len(ops), 90):
        await world.store.transact(ops[start : start + 90])


async def opened(*, large: bool) -> tuple[World, Metered]:
    shape = pool(host_capacity=LARGE, max_hosts=3)
    world = World(None, ProvisionerSettings(pools=(shape,)))
    store = Metered(clock=world.clock.now)
    world = World(store, ProvisionerSettings(pools=(shape,)))
    await world.open()
    if large:
        await large_tenant(world)
    for _ in range(2):
        await world.host(capacity=LARGE)
    await world.services.context.fleet.views()
    return world, store


def body(number: int, **more: Any) -> SessionCreate:
    """A session as a training run asks for it."""
    return SessionCreate(
        image=IMAGE,
        run="grpo-17",
        labels={"task": f"swe-{number % 50}", "sample": str(number % 16)},
        env={"PYTHONUNBUFFERED": "1"},
        wait_s=25,
        **more,
    )


async def lives(world: World, first: int, count: int) -> None:
    """Sessions made, used and ended one after the other."""
    sessions = world.services.sessions
    for number in range(first, first + count):
        asked = body(number, name=f"task-{number}")
        created = await world.drive(sessions.create(WHO, asked, idempotency_key=f"key-{number}"))
        place = await sessions.locate(WHO, created.session.id)
        for _ in range(ACTIONS):
            # An action carries its route token: the store is not asked.
            sessions.token(WHO, place)
        await world.drive(sessions.delete(WHO, created.session.id))
        await world.drive(world.services.context.background.idle())


async def measure() -> Measured:
    """Run it all once."""
    world, store = await opened(large=True)
    sessions = world.services.sessions
    await lives(world, 0, 5)
    store.since()
    await lives(world, 5, SESSIONS)
    one = store.since()

    created = await world.drive(sessions.create(WHO, body(0)))
    place = await sessions.locate(WHO, created.session.id)
    store.since()
    for _ in range(ACTIONS):
        sessions.token(WHO, place)
    acted = store.since()
    groups: dict[int, dict[str, float]] = {}
    for size in (2, 16):
        for number in range(10):
            await world.drive(
                sessions.create_many(WHO, body(number, count=size), idempotency_key=f"g{size}-{number}")
            )
        groups[size] = by_family(store.since().writes_by_partition, 10 * size)
    snapshot = SnapshotCreate(wait_s=0)
    await world.drive(world.services.snapshots.create(WHO, created.session.id, snapshot))
    await world.drive(world.services.context.background.idle())
    snapshots = by_family(store.since().writes_by_partition)

    records = [
        UsageRecord(
            tenant=DEFAULT_TENANT,
            run="grpo-17",
            session=SessionId(keys.derived_id("ses", str(number))),
            epoch=1,
            host=HostId("hst_one0001"),
            start=world.clock.now() + timedelta(seconds=number / 100),
            end=world.clock.now() + timedelta(seconds=number / 100 + USAGE_S),
            pool="default",
            image_digest="sha256:" + "0" * 64,
            substrate=Substrate.CONTAINER,
            labels={"task": "swe-1", "sample": "3"},
            condition="running",
            reserved_cpu_s=60.0,
            used_cpu_s=3.25,
            reserved_memory_mib_s=61_440.0,
            used_memory_mib_s=12_345.5,
            disk_mib_s=245_760.0,
            actions=4,
        )
        for number in range(90)
    ]
    await world.services.usage.store(HostId("hst_one0001"), records)
    usage = by_family(store.since().writes_by_partition, 90)

    sandboxes = 380
    host = next(iter(world.agents.hosts.values()))
    there = len(host.live())
    other = [each for each in world.agents.hosts.values() if each is not host]
    for each in other:
        each.reachable = False
    for start in range(0, sandboxes - there, 10):
        many = min(10, sandboxes - there - start)
        await world.drive(
            sessions.create_many(WHO, body(start, count=max(2, many)), idempotency_key=f"h{start}")
        )
    sandboxes = len(host.live())
    await world.run(20.0)
    store.since()
    beats = 60
    for _ in range(beats):
        await world.clock.advance(world.settings.heartbeat_s)
        await world.beat(host.id)
    resting = store.since()
    seconds = beats * world.settings.heartbeat_s

    small, fresh = await opened(large=False)
    fresh.since()
    for number in range(200):
        await small.drive(small.services.sessions.create(WHO, body(number)))
    growing = fresh.since().write / 200
    world2, steady = await opened(large=True)
    await world2.drive(world2.services.sessions.create(WHO, body(0)))
    steady.since()
    for number in range(200):
        await world2.drive(world2.services.sessions.create(WHO, body(number)))
    return Measured(
        session_writes=by_family(one.writes_by_partition, SESSIONS),
        session_reads=by_family(one.reads_by_partition, SESSIONS),
        action_writes=acted.write + acted.read,
        pair_writes=groups[2],
        group_writes=groups[16],
        snapshot_writes=snapshots,
        usage_writes=usage,
        sandboxes=sandboxes,
        host_second_writes=round(resting.write / seconds, 1),
        host_second_reads=round(resting.read / seconds, 1),
        growth=round(growing - steady.since().write / 200, 1),
    )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a family is spread: over so many partitions, by what; `per_item`: each item has one of its own."""

    by: str
    partitions: int
    per_item: bool = False


#: Every family that a create, an end, a snapshot or a heartbeat writes.
SPREADS: dict[str, Spread] = {
    "SES": Spread(by="session", partitions=0, per_item=True),
    "LIVE": Spread(by="session", partitions=keys.LIST_SHARDS),
    "RUN": Spread(by="session", partitions=keys.LIST_SHARDS),
    "ENDED": Spread(by="session", partitions=keys.LIST_SHARDS),
    "QUEUE": Spread(by="session", partitions=keys.LIST_SHARDS),
    "QUOTA": Spread(by="session", partitions=keys.QUOTA_SHARDS),
    "NAME": Spread(by="name", partitions=keys.NAME_SHARDS),
    "ON": Spread(by="host", partitions=HOSTS),
    "GROUPS": Spread(by="group", partitions=keys.GROUP_SHARDS),
    "SNP": Spread(by="snapshot", partitions=0, per_item=True),
    "SESSNP": Spread(by="session", partitions=0, per_item=True),
    "SNAPSHOTS": Spread(by="snapshot", partitions=keys.LIST_SHARDS),
    "SNAPSHOTS-OPEN": Spread(by="host", partitions=keys.SNAPSHOT_SHARDS),
    "USAGE": Spread(by="host", partitions=keys.USAGE_SHARDS),
    "USAGE-DAYS": Spread(by="tenant", partitions=1),
}


def fullest(kind: str, count: int, shards: int) -> int:
    """How many of so many ids are in the shard that has the most of them."""
    return max(Counter(keys.shard_of(keys.derived_id(kind, str(n)), shards) for n in range(count)).values())


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A family at `CREATES_S`: units of one thing, how many things a second, over how many partitions, and the units a
    second of the partition that gets the most."""

    family: str
    units: float
    per_s: float
    what: str
    partitions: str
    worst: float


def heats(found: Measured) -> list[Heat]:
    """Every family's heat, all of it from one tenant in one run of one pool, with as many ends as creates."""
    rows: list[Heat] = []

    def row(name: str, units: float, per_s: float, what: str) -> None:
        spread = SPREADS[name]
        if spread.per_item:
            rows.append(
                Heat(family=name, units=units, per_s=per_s, what=what, partitions="one each", worst=units)
            )
            return
        if spread.by == "host" and spread.partitions != HOSTS:
            share = fullest("hst", HOSTS, spread.partitions) / HOSTS
        elif spread.partitions in (1, HOSTS):
            share = 1 / spread.partitions
        else:
            share = fullest("ses", CREATES_S, spread.partitions) / CREATES_S
        rows.append(
            Heat(
                family=name,
                units=units,
                per_s=per_s,
                what=what,
                partitions=str(spread.partitions),
                worst=units * per_s * share,
            )
        )

    for name, units in found.session_writes.items():
        row(name, units, CREATES_S, "session")
    row("GROUPS", 2 * found.pair_writes["GROUPS"], CREATES_S / 2, "group of two")
    for name, units in found.snapshot_writes.items():
        row(name, units, CREATES_S, "snapshot")
    for name, units in found.usage_writes.items():
        # A host's replica notes a day once, then only records come.
        row(name, units if name == "USAGE" else 0.0, ALIVE / USAGE_S, "usage record")
    return rows


def tables(found: Measured) -> str:
    """The generated part of the page."""
    lines = [
        f"| family | write units | of a | a second | partitions | the fullest, units/s (of {WRITE_LIMIT:,}) |",
        "|---|---|---|---|---|---|",
    ]
    for heat in heats(found):
        lines.append(
            f"| `{heat.family}` | {heat.units:.1f} | {heat.what} | {heat.per_s:,.0f} | {heat.partitions} "
            f"| {heat.worst:,.0f} |"
        )
    write, read = prices().prices["dynamodb.write"], prices().prices["dynamodb.read"]
    writes, reads = sum(found.session_writes.values()), sum(found.session_reads.values())
    usd = write.of(Decimal(round(writes * 1_000_000))) + read.of(Decimal(round(reads * 1_000_000)))
    grouped = sum(found.group_writes.values())
    records = sum(found.usage_writes.values())
    lines += [
        "",
        "| what | write units | read units | USD |",
        "|---|---|---|---|",
        f"| a million sessions: create, place, {ACTIONS} actions, delete, end | {writes:.1f} M | {reads:.1f} M "
        f"| {usd:.2f} |",
        f"| a million actions | {found.action_writes:.0f} | {found.action_writes:.0f} | 0.00 |",
        f"| a million sessions in groups of 16, until they run | {grouped:.1f} M | | "
        f"{write.of(Decimal(round(grouped * 1_000_000))):.2f} |",
        f"| the first 200 sessions of a tenant, more each | {found.growth:.1f} | | |",
        f"| a million usage records (one a minute of a sandbox) | {records:.1f} M | | "
        f"{write.of(Decimal(round(records * 1_000_000))):.2f} |",
        f"| an hour of a host with {found.sandboxes} sandboxes at rest, a heartbeat a second "
        f"| {found.host_second_writes * 3600:,.0f} | {found.host_second_reads * 3600:,.0f} | "
        f"{_hour(found, write, read):.4f} |",
        "",
        f"Prices: {write.usd} USD a million write units, {read.usd} USD a million read units (on demand, us-east-1, "
        f"`costs/prices.toml`, read {write.read}).",
    ]
    return "\n".join(lines) + "\n"


def _hour(found: Measured, write: Any, read: Any) -> Decimal:
    writes = Decimal(round(found.host_second_writes * 3600))
    reads = Decimal(round(found.host_second_reads * 3600))
    return Decimal(write.of(writes)) + Decimal(read.of(reads))


BEGIN, END = "<!-- measured:begin -->\n", "<!-- measured:end -->\n"


def generated(page: str) -> str:
    """What the page says was measured."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Write the tables anew."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables(asyncio.run(measure())) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
