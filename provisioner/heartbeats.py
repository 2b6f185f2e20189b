"""Heartbeats: what hosts report becomes what the records say, and the reply says what hosts are to do.

A report is a level, whole and repeatable. What was digested once is remembered per sandbox, so that a heartbeat of a
host where nothing changed reads two items and writes one at the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from provisioner import keys
from provisioner.agents.port import HostRef
from provisioner.context import Context, log
from provisioner.departure import Departure
from provisioner.host_events import HostEvents
from provisioner.host_reports import heard, room_grew, worth_writing
from provisioner.lifecycle import UNPLACED
from provisioner.model import Assignment, Host, HostOrders, Session, dump, load, replace
from provisioner.sessions import Sessions, records
from provisioner.sessions.ending import by_itself
from provisioner.sessions.records import Loaded
from provisioner.sessions.starting import settings_of, start_error, with_status
from provisioner.snapshots import Snapshots
from provisioner.store.port import ConditionFailed, Put, VersionIs
from provisioner.usage import Usage
from shoal.contract.base import HostId, SessionId, SnapshotId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Heartbeat, HeartbeatReply, Incarnation, SandboxStatus, WarmOrder
from shoal.contract.states import EndReason, HostState, SessionState

#: Seconds after which an unchanged sandbox is compared with its record again, and twice as long each time until
#: `_SETTLED_S`: 380,000 sandboxes read every 5 s would be 76,000 read units/s. Steps that go on are written down then.
_RECHECK_S = 5.0
_SETTLED_S = 60.0
#: Seconds for which a sandbox may be missing in its host's reports: the report may be older than its placing.
_MISSING_S = 10.0
#: Seconds between two looks for snapshots that a host never heard of.
_REMIND_S = 15.0
#: Seconds for which a count of what is on a host serves: in bursts hosts report many times a second; and while a host
#: reports the very same sandboxes.
_COUNT_S = 0.5
_SAME_S = 5.0
_OVER = ("ended", "failed")


class Verdict(Enum):
    """What a host is to do about a sandbox."""

    KEEP = auto()
    RELEASE = auto()
    FORGET = auto()
    #: As KEEP, and look again at the next heartbeat.
    UNSETTLED = auto()


@dataclass(frozen=True, slots=True)
class _Digested:
    mark: tuple[object, ...]
    verdict: Verdict
    at: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class _Counted:
    """What was on a host by the records when it reported these sandboxes (and whether each was over)."""

    at: float
    reported: dict[tuple[SessionId, int], bool]
    found: list[Assignment]


class Heartbeats:
    """Takes heartbeats."""

    def __init__(
        self, context: Context, sessions: Sessions, snapshots: Snapshots, usage: Usage, departure: Departure
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._snapshots = snapshots
        self._usage = usage
        self._departure = departure
        self._digested: dict[HostId, dict[tuple[SessionId, int], _Digested]] = {}
        self._counted: dict[HostId, _Counted] = {}
        self._reminded: dict[HostId, float] = {}
        self._events = HostEvents(context)

    async def take(self, id: HostId, body: Heartbeat) -> HeartbeatReply:
        """Take in what a host knows; answer what it is to do.

        Raises:
            ShoalError: UNAUTHENTICATED for a host that is not known, or another boot of it.
        """
        context = self._context
        stored, ordered = await context.store.get_many([keys.host(id), keys.orders(id)])
        host = load(Host, stored.item) if stored else None
        if host is None or stored is None or host.boot_id != body.boot_id:
            raise ShoalError(ErrorCode.UNAUTHENTICATED, "This host is not known here.")
        orders = load(HostOrders, ordered.item) if ordered else HostOrders(host=id)
        if host.state in (HostState.LOST, HostState.GONE):
            # Its sessions are elsewhere by now: it must end all it has.
            return self._reply(orders, [], shutdown=True)
        if body.beat <= host.beat and host.said_at is not None and body.at <= host.said_at:
            return self._reply(orders, await self._warm(orders))
        for gone in self._digested.keys() - context.fleet.ids() - {id}:
            del self._digested[gone]
            self._counted.pop(gone, None)
            self._reminded.pop(gone, None)
        known = self._digested.setdefault(id, {})
        verdicts = await self._sandboxes(host, body, known)
        assigned, counted_at = await self._assignments(host, body, known)
        sessions = {session for session, _ in known}
        acked_event = await self._events.take(host, body.events, sessions)
        acked_usage = await self._usage.store(id, body.usage)
        forget = [taken.snapshot for taken in body.snapshots if await self._snapshots.reported(id, taken)]
        await self._remind(host, body)
        new = heard(host, body, assigned, acked_event, context.clock.now())
        context.fleet.heard(new, body.sandboxes, counted_at=counted_at)
        if worth_writing(host, new, at_least_s=context.settings.lost_margin_s / 4):
            try:
                await context.store.transact(
                    [Put(key=keys.host(id), item=dump(new), conditions=(VersionIs(version=stored.version),))]
                )
            except ConditionFailed:
                # The reconciler marked it meanwhile; the next heartbeat is written.
                context.fleet.stale()
        if room_grew(host, new) or any(verdict is Verdict.FORGET for verdict in verdicts.values()):
            context.wake_queue.set()
        return self._reply(
            orders,
            await self._warm(orders),
            verdicts=verdicts,
            usage=acked_usage,
            event=acked_event,
            forget=forget,
        )

    async def _remind(self, host: Host, body: Heartbeat) -> None:
        moment = self._context.clock.monotonic()
        if host.address is None or moment - self._reminded.get(host.id, -_REMIND_S) < _REMIND_S:
            return
        self._reminded[host.id] = moment
        await self._snapshots.remind(host.id, host.address, [taken.snapshot for taken in body.snapshots])

    # -- sandboxes ------------------------------------------------------------------------------------------------

    async def _sandboxes(
        self, host: Host, body: Heartbeat, known: dict[tuple[SessionId, int], _Digested]
    ) -> dict[tuple[SessionId, int], Verdict]:
        now = self._context.clock.monotonic()
        verdicts: dict[tuple[SessionId, int], Verdict] = {}
        fresh: list[SandboxStatus] = []
        for status in body.sandboxes:
            name = (status.session, status.epoch)
            before = known.get(name)
            settled = (
                before is not None
                and before.mark == _mark(status)
                and before.verdict is not Verdict.UNSETTLED
                and now - before.at < before.wait_s
            )
            if settled and before is not None:
                verdicts[name] = before.verdict
            else:
                fresh.append(status)
        stored = await self._context.store.get_many([keys.session(status.session) for status in fresh])
        for status, item in zip(fresh, stored, strict=True):
            name = (status.session, status.epoch)
            found = records.loaded(item) if item else None
            before = known.get(name)
            try:
                verdict = await self._digest(host, status, found, before)
            except (ConditionFailed, ShoalError) as error:
                log.info("heartbeat.unsettled", session_id=status.session, host_id=host.id, reason=str(error))
                verdict = Verdict.UNSETTLED
            verdicts[name] = verdict
            same = before is not None and before.mark == _mark(status) and before.verdict is verdict
            same = same and (found is None or status.settings in ("", settings_of(found.session).mark()))
            wait_s = min(2 * before.wait_s, _SETTLED_S) if before is not None and same else _RECHECK_S
            known[name] = _Digested(_mark(status), verdict, now, wait_s)
        for name in known.keys() - verdicts.keys():
            del known[name]
            self._events.forget(name[0])
        return verdicts

    async def _digest(
        self, host: Host, status: SandboxStatus, found: Loaded | None, before: _Digested | None
    ) -> Verdict:
        over = status.state in _OVER
        gone = Verdict.FORGET if over else Verdict.RELEASE
        if found is None:
            return gone
        session = found.session
        if session.epoch == status.epoch and session.host == host.id:
            return await self._own(status, found, before)
        if session.epoch == status.epoch and session.host is None and session.state in UNPLACED:
            return await self._unconfirmed(host, status, found)
        retiring = session.retiring
        if retiring is not None and retiring.host == host.id and retiring.epoch == status.epoch:
            # Whoever places the session is ending this one, and wants to hear how far it came.
            return Verdict.UNSETTLED
        if over and status.journal_flushed and status.epoch < session.epoch:
            await self._keep_journal(found, status.epoch)
        return gone

    async def _own(self, status: SandboxStatus, found: Loaded, before: _Digested | None) -> Verdict:
        """The record says that this is the session's sandbox."""
        session, ending = found.session, self._sessions.ending
        over = status.state in _OVER
        if session.state is SessionState.ENDED:
            return Verdict.FORGET if over else Verdict.RELEASE
        if session.state is SessionState.ENDING:
            if over:
                await ending.finished(session.id, session.epoch, status)
                return Verdict.FORGET
            if status.state != "ending":
                # The command to end it was lost, or is on its way.
                self._context.background.start(ending.command(session), "end sandbox")
            return Verdict.KEEP
        if over or status.state == "ending":
            starts = session.state in (SessionState.STARTING, SessionState.RESTORING)
            if status.state == "failed" and starts:
                await self._sessions.placing.lost_start(found, start_error(status))
                return Verdict.FORGET
            end = by_itself(status)
            if over and end.reason is EndReason.HOST_LOST and session.on_host_loss == "restore":
                # The host ends in good order: the session goes on elsewhere, and nothing of its steps is unknown.
                moved = await self._sessions.changing.host_lost(found, "Its host was ended.", status)
                return Verdict.FORGET if moved is not None else Verdict.UNSETTLED
            await ending.end(found, end.reason, end.detail, error=status.error, tell_host=False)
            if not over:
                return Verdict.KEEP
            await ending.finished(session.id, session.epoch, status)
            return Verdict.FORGET
        if status.state == "starting" and session.state in (SessionState.RUNNING, SessionState.PAUSED):
            # The report was on its way when the sandbox told whoever started it that it runs.
            return Verdict.UNSETTLED
        if status.state == "starting" and session.state not in (
            SessionState.STARTING,
            SessionState.RESTORING,
        ):
            # Built before the agent answered that it runs.
            return Verdict.UNSETTLED
        new = with_status(session, status, self._context.clock.now())
        if self._worth_noting(session, new, before):
            await self._context.store.transact([records.save(new, found.version)])
            self._context.waiters.notify(session.id)
        self._tell_again(new, status)
        return Verdict.KEEP

    def _tell_again(self, session: Session, status: SandboxStatus) -> None:
        """A sandbox that goes by other settings than the record has missed a patch, or does not know it yet."""
        if not status.settings or session.host is None or session.address is None:
            return
        wanted = settings_of(session)
        if status.settings == wanted.mark():
            return
        log.info("session.patch_again", session_id=session.id, host_id=session.host, epoch=session.epoch)
        host = HostRef(id=session.host, address=session.address)
        self._context.background.start(
            self._sessions.placing.tell(host, session.id, wanted), "tell sandbox its settings again"
        )

    async def _unconfirmed(self, host: Host, status: SandboxStatus, found: Loaded) -> Verdict:
        """A session without a host, started here by somebody who has not written it down: yet, or ever."""
        session = found.session
        now = self._context.clock.now()
        if session.placer_until is not None and session.placer_until > now:
            return Verdict.UNSETTLED
        if status.state in _OVER:
            await self._sessions.placing.lost_start(found, start_error(status))
            return Verdict.FORGET
        if status.state == "ending" or host.address is None:
            return Verdict.UNSETTLED
        log.info("session.adopted", session_id=session.id, host_id=host.id, epoch=session.epoch)
        await self._sessions.placing.confirm(found, host.id, host.address, status)
        return Verdict.KEEP

    async def _keep_journal(self, found: Loaded, epoch: int) -> None:
        session = found.session
        if epoch not in session.journals:
            new = replace(session, journals=tuple(sorted((*session.journals, epoch))))
            await self._context.store.transact([records.save(new, found.version)])

    def _worth_noting(self, old: Session, new: Session, before: _Digested | None) -> bool:
        if replace(old, last_seq=0, phase=None) != replace(new, last_seq=0, phase=None):
            return True
        if old.phase is not new.phase:
            return True
        # Steps alone are written down now and then: the journal is the truth.
        stale = before is None or self._context.clock.monotonic() - before.at >= _RECHECK_S
        return new.last_seq > old.last_seq and stale

    # -- what is not there -----------------------------------------------------------------------------------------

    async def _assignments(
        self, host: Host, body: Heartbeat, known: dict[tuple[SessionId, int], _Digested]
    ) -> tuple[list[Assignment], float | None]:
        """What the records say is on the host, and from when on that was read (None: some time ago); what is missing
        there for long is lost."""
        moment = self._context.clock.monotonic()
        counted = self._counted.get(host.id)
        reported = {(status.session, status.epoch): status.state in _OVER for status in body.sandboxes}
        if counted is not None:
            serves_s = _SAME_S if reported == counted.reported else _COUNT_S
            if moment - counted.at < serves_s:
                return counted.found, None
        stored = await self._context.store.query_all(f"ON#{host.id}")
        assigned = [load(Assignment, item.item) for item in stored]
        now = self._context.clock.now()
        here: list[Assignment] = []
        looks = {(each.session, each.epoch): each.look for each in counted.found} if counted else {}
        for assignment in assigned:
            name = (assignment.session, assignment.epoch)
            if assignment.look is not None and assignment.look != looks.get(name):
                known.pop(name, None)
            missing = name not in reported
            if missing and (now - assignment.since).total_seconds() > _MISSING_S:
                log.warning(
                    "sandbox.missing",
                    session_id=assignment.session,
                    epoch=assignment.epoch,
                    host_id=host.id,
                )
                await self._departure.lost(assignment, "The sandbox is not on its host any more.")
            else:
                here.append(assignment)
        self._counted[host.id] = _Counted(moment, reported, here)
        return here, moment

    async def _warm(self, orders: HostOrders) -> list[WarmOrder]:
        found: list[WarmOrder] = []
        for level in orders.warm:
            try:
                source = await self._context.sources.sandbox(level.source)
            except ShoalError as error:
                log.warning("warm.unreadable", digest=level.source.digest, code=error.code.value)
                continue
            found.append(WarmOrder(key=level.key, source=source, count=level.count))
        return found

    def _reply(
        self,
        orders: HostOrders,
        warm: list[WarmOrder],
        *,
        verdicts: dict[tuple[SessionId, int], Verdict] | None = None,
        usage: int = 0,
        event: int = 0,
        forget: list[SnapshotId] | None = None,
        shutdown: bool = False,
    ) -> HeartbeatReply:
        named = (verdicts or {}).items()
        return HeartbeatReply(
            lease_s=self._context.settings.lease_s,
            heartbeat_s=self._context.settings.heartbeat_s,
            keys=self._context.signer.public_keys,
            warm=warm,
            drain=orders.drain or shutdown,
            shutdown=orders.shutdown or shutdown,
            release=[
                Incarnation(session=s, epoch=e) for (s, e), verdict in named if verdict is Verdict.RELEASE
            ],
            forget=[
                Incarnation(session=s, epoch=e) for (s, e), verdict in named if verdict is Verdict.FORGET
            ],
            forget_snapshots=forget or [],
            acked_usage=usage,
            acked_event=event,
        )


def _mark(status: SandboxStatus) -> tuple[object, ...]:
    """What of a status matters to the record, but for steps."""
    return (
        status.state,
        status.phase,
        status.end_reason,
        status.journal_flushed,
        status.warm,
        status.error is None,
        len(status.lost_actions),
        status.settings,
    )
