"""Pools: what they are, and capacity made ready before it is needed."""

from __future__ import annotations

from provisioner.auth import Principal
from shoal.contract import pools as wire


class Pools:
    """What routes call."""

    async def list(self, who: Principal) -> wire.PoolPage:
        """All pools, by name."""
        raise NotImplementedError

    async def get(self, who: Principal, name: str) -> wire.Pool:
        """A pool now."""
        raise NotImplementedError

    async def prepare(
        self, who: Principal, pool: str, body: wire.Prepare, *, idempotency_key: str | None = None
    ) -> wire.Prepared:
        """Have warm sandboxes made ready; waits up to `body.wait_s`."""
        raise NotImplementedError

    async def prepared(self, who: Principal, pool: str, id: str, *, wait_s: float = 0.0) -> wire.Prepared:
        """How far a prepare is; `wait_s` waits for it to be done."""
        raise NotImplementedError

    async def prepares(self, who: Principal, pool: str) -> wire.PreparedPage:
        """The prepares of a pool that have not expired."""
        raise NotImplementedError

    async def release(self, who: Principal, pool: str, id: str) -> None:
        """Give up a prepare; repeatable."""
        raise NotImplementedError
