"""The hosts there are: a list of short entries; each record has a partition of its own, since heartbeats write it."""

from __future__ import annotations

from provisioner import keys
from provisioner.model import Host, HostOrders, dump, load
from provisioner.store.port import Absent, Delete, Op, Put
from provisioner.store.steady import SteadyStore
from shoal.contract.base import HostId


def enlist(host: Host) -> list[Op]:
    """Write a new host, with its entry."""
    return [
        Put(key=keys.host(host.id), item=dump(host), conditions=(Absent(),)),
        Put(key=keys.host_entry(host.id), item={"pool": host.pool}),
    ]


def strike(id: HostId) -> list[Op]:
    """Drop a host, its orders and its entry."""
    return [
        Delete(key=keys.host(id)),
        Delete(key=keys.orders(id)),
        Delete(key=keys.host_entry(id)),
    ]


async def listed(store: SteadyStore, pool: str | None = None) -> list[HostId]:
    """The ids of all hosts, or of a pool's, in order."""
    entries = await store.query_all(keys.HOSTS)
    return [HostId(entry.key.sk) for entry in entries if pool is None or entry.item["pool"] == pool]


async def read(store: SteadyStore, ids: list[HostId]) -> list[Host]:
    """The records of hosts; those that are gone are left out."""
    found = await store.get_many([keys.host(id) for id in ids])
    return [load(Host, stored.item) for stored in found if stored is not None]


async def hosts(store: SteadyStore, pool: str | None = None) -> list[Host]:
    """All hosts, or a pool's."""
    return await read(store, await listed(store, pool))


async def orders(store: SteadyStore, ids: list[HostId]) -> dict[HostId, HostOrders]:
    """What these hosts are told to do, as far as they are told anything."""
    found = await store.get_many([keys.orders(id) for id in ids])
    return {id: load(HostOrders, stored.item) for id, stored in zip(ids, found, strict=True) if stored}
