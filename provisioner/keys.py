"""Under which keys records are. One table; an item that is listed is written in the same transaction as the thing."""

from __future__ import annotations

import hashlib
from datetime import datetime

from provisioner.store.port import Key
from shoal.contract.base import HostId, SessionId, SnapshotId, TenantId

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"

HOSTS = "HOSTS"
ORDERS = "ORDERS"
POOLS = "POOLS"
TENANTS = "TENANTS"
SIGNING = "SIGNING"
GROUPS = "GROUPS"
SNAPSHOTS_OPEN = "SNAPSHOTS-OPEN"
IMAGES_OPEN = "IMAGES-OPEN"
MAIN = "-"
#: Written to wake a reconciler in another process: the stream's filter is `dynamodb.Keys.pk.S = ["WAKE"]`.
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


def session(id: SessionId) -> Key:
    """A session."""
    return Key(pk=f"SES#{id}", sk=MAIN)


def event(id: SessionId, slot: str) -> Key:
    """An event of a session."""
    return Key(pk=f"SES#{id}", sk=f"EV#{slot}")


def live(tenant: TenantId, created_at: datetime, id: SessionId) -> Key:
    """A live session in its tenant's list, by age."""
    return Key(pk=f"LIVE#{tenant}", sk=f"{moment(created_at)}#{id}")


def run_live(tenant: TenantId, run: str, created_at: datetime, id: SessionId) -> Key:
    """A live session in its run's list, by age."""
    return Key(pk=f"RUN#{tenant}#{run}", sk=f"{moment(created_at)}#{id}")


def ended(tenant: TenantId, created_at: datetime, id: SessionId) -> Key:
    """An ending or ended session in its tenant's other list."""
    return Key(pk=f"ENDED#{tenant}", sk=f"{moment(created_at)}#{id}")


def name(tenant: TenantId, run: str | None, name: str) -> Key:
    """A live session's name in its run."""
    return Key(pk=f"NAME#{tenant}#{run or ''}", sk=name)


def queued(pool: str, created_at: datetime, id: SessionId) -> Key:
    """A session in its pool's queue, by age."""
    return Key(pk=f"QUEUE#{pool}", sk=f"{moment(created_at)}#{id}")


def assigned(host: HostId, id: SessionId, epoch: int) -> Key:
    """A sandbox on a host."""
    return Key(pk=f"ON#{host}", sk=f"{id}#{epoch:06d}")


def host(id: HostId) -> Key:
    """A host."""
    return Key(pk=HOSTS, sk=id)


def orders(id: HostId) -> Key:
    """What a host is to do."""
    return Key(pk=ORDERS, sk=id)


def pool(name: str) -> Key:
    """What is remembered of a pool."""
    return Key(pk=POOLS, sk=name)


def quota(tenant: TenantId) -> Key:
    """What a tenant holds of its quota."""
    return Key(pk=f"QUOTA#{tenant}", sk=MAIN)


def demand(pool: str, kind: str) -> Key:
    """How often sandboxes of a kind were asked for in a pool."""
    return Key(pk=f"DEMAND#{pool}", sk=kind)


def prepare(pool: str, id: str) -> Key:
    """A prepare of a pool."""
    return Key(pk=f"PREPARE#{pool}", sk=id)


def snapshot(id: SnapshotId) -> Key:
    """A snapshot."""
    return Key(pk=f"SNP#{id}", sk=MAIN)


def snapshot_entry(tenant: TenantId, created_at: datetime, id: SnapshotId) -> Key:
    """A snapshot in its tenant's list."""
    return Key(pk=f"SNAPSHOTS#{tenant}", sk=f"{moment(created_at)}#{id}")


def session_snapshot(session: SessionId, created_at: datetime, id: SnapshotId) -> Key:
    """A snapshot in its session's list."""
    return Key(pk=f"SESSNP#{session}", sk=f"{moment(created_at)}#{id}")


def image(tenant: TenantId, name: str, tag: str) -> Key:
    """An image; its partition is the list."""
    return Key(pk=f"IMAGES#{tenant}", sk=f"{name}:{tag}")


def pin(tenant: TenantId, run: str, image: str) -> Key:
    """What an image is for a run."""
    return Key(pk=f"PIN#{tenant}#{run}", sk=image)


def usage(tenant: TenantId, start: datetime, id: SessionId, epoch: int, host: HostId) -> Key:
    """A usage record, by day and time."""
    day = start.strftime("%Y-%m-%d")
    return Key(pk=f"USAGE#{tenant}#{day}", sk=f"{moment(start)}#{id}#{epoch}#{host}")


def api_key(hash: str) -> Key:
    """An API key, by the hash of its secret."""
    return Key(pk=f"KEY#{hash}", sk=MAIN)


def tenant(id: TenantId) -> Key:
    """A tenant."""
    return Key(pk=TENANTS, sk=id)


def transfer(id: str) -> Key:
    """A file on its way into a session or out of one."""
    return Key(pk=f"TRF#{id}", sk=MAIN)
