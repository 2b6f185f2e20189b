"""A tenant's quota as items: a book, and shards that were given parts of it.

A shard holds what sessions took of it (`sessions`, `cpu_millis`, `memory_mib`) and what may still be taken
(`room_sessions`, ...); the book how much was given to all of them. Every transaction keeps

    given by the book = held + room, over all shards,    and    given <= limit, room >= 0

so no create needs to look further than its shard, and what is held is never more than the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from provisioner import keys
from provisioner.model import Tenant
from provisioner.placement import Room
from provisioner.store.port import Add, AttributeIs, Stored, Update
from shoal.contract.base import TenantId
from shoal.contract.sessions import Resources

DIMENSIONS = ("sessions", "cpu_millis", "memory_mib")

#: So much of each dimension.
Amounts = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A tenant's limits by dimension; a dimension that is not there has none."""

    of: Amounts

    @classmethod
    def read(cls, tenant: Tenant | None) -> Limits:
        """Those of a tenant's record; none without a record."""
        if tenant is None:
            return cls(of={})
        all_of_them = {
            "sessions": tenant.max_sessions,
            "cpu_millis": tenant.max_cpu_millis,
            "memory_mib": tenant.max_memory_mib,
        }
        return cls(of={name: limit for name, limit in all_of_them.items() if limit is not None})

    @property
    def text(self) -> str:
        """The limits in a line: what the book was kept under."""
        return "/".join(str(self.of.get(name, "-")) for name in DIMENSIONS)

    def hold(self, amounts: Amounts) -> bool:
        """Whether so much is within them."""
        return all(amounts[name] <= limit for name, limit in self.of.items())


def needed(resources: Iterable[Resources]) -> dict[str, int]:
    """What sandboxes of these resources take."""
    total = Room()
    for each in resources:
        total = total + Room.for_one(each)
    return {"sessions": total.sandboxes, "cpu_millis": total.cpu_millis, "memory_mib": total.memory_mib}


def held(shard: Stored | None) -> dict[str, int]:
    """What sessions took of a shard, or (of the book) what was given to all shards."""
    return {name: int(shard.item.get(name) or 0) if shard else 0 for name in DIMENSIONS}


def room(shard: Stored | None) -> dict[str, int]:
    """What may still be taken of a shard."""
    return {name: int(shard.item.get(f"room_{name}") or 0) if shard else 0 for name in DIMENSIONS}


def closed(shard: Stored | None) -> bool:
    """Whether nothing may be taken of a shard, since its room is being counted anew."""
    return shard is not None and shard.item.get("closed") is True


def take(tenant: TenantId, shard: int, amounts: Amounts) -> Update:
    """Take so much; fails where the shard has not so much, or is closed."""
    add = {name: Add(delta=amounts[name]) for name in DIMENSIONS}
    add |= {f"room_{name}": Add(delta=-amounts[name], minimum=0) for name in DIMENSIONS}
    return Update(
        key=keys.quota(tenant, shard), add=add, conditions=(AttributeIs(name="closed", value=None),)
    )


def give_back(tenant: TenantId, shard: int, amounts: Amounts) -> Update:
    """Give back what was taken of this shard."""
    add = {name: Add(delta=-amounts[name]) for name in DIMENSIONS}
    add |= {f"room_{name}": Add(delta=amounts[name]) for name in DIMENSIONS}
    return Update(key=keys.quota(tenant, shard), add=add)
