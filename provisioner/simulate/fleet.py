"""Hosts and replicas of the lean model: what agents hold, what the records say of it, and what each replica knows.

Placement is the real `Board` and `PlacementMemory`. Modelled are the agent's admission (by the rule of the real one:
what its sandboxes hold), its heartbeats, and which of them a replica has seen.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from dataclasses import dataclass, field, replace
from datetime import datetime

from provisioner.board import Board
from provisioner.model import Source, WarmLevel
from provisioner.placement import Ask, HostView, PlacementMemory, Room, WarmName, choose, warm_name
from provisioner.plan import Waiting
from provisioner.simulate.scenario import AgentModel
from shoal.contract.base import HostId, SessionId
from shoal.contract.host import WarmKey
from shoal.contract.states import HostState, Substrate

SUBSTRATES = frozenset({Substrate.CONTAINER})
_NO_WARM: WarmName = ("", Substrate.CONTAINER, 0)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the sessions of one load are."""

    ask: Ask
    key: WarmKey
    source: Source


@dataclass(slots=True, eq=False)
class LeanSession:
    """A session. `asked_s`: when it was asked for, or lost its host; `ends`: the timer of its end."""

    id: SessionId
    kind: Kind
    hold_s: float
    asked_s: float
    first_wave: bool
    leased: bool = True
    restored: bool = False
    host: LeanHost | None = None
    confirmed: bool = False
    ran_s: float | None = None
    ends: asyncio.TimerHandle | None = None
    entry: Waiting | None = None


@dataclass(slots=True, eq=False)
class LeanHost:
    """A host: the truth (`held`, `sessions`, `ready`), and its record (`assigned`, `view`, `state`).

    Attributes:
        held: What its agent holds, sandboxes that are starting included.
        assigned: What the records say is on it.
        view: As the last heartbeat that was written down.
        changed: Whether that is old.
    """

    id: HostId
    capacity: Room
    created_at: datetime
    state: HostState = HostState.STARTING
    registered_at: datetime | None = None
    heard_at: datetime | None = None
    busy_at: datetime | None = None
    alive: bool = False
    drain: bool = False
    draining: bool = False
    held: Room = field(default_factory=Room)
    assigned: Room = field(default_factory=Room)
    sessions: dict[LeanSession, None] = field(default_factory=dict)
    ready: dict[WarmName, int] = field(default_factory=dict)
    levels: tuple[WarmLevel, ...] = ()
    view: HostView | None = None
    told_sessions: int = 0
    told_sandboxes: int = 0
    beat: int = 0
    changed: bool = True
    layers: frozenset[str] = frozenset()
    slots: list[float] = field(default_factory=list)

    def admits(self, room: Room) -> bool:
        """The agent's last word. Warm sandboxes give way."""
        return self.alive and not self.draining and (self.held + room).fits(self.capacity)

    def start(self, ask: Ask, now_s: float, model: AgentModel) -> float:
        """Take a sandbox in; answers when it runs."""
        self.held = self.held + ask.room
        self.changed = True
        warm = self.ready.get(ask.warm, 0)
        took_s = model.cold_s
        if warm:
            self.ready[ask.warm] = warm - 1
            took_s = model.warm_s
        self.layers |= ask.layers
        if not self.slots:
            self.slots = [0.0] * model.at_once
        end_s = max(now_s, self.slots[0]) + took_s
        heapq.heapreplace(self.slots, end_s)
        return end_s

    def refill(self, count: int, rooms: dict[WarmName, Room]) -> None:
        """Make warm sandboxes up to the levels, so many at the most, while there is room beside what sessions hold."""
        wanted = {warm_name(level.key): level.count for level in self.levels}
        for name in [name for name in self.ready if name not in wanted]:
            del self.ready[name]
            self.changed = True
        used = self.held
        for name, number in self.ready.items():
            for _ in range(number):
                used = used + rooms[name]
        for name, level in wanted.items():
            if self.ready.get(name, 0) > level:
                self.ready[name] = level
                self.changed = True
            while count and self.ready.get(name, 0) < level and (used + rooms[name]).fits(self.capacity):
                self.ready[name] = self.ready.get(name, 0) + 1
                used = used + rooms[name]
                count -= 1
                self.changed = True

    def report(self, now: datetime, pool: str) -> None:
        """A heartbeat becomes the record."""
        self.beat += 1
        self.heard_at = now
        if not self.changed:
            return
        self.changed = False
        self.told_sessions, self.told_sandboxes = self.assigned.sandboxes, len(self.sessions)
        if self.assigned.sandboxes:
            self.busy_at = now
        self.show(pool)

    def show(self, pool: str) -> None:
        """Write the record."""
        self.view = HostView(
            id=self.id,
            pool=pool,
            open=self.state is HostState.READY and not self.drain and not self.draining,
            substrates=SUBSTRATES,
            capacity=self.capacity,
            held=self.assigned,
            warm=dict(self.ready),
            layers=self.layers,
        )


class Replica:
    """A process of the control plane. `policy` is who chooses: `shoal`, `random` or `least`."""

    def __init__(self, chance: random.Random, policy: str, sample: int) -> None:
        self.board = Board()
        self.memory = PlacementMemory()
        self.chance = chance
        self.policy = policy
        self.sample = sample
        self.blocked = False
        self.wake = asyncio.Event()
        self.limit = asyncio.Semaphore(32)
        self.read_s = -1.0
        self.read_to = 0

    def choose(self, ask: Ask, tried: frozenset[HostId]) -> HostView | None:
        """The host for it."""
        if self.policy != "shoal":
            ask = replace(ask, warm=_NO_WARM, layers=frozenset())
        if self.policy == "random":
            # Any that looks as if it had room.
            return self.board.choose(ask, self.chance, sample=1, tried=tried)
        if self.policy == "least":
            # The least filled of all by the view alone: everybody's first idea.
            views = self.board.views()
            return choose(ask, views, self.chance, sample=len(views) or 1, tried=tried)
        return self.board.choose(
            ask,
            self.chance,
            sample=self.sample,
            extra=self.memory.extra(),
            claimed=self.memory.claimed(),
            tried=tried,
            closed=self.memory.closed(),
        )
