"""Under which keys records are. One table; an item that is listed is written in the same transaction as the thing."""

from __future__ import annotations

import hashlib
from datetime import datetime

from provisioner.store.port import Key
from shoal.contract.base import HostId, SessionId, SnapshotId, TenantId

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"

HOSTS = "HOSTS"
POOLS = "POOLS"
TENANTS = "TENANTS"
SIGNING = "SIGNING"
IMAGES_OPEN = "IMAGES-OPEN"
MAIN = "-"

# How many partitions a family of items is spread over. A partition takes 1,000 write units a second, and a
# transaction's write of up to 1 KB costs 2 (`docs/dynamodb.md`). All for 5,000 creates and as many ends a second:

#: Lists of sessions and the queue: an entry is written and taken away, so 5,000 x (2 + 2) = 20,000 units/s;
#: over 32 partitions 625 each.
LIST_SHARDS = 32
#: A tenant's quota: two updates a session, so 20,000 units/s, which 32 partitions would take. But all creates of a
#: shard write one item, and transactions at one item refuse each other (`Conflict`): over 256 an item sees 39 a second.
QUOTA_SHARDS = 256
#: Names in a run: written and taken away once a session, and only ever looked up one by one: 20,000 / 64 = 313 each.
NAME_SHARDS = 64
#: Notes of groups: at the worst every group has two sessions and its note 2 KB, so 2,500 x (4 + 4) = 20,000 units/s.
#: Only the reconciler reads them all, every few seconds, as it does with the snapshots that are being made.
GROUP_SHARDS = 32
SNAPSHOT_SHARDS = 32
#: Usage: 380,000 sandboxes, a record each a minute, 2 units: 12,700 units/s. By host, so that a day of a small tenant
#: is in few places; of 1,000 hosts at most about 50 are on one of 32 partitions, so 635 units/s there.
USAGE_SHARDS = 32
#: Written to wake a reconciler in another process: the stream's filter is `dynamodb.Keys.pk.S = ["WAKE"]`. One item:
#: a replica writes it once a second at most, so a thousand of them ask for 2,000 units/s of a partition that takes
#: 1,000, in transactions that refuse each other. Each is tried once (`provisioner.wakes`): what is refused has
#: another's wake in its place, and nothing else is in this partition.
WAKE = Key(pk="WAKE", sk=MAIN)
#: Whose turn it is to reconcile, and until when.
LEASE = Key(pk="LEASE", sk="reconciler")

#: The deployment's secret behind join tokens.
JOIN_SECRET = Key(pk="JOIN", sk=MAIN)


def moment(when: datetime) -> str:
    """A time that sorts as text: microseconds in a fixed width."""
    return f"{int(when.timestamp() * 1_000_000):017d}"


def derived_id(prefix: str, *parts: str) -> str:
    """An id that is the same for the same parts: how a repeat finds what it made. It looks like any other id."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    bits = int.from_bytes(digest[:13], "big") >> 4
    return prefix + "_" + "".join(_ALPHABET[(bits >> shift) & 31] for shift in range(95, -5, -5))


def shard_of(id: str, shards: int) -> int:
    """Which of so many shards an id belongs to: the same everywhere and for good, and even over ids of any kind."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=4).digest(), "big") % shards


def session(id: SessionId) -> Key:
    """A session."""
    return Key(pk=f"SES#{id}", sk=MAIN)


def event(id: SessionId, slot: str) -> Key:
    """An event of a session."""
    return Key(pk=f"SES#{id}", sk=f"EV#{slot}")


def _shard(family: str, shard: int) -> str:
    """A shard's partition: two digits at the end, so that no other family's name can be the same."""
    return f"{family}#{shard:02x}"


def _entry(family: str, shards: int, created_at: datetime, id: str) -> Key:
    """An entry of a list that is spread over so many shards, by age in each."""
    return Key(pk=_shard(family, shard_of(id, shards)), sk=f"{moment(created_at)}#{id}")


def partitions(family: str, shards: int) -> list[str]:
    """The partitions of a family that is spread over so many shards."""
    return [_shard(family, shard) for shard in range(shards)]


def live_list(tenant: TenantId) -> str:
    """The family of a tenant's live sessions."""
    return f"LIVE#{tenant}"


def live(tenant: TenantId, created_at: datetime, id: SessionId, shards: int = 1) -> Key:
    """A live session in its tenant's list, by age. `shards`: over how many the list was spread when it was made."""
    return _entry(live_list(tenant), shards, created_at, id)


def run_list(tenant: TenantId, run: str) -> str:
    """The family of a run's live sessions."""
    return f"RUN#{tenant}#{run}"


def run_live(tenant: TenantId, run: str, created_at: datetime, id: SessionId, shards: int = 1) -> Key:
    """A live session in its run's list, by age."""
    return _entry(run_list(tenant, run), shards, created_at, id)


def ended_list(tenant: TenantId) -> str:
    """The family of a tenant's ending and ended sessions."""
    return f"ENDED#{tenant}"


def ended(tenant: TenantId, created_at: datetime, id: SessionId, shards: int = 1) -> Key:
    """An ending or ended session in its tenant's other list."""
    return _entry(ended_list(tenant), shards, created_at, id)


def name(tenant: TenantId, run: str | None, name: str) -> Key:
    """A live session's name in its run."""
    return Key(pk=_shard(f"NAME#{tenant}#{run or ''}", shard_of(name, NAME_SHARDS)), sk=name)


def queue_list(pool: str) -> str:
    """The family of a pool's queue."""
    return f"QUEUE#{pool}"


