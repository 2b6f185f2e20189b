"""Giving a session its sandbox: choose a host, ask its agent, write down what came of it.

A session that is being placed carries the name of the replica that does it and a time until which others leave it
alone; if that replica dies, the queue's pump takes over. The agent's start is named by session and epoch, so whatever
was started twice is known: the record names one host, and heartbeats release the others.
"""

from __future__ import annotations

from datetime import timedelta

from provisioner.agents.port import HostRef
from provisioner.context import Context, log
from provisioner.lifecycle import UNPLACED
from provisioner.model import Session, replace
from provisioner.placement import Ask, Own, Room, warm_key, warm_name
from provisioner.sessions import records
from provisioner.sessions.ending import Ending
from provisioner.sessions.records import Loaded
from provisioner.sessions.starting import patched, retired, start_error, start_message, with_status
from provisioner.store.port import ConditionFailed, Op
from shoal.contract.base import HostId, SessionId
from shoal.contract.errors import ErrorCode, ErrorDetail, Next, ShoalError
from shoal.contract.host import SandboxPatch, SandboxSource, SandboxStatus
from shoal.contract.states import EndReason, Phase, SessionState

#: What an agent's answer says about the host, not about the sandbox: another host is tried.
_ELSEWHERE = frozenset(
    {
        ErrorCode.HOST_REFUSED,
        ErrorCode.HOST_FENCED,
        ErrorCode.HOST_UNREACHABLE,
        ErrorCode.TOKEN_REFUSED,
        ErrorCode.UNAVAILABLE,
        ErrorCode.UNAUTHENTICATED,
    }
)
#: How often a write is tried anew when the session was written meanwhile.
_TRIES = 10
#: Seconds an old sandbox may take to flush its journal before a session goes on without it.
_RETIRE_S = 15.0


def ask_for(session: Session, layers: frozenset[str] = frozenset()) -> Ask:
    """What placement needs to know of a session."""
    key = warm_key(records.disk(session).digest, session.substrate, session.resources.disk_mib)
    return Ask(
        pool=session.pool,
        substrate=session.substrate,
        room=Room.for_one(session.resources),
        warm=warm_name(key),
        layers=layers,
    )


