"""What this replica knows of the hosts: read from the store, made fresher by the heartbeats that it handles itself.

Nothing here is needed for correctness: a fresh replica knows it all after one read, and agents have the last word.
"""

from __future__ import annotations

from datetime import timedelta

from provisioner import roster
from provisioner.board import Board, Chance
from provisioner.clock import Clock
from provisioner.model import Host
from provisioner.placement import Ask, HostView, Own, PlacementMemory, Room, warm_name
from provisioner.settings import ProvisionerSettings
from provisioner.store.steady import SteadyStore
from shoal.contract.base import HostId, SessionId
from shoal.contract.host import SandboxStatus
from shoal.contract.states import HostState

#: Seconds for which what was read from the store is good enough for placement.
FRESH_S = 0.5
#: How many hosts one look reads again at the most: more would cost every replica more than placement gains by it.
_LOOK = 100


def view(host: Host, settings: ProvisionerSettings, *, heard: bool) -> HostView:
    """A host as placement sees it."""
    load_share = 0.0
    if host.capacity is not None:
        load_share = host.load.cpu_used_millis / max(1, host.capacity.cpu_millis)
    return HostView(
        id=host.id,
        pool=host.pool,
        open=host.state is HostState.READY and heard and not host.drain and not host.draining,
        substrates=frozenset(host.substrates),
        capacity=Room.of(host.capacity),
        held=Room.of(host.held),
        warm={warm_name(report.key): report.ready for report in host.warm},
        layers=frozenset(host.layers),
        load=load_share,
    )


class Fleet:
    """The hosts as of now or nearly, this replica's own placements, and what sandboxes last said."""

    def __init__(self, store: SteadyStore, clock: Clock, settings: ProvisionerSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._hosts: dict[HostId, Host] = {}
        self._board = Board()
        self._put: dict[HostId, tuple[Host, bool]] = {}
        self._read_at: float | None = None
        self._all = True
        self._look = 0
        self._looked: dict[HostId, int] = {}
        self._heard: dict[HostId, float] = {}
        self._seen: dict[HostId, dict[tuple[SessionId, int], SandboxStatus]] = {}
        self.memory = PlacementMemory()

    async def take(
        self, ask: Ask, chance: Chance, *, tried: frozenset[HostId] = frozenset()
    ) -> tuple[HostId, Own] | None:
        """Choose a host for it and count its room as taken from here on; None when no host can take it."""
        await self._refresh()
        host = self._board.choose(
            ask,
            chance,
            sample=self._settings.sample,
            extra=self.memory.extra(),
            claimed=self.memory.claimed(),
            tried=tried,
            closed=self.memory.closed(),
        )
        return None if host is None else (host.id, self.memory.begin(host.id, ask.room, ask.warm))

    async def views(self) -> list[HostView]:
        """The hosts for placement."""
        await self._refresh()
        return self._board.views()

    async def host(self, id: HostId) -> Host | None:
        """One host, or None."""
        await self._refresh()
        return self._hosts.get(id)

    def ids(self) -> frozenset[HostId]:
        """The hosts that this replica knows of."""
        return frozenset(self._hosts)

    def beat(self, id: HostId) -> int:
        """The number of the last heartbeat known of a host; 0 for none."""
        host = self._hosts.get(id)
        return host.beat if host else 0

    def heard(self, host: Host, statuses: list[SandboxStatus], *, counted_at: float | None = None) -> None:
        """A heartbeat arrived at this replica. `counted_at`: since when (monotonic) what its sessions hold was counted;
        None: it was not counted for this heartbeat, and this replica's own placements are remembered on."""
        self._hosts[host.id] = host
        self._heard[host.id] = self._clock.monotonic()
        self._show(host)
        self._seen[host.id] = {(status.session, status.epoch): status for status in statuses}
        if counted_at is not None:
            self.memory.heard(host.id, host.beat)
            self.memory.counted(host.id, counted_at)

    def gone(self, id: HostId) -> None:
        """A host is no more."""
        self._hosts.pop(id, None)
        self._put.pop(id, None)
        self._board.drop(id)
        self._heard.pop(id, None)
        self._seen.pop(id, None)
        self.memory.forget(id)

    def status(self, host: HostId | None, session: SessionId, epoch: int) -> SandboxStatus | None:
        """What a sandbox last said here; None when this replica has not heard of it."""
        return self._seen.get(host, {}).get((session, epoch)) if host is not None else None

    def stale(self) -> None:
        """Read all of them again at the next question."""
        self._read_at = None
        self._all = True

    def _show(self, host: Host) -> None:
        """Put a host on the board as it is now, unless it is there like that."""
        heard = self._is_heard(host)
        before = self._put.get(host.id)
        if before is None or before[0] is not host or before[1] is not heard:
            self._put[host.id] = (host, heard)
            self._board.put(view(host, self._settings, heard=heard))

    def _is_heard(self, host: Host) -> bool:
        # Half a lease of silence is long before it is declared lost, and soon enough to send nobody there.
        limit = self._settings.lease_s / 2
        at = self._heard.get(host.id)
        if at is not None and self._clock.monotonic() - at <= limit:
            return True
        return host.heard_at is not None and self._clock.now() - host.heard_at <= timedelta(seconds=limit)

    async def _refresh(self) -> None:
        now = self._clock.monotonic()
        if self._read_at is not None and now - self._read_at < FRESH_S:
            return
        self._read_at = now
        ids = await roster.listed(self._store)
        for id in self._hosts.keys() - set(ids):
            self.gone(id)
        # One look after the other goes through a large fleet; who is new, or was not looked at for long, comes first.
        due = sorted(ids, key=lambda id: self._looked.get(id, 0))
        if not self._all:
            due = due[:_LOOK]
        self._all = False
        found = {host.id: host for host in await roster.read(self._store, due)}
        self._looked = {id: self._looked[id] for id in ids if id in self._looked}
        self._look += 1
        for id in due:
            self._looked[id] = self._look
            host = found.get(id)
            if host is None or host.state is HostState.GONE:
                self.gone(id)
                continue
            known = self._hosts.get(id)
            # A heartbeat handled here may be newer than what it wrote down; the control plane's own marks are not.
            if known is None or known.beat <= host.beat or known.state is not host.state:
                self._hosts[id] = host
                self.memory.heard(id, host.beat)
        for host in self._hosts.values():
            # Silence shows by time alone.
            self._show(host)
