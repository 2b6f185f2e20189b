"""A count of all shards that found too little is remembered for a moment: not every create counts again.

A tenant at its limit whose creates are repeated 500 times a second would else have up to 256 items read by each. The
refusal is an item beside the book, shared by all replicas: of functions, which answer a call at a time, none sees
enough of them to remember anything by itself. Quota that is freed may be refused for `RETRY_S` more, which is what a
refusal says to wait; the session's own shard is asked before, and gives at once what it has.
"""

from __future__ import annotations

from datetime import datetime

from provisioner import keys
from provisioner.context import Context
from provisioner.quota import DIMENSIONS, Amounts
from provisioner.sessions.settling import RETRY_S, State, refused
from provisioner.spread import shards_of
from provisioner.store.port import (
    ConditionFailed,
    Conflict,
    Put,
    Stored,
    StoreUnavailable,
    Throttled,
    Update,
    VersionIs,
)

#: Shards up to which counting is as cheap as remembering.
FEW = 8
#: Seconds before a refusal's end at which one of those that meet it counts again, so that not all do at its end.
_EARLY_S = 0.5
_PASSING = (Conflict, Throttled, StoreUnavailable)


class Refusals:
    """What is remembered of tenants at their limits."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def check(self, state: State, amounts: Amounts) -> None:
        """Return if it is to be counted whether so much can be had.

        Raises:
            ShoalError: QUOTA_EXCEEDED by a count of a moment ago; UNAVAILABLE.
        """
        if shards_of(state.book) <= FEW:
            return
        stored = await self._context.store.get(keys.refusal(state.tenant))
        if stored is None or not _stands(stored, state, amounts):
            return
        age_s = (self._context.clock.now() - datetime.fromisoformat(stored.item["at"])).total_seconds()
        # Clocks of replicas differ a little.
        if abs(age_s) >= RETRY_S:
            return
        if age_s >= RETRY_S - _EARLY_S and await self._is_ours_to_count(stored):
            return
        raise refused(state.limits, {name: stored.item[name] for name in DIMENSIONS})

    async def keep(self, state: State, amounts: Amounts, held: Amounts, since: datetime) -> None:
        """Remember that so much could not be had by a count that began at `since`; a loss costs others a count."""
        if shards_of(state.book) <= FEW:
            return
        item: dict[str, str | int] = {"at": since.isoformat(), "limits": state.limits.text}
        item |= {name: held[name] for name in DIMENSIONS}
        item |= {f"asked_{name}": amounts[name] for name in DIMENSIONS}
        try:
            await self._context.store.bare.transact([Put(key=keys.refusal(state.tenant), item=item)])
        except _PASSING:
            return

    async def _is_ours_to_count(self, stored: Stored) -> bool:
        if stored.item.get("counting"):
            return False
        ours = Update(key=stored.key, set={"counting": True}, conditions=(VersionIs(version=stored.version),))
        try:
            await self._context.store.bare.transact([ours])
        except (ConditionFailed, *_PASSING):
            return False
        return True


def _stands(stored: Stored, state: State, amounts: Amounts) -> bool:
    """Whether who asks for so much under these limits would be refused as well."""
    return stored.item["limits"] == state.limits.text and all(
        amounts[name] >= stored.item[f"asked_{name}"] for name in DIMENSIONS
    )
