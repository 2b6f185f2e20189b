"""When a host is gone: its sessions go on elsewhere or end, and its record says so."""

from __future__ import annotations

from provisioner import keys, roster
from provisioner.context import Context, log
from provisioner.lifecycle import HOST, LIVE, move
from provisioner.model import Assignment, Host, dump, load, replace
from provisioner.sessions import Sessions, records
from provisioner.store.port import ConditionFailed, Delete, Put, VersionIs
from shoal.contract.base import HostId
from shoal.contract.states import HostState, SessionState


class Departure:
    """Takes leave of hosts; every step may be repeated."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions

    async def gone(self, id: HostId, detail: str, *, state: HostState = HostState.LOST) -> None:
        """Mark a host (LOST: it may still be there, and is not to be trusted; GONE) and see to its sessions."""
        context = self._context
        for _ in range(5):
            stored = await context.store.get(keys.host(id))
            if stored is None:
                break
            host = load(Host, stored.item)
            if host.state in (state, HostState.GONE):
                break
            new = replace(host, state=move(HOST, host.state, state), token_hash=None)
            put = Put(key=keys.host(id), item=dump(new), conditions=(VersionIs(version=stored.version),))
            try:
                await context.store.transact([put])
            except ConditionFailed:
                continue
            if state is HostState.LOST:
                log.warning("host.lost", host_id=id, reason=detail)
            else:
                log.info("host.gone", host_id=id, reason=detail)
            break
        context.fleet.stale()
        context.fleet.memory.forget(id)
        # Why is for operators: it may tell of other tenants.
        for stored in await context.store.query_all(f"ON#{id}"):
            await self.lost(load(Assignment, stored.item), "Its host was lost.")
        context.wake_queue.set()

    async def lost(self, assignment: Assignment, detail: str) -> None:
        """One sandbox is no more: its session goes on elsewhere or ends."""
        context = self._context
        for _ in range(5):
            found = await records.read(context.store, assignment.session)
            mine = (
                found is not None
                and found.session.host == assignment.host
                and found.session.epoch == assignment.epoch
            )
            if found is None or not mine:
                retiring = found.session.retiring if found else None
                if retiring is None or retiring.host != assignment.host:
                    await context.store.transact(
                        [Delete(key=keys.assigned(assignment.host, assignment.session, assignment.epoch))]
                    )
                return
            if found.session.state in LIVE:
                session = await self._sessions.changing.host_lost(found, detail)
                if session is None:
                    continue
                if session.state is not SessionState.ENDING:
                    return
            await self._sessions.ending.finished(assignment.session, assignment.epoch, None)
            return

    async def forget(self, id: HostId) -> None:
        """Drop the record of a host whose machine is gone."""
        context = self._context
        await context.store.transact(roster.strike(id))
        context.fleet.gone(id)
        log.info("host.forgotten", host_id=id)
