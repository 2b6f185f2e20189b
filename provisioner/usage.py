"""Usage records: stored once each, told by time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from provisioner import keys
from provisioner.auth import Principal
from provisioner.context import Context
from provisioner.sessions.queries import decode_cursor, encode_cursor, no_cursor, page_size
from provisioner.store.port import MAX_OPS, Key, Put
from shoal.contract import usage as wire
from shoal.contract.base import HostId, SessionId
from shoal.contract.errors import invalid

#: How far back one query may look, in days.
MAX_DAYS = 92
_LOOK = 5000


class Usage:
    """What routes call; `store` is for heartbeats."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def store(self, host: HostId, records: Sequence[wire.UsageRecord]) -> int:
        """Keep a host's records; answers how many of them, from the first, are stored. A repeat changes nothing."""
        puts: dict[Key, Put] = {}
        for record in records:
            key = keys.usage(record.tenant, record.start, record.session, record.epoch, host)
            own = record if record.host == host else record.model_copy(update={"host": host})
            puts[key] = Put(key=key, item=own.model_dump(mode="json"))
        waiting = list(puts.values())
        for start in range(0, len(waiting), MAX_OPS):
            await self._context.store.transact(waiting[start : start + MAX_OPS])
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
        day = first
        while day <= until.date():
            pk = f"USAGE#{who.tenant}#{day.isoformat()}"
            while True:
                page = await self._context.store.query(pk, after=after, limit=1000)
                for stored in page.items:
                    after = stored.key.sk
                    if after.partition("#")[0] > end:
                        return wire.UsagePage(records=found)
                    record = wire.UsageRecord.model_validate(stored.item)
                    looked += 1
                    if (run is None or record.run == run) and (session is None or record.session == session):
                        found.append(record)
                    if len(found) == limit or looked >= _LOOK:
                        return wire.UsagePage(
                            records=found, cursor=encode_cursor(f"{day.isoformat()}#{after}")
                        )
                if page.after is None:
                    break
            day += timedelta(days=1)
            after = ""
        return wire.UsagePage(records=found)