class Placing:
    """Places sessions. `blocked` pools have somebody waiting: newcomers queue behind."""

    def __init__(self, context: Context, ending: Ending) -> None:
        self._context = context
        self._ending = ending
        self.blocked: set[str] = set()

    def lease(self) -> dict[str, object]:
        """What marks a session as being placed by this replica from now."""
        until = self._context.clock.now() + timedelta(seconds=self._context.settings.placing_lease_s)
        return {"placer": self._context.replica, "placer_until": until}

    async def place(self, found: Loaded, first: tuple[HostId, Own] | None = None) -> Session:
        """Try to give a session that this replica holds the lease of its sandbox; it is back in the queue otherwise.

        Args:
            first: A host that was chosen already, with the room that counts there for it.

        Returns:
            The session as it then is: running, starting, still waiting, or ended because it cannot start.
        """
        memory = self._context.fleet.memory
        try:
            return await self._place(found, first)
        finally:
            if first is not None and not first[1].settled:
                memory.refused(*first)

    async def _place(self, found: Loaded, first: tuple[HostId, Own] | None) -> Session:
        context = self._context
        memory = context.fleet.memory
        session = found.session
        tried: set[HostId] = set()
        try:
            if session.retiring is not None:
                found = await self._retire(found)
                session = found.session
                if session.state not in UNPLACED:
                    return session
            source = await context.sources.sandbox(records.disk(session))
        except ShoalError as error:
            return await self._start_failed(found, error.body().error, retryable=error.next is Next.RETRY)
        ask = ask_for(session, frozenset(layer.digest for layer in source.layers))
        while True:
            if first is not None:
                host_id, own = first
                first = None
            else:
                taken = await context.fleet.take(ask, context.chance, tried=frozenset(tried))
                if taken is None:
                    return await self._back(found, Phase.WAITING_FOR_HOST)
                host_id, own = taken
            known = await context.fleet.host(host_id)
            if known is None or known.address is None:
                memory.refused(host_id, own)
            else:
                outcome = await self._ask(found, host_id, known.address, own, source)
                if outcome is not None:
                    return outcome
            tried.add(host_id)

    async def _ask(
        self, found: Loaded, host: HostId, address: str, own: Own, source: SandboxSource
    ) -> Session | None:
        """Ask one host; None when another one should be tried."""
        context = self._context
        session = found.session
        memory = context.fleet.memory
        began = context.clock.monotonic()
        try:
            status = await context.agents.start(
                HostRef(id=host, address=address),
                start_message(session, source, context.settings.start_wait_s),
            )
        except ShoalError as error:
            if error.code in _ELSEWHERE:
                if error.details.get("sent"):
                    # It may have started there after all; the room counts until its heartbeats tell.
                    memory.answered(own, context.fleet.beat(host))
                else:
                    memory.turned_away(host, own, context.fleet.beat(host))
                log.info("placement.refused", session_id=session.id, host_id=host, reason=error.code.value)
                return None
            memory.refused(host, own)
            return await self._start_failed(found, error.body().error, retryable=error.next is Next.RETRY)
        except BaseException:
            memory.answered(own, context.fleet.beat(host))
            raise
        memory.answered(own, context.fleet.beat(host))
        if status.state not in ("starting", "running", "paused"):
            return await self._start_failed(found, start_error(status), retryable=True)
        duration_ms = round((context.clock.monotonic() - began) * 1000, 1)
        session = await self.confirm(found, host, address, status, duration_ms=duration_ms)
        memory.confirmed(own, context.clock.monotonic())
        return session

    async def confirm(
        self,
        found: Loaded,
        host: HostId,
        address: str,
        status: SandboxStatus,
        *,
        duration_ms: float | None = None,
    ) -> Session:
        """Write down that a host runs (or starts) the sandbox; one that is not the session's any more is ended.

        What else was written meanwhile (a patch, a journal that arrived) does not cost the sandbox.
        """
        context = self._context
        now = context.clock.now()
        asked = found.session
        kind = "warm" if status.warm else "cold"
        for _ in range(_TRIES):
            session = found.session
            new = replace(
                with_status(session, status, now), host=host, address=address, placer=None, placer_until=None
            )
            ops: list[Op] = [
                records.save(new, found.version),
                records.leave_queue(session),
                records.assign(new, host, now),
                records.event_op(
                    session,
                    found.version,
                    now,
                    "session.placed",
                    f"A {kind} sandbox of epoch {new.epoch} is {status.state} on host {host}.",
                    host=host,
                    epoch=new.epoch,
                    warm=status.warm,
                    waited_s=None if session.ready_at else (now - session.created_at).total_seconds(),
                    start_ms=duration_ms,
                    timings_ms=status.timings_ms,
                ),
            ]
            try:
                await context.store.transact(ops)
                break
            except ConditionFailed:
                again = await records.read(context.store, session.id)
                if again is not None and _waits_for(again.session, status.epoch):
                    found = again
                    continue
            if again is None or again.session.host != host or again.session.epoch != status.epoch:
                context.background.start(
                    self._discard(HostRef(id=host, address=address), status), "end unwanted sandbox"
                )
            return again.session if again else session
        else:
            # Its host reports it: a heartbeat writes it down, once others leave the session alone.
            return session
        log.info(
            "session.placed",
            session_id=new.id,
            host_id=host,
            epoch=new.epoch,
            warm=status.warm,
            state=status.state,
            duration_ms=duration_ms,
        )
        changes = patched(asked, new)
        if changes is not None:
            context.background.start(
                self.tell(HostRef(id=host, address=address), new.id, changes), "tell sandbox what changed"
            )
        context.waiters.notify(new.id)
        return new

    async def tell(self, host: HostRef, session: SessionId, changes: SandboxPatch) -> None:
        """Tell a sandbox what changed. Where it does not hear it, its heartbeats show that, and it is told again."""
        try:
            await self._context.agents.patch(host, session, changes)
        except ShoalError as error:
            log.warning("session.patch_lost", session_id=session, host_id=host.id, code=error.code.value)

    async def lost_start(self, found: Loaded, error: ErrorDetail, *, tell_host: bool = True) -> Session:
        """A sandbox that was being started failed on its host (as its heartbeat says): try again, or give up.

        Args:
            tell_host: False where the host is gone.
        """
        return await self._start_failed(found, error, retryable=True, tell_host=tell_host)

    async def _discard(self, host: HostRef, status: SandboxStatus) -> None:
        try:
            await self._context.agents.end(host, status.session, epoch=status.epoch, reason=EndReason.DELETED)
        except ShoalError:
            return

    async def _back(self, found: Loaded, phase: Phase) -> Session:
        """Back into the queue, or `no_capacity` for one that does not want to wait."""
        context = self._context
        session = found.session
        if not session.queue and session.state is SessionState.PENDING:
            why = await records.not_scaling(context.store, session.pool)
            said = "No host has room now, and the request does not queue." + (f" {why}" if why else "")
            error = ShoalError(ErrorCode.NO_CAPACITY, said)
            return await self._ending.end(found, EndReason.FAILED, str(error), error=error.body().error)
        self.blocked.add(session.pool)
        new = replace(session, phase=phase, placer=None, placer_until=None)
        ops: list[Op] = [records.save(new, found.version), records.queue_entry(new)]
        if new.phase is not session.phase:
            why = await records.not_scaling(context.store, session.pool)
            ops.append(
                records.standing_event_op(
                    session,
                    context.clock.now(),
                    "session.waiting",
                    f"No host of pool {session.pool} has room for it; it waits in the queue."
                    + (f" {why}" if why else ""),
                    resources=session.resources.model_dump(),
                )
            )
        try:
            await context.store.transact(ops)
        except ConditionFailed:
            again = await records.read(context.store, session.id)
            return again.session if again else session
        context.wake_reconciler.set()
        if new.phase is not session.phase:
            context.waiters.notify(new.id)
        return new

    async def _start_failed(
        self, found: Loaded, error: ErrorDetail, *, retryable: bool, tell_host: bool = True
    ) -> Session:
        """A start failed: the next epoch is tried while attempts are left."""
        context = self._context
        session = found.session
        attempts = session.attempts + 1
        log.warning(
            "session.start_failed",
            session_id=session.id,
            epoch=session.epoch,
            attempt=attempts,
            code=error.code,
            reason=error.message,
        )
        if not retryable or attempts >= context.settings.start_attempts:
            detail = f"{error.code}: {error.message}"
            return await self._ending.end(found, EndReason.FAILED, detail, error=error, tell_host=tell_host)
        now = context.clock.now()
        waiting = SessionState.RESTORING if session.state is SessionState.RESTORING else SessionState.PENDING
        new = records.moved(
            session,
            waiting,
            phase=Phase.QUEUED,
            epoch=session.epoch + 1,
            attempts=attempts,
            error=error,
            host=None,
            address=None,
            warm=None,
            placer=None,
            placer_until=None,
        )
        ops: list[Op] = [
            records.save(new, found.version),
            records.queue_entry(new),
            records.event_op(
                session,
                found.version,
                now,
                "session.start_failed",
                f"The sandbox of epoch {session.epoch} did not start: {error.message}",
                code=error.code,
                attempt=attempts,
            ),
        ]
        if session.host is not None:
            ops.append(records.unassign(session.host, session.id, session.epoch))
        try:
            await context.store.transact(ops)
        except ConditionFailed:
            again = await records.read(context.store, session.id)
            return again.session if again else session
        context.waiters.notify(new.id)
        context.wake_queue.set()
        return new

    async def _retire(self, found: Loaded) -> Loaded:
        """End the incarnation before this one, and learn how far it came."""
        context = self._context
        session = found.session
        old = session.retiring
        assert old is not None
        host = await context.fleet.host(old.host)
        status: SandboxStatus | None = None
        known = False
        if host is not None and host.address is not None:
            try:
                status = await context.agents.end(
                    HostRef(id=old.host, address=host.address),
                    session.id,
                    epoch=old.epoch,
                    reason=EndReason.DELETED,
                    wait_s=_RETIRE_S,
                )
                known = True
            except ShoalError as error:
                log.info(
                    "session.retire_failed", session_id=session.id, host_id=old.host, code=error.code.value
                )
        for _ in range(_TRIES):
            new = retired(found.session, status if known else None, gap=context.settings.seq_gap)
            try:
                await context.store.transact(
                    [records.save(new, found.version), records.unassign(old.host, session.id, old.epoch)]
                )
            except ConditionFailed:
                again = await records.read(context.store, session.id)
                if again is None:
                    raise ShoalError(ErrorCode.NOT_FOUND, f"No session {session.id}.") from None
                if again.session.retiring != old or again.session.state not in UNPLACED:
                    return again
                found = again
            else:
                return Loaded(session=new, version=found.version + 1)
        raise ShoalError(ErrorCode.UNAVAILABLE, f"Session {session.id} keeps changing.", retry_after_s=0.5)


def _waits_for(session: Session, epoch: int) -> bool:
    """Whether the session still wants the sandbox that was started for this epoch."""
    return session.epoch == epoch and session.host is None and session.state in UNPLACED
