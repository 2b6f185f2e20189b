"""Telling of sessions: one, lists, events. Every read is consistent; lists are entries written with the sessions."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from provisioner import keys, spread
from provisioner.auth import Principal
from provisioner.context import Context
from provisioner.lifecycle import UNPLACED
from provisioner.model import Session
from provisioner.sessions import records
from provisioner.sessions.views import tell
from provisioner.store.port import Page
from shoal.contract import sessions as wire
from shoal.contract.base import SessionId, whole_number
from shoal.contract.errors import ShoalError, invalid
from shoal.contract.states import Phase, SessionState

_OVER = frozenset({SessionState.ENDING, SessionState.ENDED})
#: How many entries one list call looks through, at the most, for its page; the cursor goes on from there.
_LOOK = 2000


def encode_cursor(sk: str | None) -> str | None:
    """An opaque cursor for a place in a list."""
    return None if sk is None else base64.urlsafe_b64encode(sk.encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> str | None:
    """The place of a cursor.

    Raises:
        ShoalError: INVALID_REQUEST for one that this service did not give.
    """
    if cursor is None:
        return None
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise no_cursor() from error


def no_cursor() -> ShoalError:
    """The refusal of a cursor that this service did not give."""
    return invalid("query.cursor", "is not one of ours")


def page_size(context: Context, limit: int) -> int:
    """How many items a page has.

    Raises:
        ShoalError: INVALID_REQUEST when it is out of range.
    """
    if not 1 <= limit <= context.settings.history_limit:
        raise invalid("query.limit", f"is not between 1 and {context.settings.history_limit}")
    return limit


class Queries:
    """Reads sessions for their tenant."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def tell(self, session: Session) -> wire.Session:
        """A session for the wire, with what its sandbox said last."""
        return tell(session, self._context.fleet.status(session.host, session.id, session.epoch))

    async def told(self, session: Session) -> wire.Session:
        """The same, with why no host is being added for one that waits for a host."""
        found = self.tell(session)
        if session.state in UNPLACED and session.phase is Phase.WAITING_FOR_HOST:
            reason = await records.not_scaling(self._context.store, session.pool)
            return found.model_copy(update={"waiting_for": reason})
        return found

    async def page(
        self,
        who: Principal,
        *,
        run: str | None,
        name: str | None,
        state: SessionState | None,
        labels: Mapping[str, str],
        cursor: str | None,
        limit: int,
    ) -> wire.SessionPage:
        """One page of the live sessions, or of the ended ones when their state is asked for."""
        limit = page_size(self._context, limit)
        if name is not None and run is not None and state not in _OVER:
            return await self._by_name(who, run, name, state, labels)
        if state in _OVER:
            family = keys.ended_list(who.tenant)
        elif run is not None:
            family = keys.run_list(who.tenant, run)
        else:
            family = keys.live_list(who.tenant)
        pks = keys.partitions(family, await spread.lists_of(self._context.store, who.tenant))

        def wanted(session: Session) -> bool:
            return (
                (state is None or session.state is state)
                and (state is not None or session.state not in _OVER)
                and (run is None or session.run == run)
                and (name is None or session.name == name)
                and all(session.labels.get(key) == value for key, value in labels.items())
            )

        found: list[wire.Session] = []
        after = decode_cursor(cursor)
        looked = 0
        while True:
            page = await spread.page(self._context.store, pks, after=after, limit=min(1000, max(limit, 100)))
            ids = [SessionId(stored.item["session"]) for stored in page.items]
            stored = await self._context.store.get_many([keys.session(id) for id in ids])
            for entry, item in zip(page.items, stored, strict=True):
                after = entry.key.sk
                looked += 1
                if item is None:
                    continue
                session = records.loaded(item).session
                if wanted(session):
                    found.append(self.tell(session))
                if len(found) == limit or looked >= _LOOK:
                    return wire.SessionPage(sessions=found, cursor=_next(page, after))
            if page.after is None:
                return wire.SessionPage(sessions=found, cursor=None)

    async def _by_name(
        self,
        who: Principal,
        run: str | None,
        name: str,
        state: SessionState | None,
        labels: Mapping[str, str],
    ) -> wire.SessionPage:
        """Names are unique in a run: one look."""
        stored = await self._context.store.get(keys.name(who.tenant, run, name))
        if stored is None:
            return wire.SessionPage(sessions=[])
        found = await records.read(self._context.store, SessionId(stored.item["session"]))
        if found is None or found.session.state in _OVER:
            return wire.SessionPage(sessions=[])
        session = found.session
        fits = (state is None or session.state is state) and all(
            session.labels.get(key) == value for key, value in labels.items()
        )
        return wire.SessionPage(sessions=[self.tell(session)] if fits else [])

    async def events(
        self, who: Principal, id: SessionId, *, cursor: str | None, limit: int
    ) -> wire.EventPage:
        """What happened to a session, oldest first; its beginning and its end are told from the record itself."""
        limit = page_size(self._context, limit)
        session = (await records.read_own(self._context.store, who, id)).session
        stored = await self._context.store.query_all(keys.session(id).pk, prefix="EV#")
        events = [wire.Event.model_validate(item.item) for item in stored]
        events.insert(
            0,
            wire.Event(
                at=session.created_at,
                kind="session.created",
                message="The session was created.",
                data={"image": session.source.image, "snapshot": session.source.snapshot},
            ),
        )
        if session.end is not None and session.ended_at is not None:
            events.append(
                wire.Event(
                    at=session.ended_at,
                    kind="session.ended",
                    message=f"The session ended: {session.end.reason.value}.",
                    data=session.end.model_dump(mode="json"),
                )
            )
        events.sort(key=lambda event: event.at)
        begin = 0
        place = decode_cursor(cursor)
        if place is not None:
            told = whole_number(place)
            if told is None:
                raise no_cursor()
            begin = told
        more = len(events) > begin + limit
        return wire.EventPage(
            events=events[begin : begin + limit],
            cursor=encode_cursor(str(begin + limit)) if more else None,
        )


def _next(page: Page, after: str | None) -> str | None:
    """The cursor after `after`; None when it was the very last entry."""
    if page.after is None and page.items and page.items[-1].key.sk == after:
        return None
    return encode_cursor(after)
