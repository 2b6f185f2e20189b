"""How often sandboxes of each kind are asked for: gathered in memory, written down in one go now and then.

It only steers how many warm ones are kept; what a crash loses of it costs some cold starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from provisioner import keys
from provisioner.clock import Clock
from provisioner.model import Demand, Source, dump, load
from provisioner.placement import WarmName, warm_key
from provisioner.store.port import Add, Delete, Update
from provisioner.store.steady import SteadyStore
from shoal.contract.sessions import Resources
from shoal.contract.states import Substrate

#: Seconds per bucket of the counts, and how many buckets are looked at.
BUCKET_S = 10
BUCKETS = 30


@dataclass
class _Pending:
    demand: Demand
    count: int


def kind(name: WarmName) -> str:
    """A kind of sandbox as text."""
    digest, substrate, disk = name
    return f"{digest}#{substrate.value}#{disk}"


class DemandLog:
    """Counts asks, and flushes them to the store."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: dict[tuple[str, WarmName], _Pending] = {}

    @property
    def pending(self) -> bool:
        """Whether there is something to write down."""
        return bool(self._pending)

    def note(
        self, pool: str, source: Source, substrate: Substrate, resources: Resources, count: int = 1
    ) -> None:
        """So many sandboxes of this kind were asked for."""
        key = warm_key(source.digest, substrate, resources.disk_mib)
        name = (pool, (key.digest, key.substrate, key.disk_mib))
        found = self._pending.get(name)
        if found is None:
            now = self._clock.now()
            demand = Demand(pool=pool, key=key, source=source, resources=resources, last_at=now)
            found = self._pending[name] = _Pending(demand, 0)
        found.count += count

    async def flush(self, store: SteadyStore) -> None:
        """Write down what was counted."""
        pending, self._pending = self._pending, {}
        now = self._clock.now()
        bucket = f"n{int(now.timestamp()) // BUCKET_S}"
        for (pool, name), each in pending.items():
            item = dump(each.demand)
            item.pop("counts")
            item["last_at"] = now.isoformat()
            await store.transact(
                [Update(key=keys.demand(pool, kind(name)), set=item, add={bucket: Add(delta=each.count)})]
            )


async def read_demand(store: SteadyStore, clock: Clock, pool: str, keep_s: float) -> list[Demand]:
    """The kinds asked for in the last `keep_s` seconds. Older ones, and old counts, are cleaned away on the way."""
    now = clock.now()
    oldest = int(now.timestamp()) // BUCKET_S - BUCKETS
    found: list[Demand] = []
    for stored in await store.query_all(f"DEMAND#{pool}"):
        buckets = {
            name: value for name, value in stored.item.items() if name[0] == "n" and name[1:].isdigit()
        }
        recent = {name[1:]: count for name, count in buckets.items() if int(name[1:]) > oldest}
        plain = {name: value for name, value in stored.item.items() if name not in buckets}
        demand = load(Demand, {**plain, "counts": recent})
        age = (now - demand.last_at).total_seconds()
        if age > keep_s and age > BUCKET_S * BUCKETS:
            await store.transact([Delete(key=stored.key)])
            continue
        stale = tuple(name for name in buckets if name[1:] not in recent)
        if len(stale) > BUCKETS:
            await store.transact([Update(key=stored.key, remove=stale)])
        found.append(demand)
    return found