def queued(pool: str, created_at: datetime, id: SessionId, shards: int = 1) -> Key:
    """A session in its pool's queue, by age."""
    return _entry(queue_list(pool), shards, created_at, id)


def queue_spread(pool: str) -> Key:
    """Over how many shards a pool's queue is spread."""
    return Key(pk=f"SPREAD#{pool}", sk=MAIN)


def assigned(host: HostId, id: SessionId, epoch: int) -> Key:
    """A sandbox on a host."""
    return Key(pk=f"ON#{host}", sk=f"{id}#{epoch:06d}")


def host(id: HostId) -> Key:
    """A host: in a partition of its own, since its heartbeats write it."""
    return Key(pk=f"HOST#{id}", sk=MAIN)


def host_entry(id: HostId) -> Key:
    """A host in the list of all, written when it is ordered and taken away when it is forgotten."""
    return Key(pk=HOSTS, sk=id)


def orders(id: HostId) -> Key:
    """What a host is to do."""
    return Key(pk=f"HOST#{id}", sk="ORDERS")


def pool(name: str) -> Key:
    """What is remembered of a pool."""
    return Key(pk=POOLS, sk=name)


def quota(tenant: TenantId, shard: int) -> Key:
    """What is held, and may still be taken, of a tenant's quota in one of its shards."""
    return Key(pk=_shard(f"QUOTA#{tenant}", shard), sk=MAIN)


def book(tenant: TenantId) -> Key:
    """How much of a tenant's quota its shards were given, and so over how many its items are spread."""
    return Key(pk=f"BOOK#{tenant}", sk=MAIN)


def refusal(tenant: TenantId) -> Key:
    """That a tenant's shards were found to have too little, a moment ago."""
    return Key(pk=f"BOOK#{tenant}", sk="REFUSAL")


def demand(pool: str, kind: str) -> Key:
    """How often sandboxes of a kind were asked for in a pool."""
    return Key(pk=f"DEMAND#{pool}", sk=kind)


def prepare(pool: str, id: str) -> Key:
    """A prepare of a pool."""
    return Key(pk=f"PREPARE#{pool}", sk=id)


def snapshot(id: SnapshotId) -> Key:
    """A snapshot."""
    return Key(pk=f"SNP#{id}", sk=MAIN)


def snapshot_list(tenant: TenantId) -> str:
    """The family of a tenant's snapshots."""
    return f"SNAPSHOTS#{tenant}"


def snapshot_entry(tenant: TenantId, created_at: datetime, id: SnapshotId, shards: int = 1) -> Key:
    """A snapshot in its tenant's list."""
    return _entry(snapshot_list(tenant), shards, created_at, id)


def snapshots_open_on(host: HostId) -> Key:
    """The partition of the snapshots that a host is taking, and how their sort keys begin."""
    return Key(pk=_shard("SNAPSHOTS-OPEN", shard_of(host, SNAPSHOT_SHARDS)), sk=f"{host}#")


def snapshot_open(host: HostId, id: SnapshotId) -> Key:
    """A snapshot that a host is taking."""
    place = snapshots_open_on(host)
    return Key(pk=place.pk, sk=place.sk + id)


def snapshots_open() -> list[str]:
    """The partitions of those that are being made."""
    return partitions("SNAPSHOTS-OPEN", SNAPSHOT_SHARDS)


def group(id: str) -> Key:
    """The note of a group that is being made."""
    return Key(pk=_shard("GROUPS", shard_of(id, GROUP_SHARDS)), sk=id)


def groups() -> list[str]:
    """The partitions of the notes of groups."""
    return partitions("GROUPS", GROUP_SHARDS)


def session_snapshot(session: SessionId, created_at: datetime, id: SnapshotId) -> Key:
    """A snapshot in its session's list."""
    return Key(pk=f"SESSNP#{session}", sk=f"{moment(created_at)}#{id}")


def image(tenant: TenantId, name: str, tag: str) -> Key:
    """An image; its partition is the list."""
    return Key(pk=f"IMAGES#{tenant}", sk=f"{name}:{tag}")


def pin(tenant: TenantId, run: str, image: str) -> Key:
    """What an image is for a run."""
    return Key(pk=f"PIN#{tenant}#{run}", sk=image)


def usage_day(tenant: TenantId, start: datetime) -> Key:
    """In which shards a tenant's usage of a day is."""
    return Key(pk=f"USAGE-DAYS#{tenant}", sk=start.strftime("%Y-%m-%d"))


def usage_list(tenant: TenantId, day: str) -> str:
    """The family of a tenant's usage records of a day (`2026-11-30`)."""
    return f"USAGE#{tenant}#{day}"


def usage_shard(tenant: TenantId, day: str, shard: int) -> str:
    """One of its partitions."""
    return _shard(usage_list(tenant, day), shard)


def usage(tenant: TenantId, start: datetime, id: SessionId, epoch: int, host: HostId) -> Key:
    """A usage record, by day and time. Its place follows from itself alone, so that a repeat finds it."""
    pk = usage_shard(tenant, start.strftime("%Y-%m-%d"), shard_of(host, USAGE_SHARDS))
    return Key(pk=pk, sk=f"{moment(start)}#{id}#{epoch}#{host}")


def api_key(hash: str) -> Key:
    """An API key, by the hash of its secret."""
    return Key(pk=f"KEY#{hash}", sk=MAIN)


def tenant(id: TenantId) -> Key:
    """A tenant."""
    return Key(pk=TENANTS, sk=id)


def transfer(id: str) -> Key:
    """A file on its way into a session or out of one."""
    return Key(pk=f"TRF#{id}", sk=MAIN)
