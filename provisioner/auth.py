"""Tenants, their API keys, and who a key belongs to."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from provisioner import keys
from provisioner.clock import Clock, LastTime
from provisioner.model import ApiKey, Tenant, dump, load
from provisioner.store.port import Absent, ConditionFailed, Put, Store
from shoal.contract.base import KeyId, TenantId, new_id
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import Scope

DEFAULT_TENANT = TenantId("ten_default")
_CACHE_S = 10.0
_CACHE_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Who asks: a tenant, by one of its keys, and what that key may do."""

    tenant: TenantId
    key: KeyId
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        """Whether the key has the scope; `admin` includes all."""
        return scope in self.scopes or Scope.ADMIN in self.scopes


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key just made. `secret` is told this once and kept nowhere."""

    key: ApiKey
    secret: str


def hash_secret(secret: str) -> str:
    """How secrets are kept: SHA-256 in hex (they are random and long, so a slow hash would gain nothing)."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Auth:
    """Tenants and keys."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._known: OrderedDict[str, tuple[LastTime, ApiKey]] = OrderedDict()

    async def bootstrap(self) -> NewKey | None:
        """Make the default tenant and its admin key if there is no tenant yet; None when there was one.

        A start that died in between makes another key; the one nobody was told is of no use to anybody.
        """
        stored = await self._store.get(keys.tenant(DEFAULT_TENANT))
        if stored is not None:
            return None
        tenant = Tenant(id=DEFAULT_TENANT, name="default", parent=None, created_at=self._clock.now())
        new = self._make_key(DEFAULT_TENANT, "admin", (Scope.ADMIN,))
        try:
            await self._store.transact(
                [
                    Put(key=keys.tenant(tenant.id), item=dump(tenant), conditions=(Absent(),)),
                    Put(key=keys.api_key(new.key.hash), item=dump(new.key)),
                ]
            )
        except ConditionFailed:
            return None
        return new

    async def make_key(self, tenant: TenantId, name: str, scopes: tuple[Scope, ...]) -> NewKey:
        """Make another key of a tenant."""
        new = self._make_key(tenant, name, scopes)
        await self._store.transact([Put(key=keys.api_key(new.key.hash), item=dump(new.key))])
        return new

    async def tenant(self, id: TenantId) -> Tenant | None:
        """A tenant, or None."""
        stored = await self._store.get(keys.tenant(id))
        return load(Tenant, stored.item) if stored else None

    async def authenticate(self, key: str) -> Principal:
        """Who a key belongs to; remembered for some seconds, so a revoked key works no longer than those.

        Raises:
            ShoalError: UNAUTHENTICATED for a key that is unknown, expired or revoked.
        """
        hashed = hash_secret(key)
        known = self._known.get(hashed)
        if known is not None and known[0].within(_CACHE_S):
            record = known[1]
        else:
            stored = await self._store.get(keys.api_key(hashed))
            if stored is None:
                raise ShoalError(ErrorCode.UNAUTHENTICATED, "This API key is not known.")
            record = load(ApiKey, stored.item)
            read = LastTime(self._clock)
            read.note()
            self._known[hashed] = (read, record)
            while len(self._known) > _CACHE_SIZE:
                self._known.popitem(last=False)
        if record.revoked_at is not None:
            raise ShoalError(ErrorCode.UNAUTHENTICATED, "This API key was revoked.")
        if record.expires_at is not None and record.expires_at <= self._clock.now():
            raise ShoalError(ErrorCode.UNAUTHENTICATED, "This API key has expired.")
        return Principal(tenant=record.tenant, key=record.id, scopes=frozenset(record.scopes))

    def _make_key(self, tenant: TenantId, name: str, scopes: tuple[Scope, ...]) -> NewKey:
        secret = "shl_" + secrets.token_urlsafe(32)
        record = ApiKey(
            id=KeyId(new_id("key")),
            tenant=tenant,
            hash=hash_secret(secret),
            prefix=secret[:8],
            name=name,
            scopes=scopes,
            created_at=self._clock.now(),
        )
        return NewKey(key=record, secret=secret)
