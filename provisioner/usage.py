"""Usage records: stored once each, told by time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from provisioner import keys, spread
from provisioner.auth import Principal
from provisioner.context import Context
from provisioner.sessions.queries import decode_cursor, encode_cursor, no_cursor, page_size
from provisioner.store.port import MAX_OPS, Key, Op, Put, Update
from shoal.contract import usage as wire
from shoal.contract.base import HostId, SessionId, TenantId
from shoal.contract.errors import invalid

#: How far back one query may look, in days.
MAX_DAYS = 92
_LOOK = 5000
#: How many days' shards a replica remembers as written down.
_NOTED = 10_000


class Usage:
    """What routes call; `store` is for heartbeats."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._noted: set[tuple[Key, str]] = set()

    async def store(self, host: HostId, records: Sequence[wire.UsageRecord]) -> int:
        """Keep a host's records; answers how many of them, from the first, are stored. A repeat changes nothing."""
        puts: dict[Key, Op] = {}
        days: dict[Key, TenantId] = {}
        for record in records:
            key = keys.usage(record.tenant, record.start, record.session, record.epoch, host)
            own = record if record.host == host else record.model_copy(update={"host": host})
            puts[key] = Put(key=key, item=own.model_dump(mode="json"))
            days[keys.usage_day(record.tenant, record.start)] = record.tenant
        shard = str(keys.shard_of(host, keys.USAGE_SHARDS))
        new = [day for day in days if (day, shard) not in self._noted]
        # Where to look is written before there is anything, or with it.
        ops = [Update(key=day, insert={"shards": frozenset({shard})}) for day in new] + [*puts.values()]
        for start in range(0, len(ops), MAX_OPS):
            await self._context.store.transact(ops[start : start + MAX_OPS])
        if len(self._noted) > _NOTED:
            self._noted.clear()
        self._noted.update((day, shard) for day in new)
        return len(records)

    async def query(
        self,
        who: Principal,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        run: str | None = None,
        session: SessionId | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.UsagePage:
        """Records that began in `since..until` (None: the last day, now), oldest first.

        Raises:
            ShoalError: INVALID_REQUEST for a range over `MAX_DAYS` days, a limit or cursor that is none.
        """
        limit = page_size(self._context, limit)
        until = until or self._context.clock.now()
        since = since or until - timedelta(days=1)
        if until - since > timedelta(days=MAX_DAYS):
            raise invalid("query.since", f"is more than {MAX_DAYS} days before `until`")
        day_after = decode_cursor(cursor)
        first, after = since.date(), keys.moment(since)
        if day_after is not None:
            text, _, after = day_after.partition("#")
            try:
                first = datetime.strptime(text, "%Y-%m-%d").date()  # noqa: DTZ007 - a day, not a moment
            except ValueError as error:
                raise no_cursor() from error
        found: list[wire.UsageRecord] = []
        end = keys.moment(until)
        looked = 0
        before = (first - timedelta(days=1)).isoformat()
        days = await self._context.store.query(
            keys.usage_day(who.tenant, since).pk, after=before, limit=MAX_DAYS + 2
        )
        for noted in days.items:
            day = noted.key.sk
            if day > until.date().isoformat():
                break
            shards = sorted(int(shard) for shard in noted.item["shards"])
            pks = [keys.usage_shard(who.tenant, day, shard) for shard in shards]
            place = after if day == first.isoformat() else None
            while True:
                page = await spread.page(self._context.store, pks, after=place, limit=1000)
                for stored in page.items:
                    place = stored.key.sk
                    if place.partition("#")[0] > end:
                        return wire.UsagePage(records=found)
                    record = wire.UsageRecord.model_validate(stored.item)
                    looked += 1
                    if (run is None or record.run == run) and (session is None or record.session == session):
                        found.append(record)
                    if len(found) == limit or looked >= _LOOK:
                        return wire.UsagePage(records=found, cursor=encode_cursor(f"{day}#{place}"))
                if page.after is None:
                    break
        return wire.UsagePage(records=found)
