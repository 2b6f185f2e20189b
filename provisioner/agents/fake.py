"""Agents in memory: hosts that admit, run and end sandboxes, scriptable, with heartbeats to hand in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from provisioner.agents.port import HostRef
from provisioner.scripted import Scripted
from shoal.contract.base import HostId, SessionId, SnapshotId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import (
    Capacity,
    Heartbeat,
    HeartbeatReply,
    SandboxPatch,
    SandboxStart,
    SandboxStatus,
    SnapshotTake,
    SnapshotTaken,
    WarmOrder,
    WarmReport,
)
from shoal.contract.images import Layer
from shoal.contract.states import EndReason, Substrate


@dataclass
class FakeHost:
    """One host. `cold` sandboxes stay `starting` until `run_all`; a `full` host refuses all."""

    id: HostId
    address: str
    capacity: Capacity
    cold: bool = False
    reachable: bool = True
    full: bool = False
    draining: bool = False
    beat: int = 0
    boot_id: str = "boot"
    starts: dict[SessionId, SandboxStart] = field(default_factory=dict)
    sandboxes: dict[tuple[SessionId, int], SandboxStatus] = field(default_factory=dict)
    snapshots: dict[SnapshotId, SnapshotTaken] = field(default_factory=dict)
    orders: list[WarmOrder] = field(default_factory=list)
    patches: list[SandboxPatch] = field(default_factory=list)
    acknowledged: set[tuple[SessionId, int]] = field(default_factory=set)

    def live(self) -> list[SandboxStatus]:
        """What holds room."""
        return [status for status in self.sandboxes.values() if status.state not in ("ended", "failed")]

    def reserved(self) -> Capacity:
        """What the sandboxes of sessions hold."""
        known = [status.session for status in self.live() if status.session in self.starts]
        resources = [self.starts[session].resources for session in known]
        return Capacity(
            cpu_millis=sum(each.cpu_millis for each in resources),
            memory_mib=sum(each.memory_mib for each in resources),
            disk_mib=sum(each.disk_mib for each in resources),
            sandboxes=len(resources),
        )

    def change(self, session: SessionId, **changes: object) -> SandboxStatus:
        """Change how a session's newest sandbox is."""
        key = max(key for key in self.sandboxes if key[0] == session)
        self.sandboxes[key] = self.sandboxes[key].model_copy(update=changes)
        return self.sandboxes[key]

    def settings(self, session: SessionId) -> SandboxPatch:
        """What a session's newest sandbox goes by."""
        start = self.starts[session]
        acknowledged = not start.rewound or (session, start.epoch) in self.acknowledged
        return start.settings(acknowledged=acknowledged)

    def hear(self, session: SessionId, patch: SandboxPatch) -> None:
        """Go by a patch from now on."""
        start = self.starts[session]
        given = {name: getattr(patch, name) for name in patch.model_fields_set - {"epoch", "acknowledged"}}
        changes = {
            name: value for name, value in given.items() if value is not None or name.startswith("idle")
        }
        self.starts[session] = start.model_copy(update=changes)
        if patch.acknowledged:
            self.acknowledged.add((session, start.epoch))
        self.change(session, settings=self.settings(session).mark())

    def run_all(self) -> None:
        """Let everything that starts run."""
        for key, status in self.sandboxes.items():
            if status.state == "starting":
                self.sandboxes[key] = status.model_copy(update={"state": "running", "phase": None})

    def heartbeat(self, now: datetime) -> Heartbeat:
        """What the agent would report now."""
        self.beat += 1
        warm = [WarmReport(key=order.key, ready=order.count) for order in self.orders]
        return Heartbeat(
            boot_id=self.boot_id,
            beat=self.beat,
            at=now,
            address=self.address,
            capacity=self.capacity,
            reserved=self.reserved(),
            substrates=[Substrate.CONTAINER],
            draining=self.draining,
            sandboxes=list(self.sandboxes.values()),
            warm=warm,
            snapshots=list(self.snapshots.values()),
        )

    def obey(self, reply: HeartbeatReply) -> None:
        """Do what a reply says, at once."""
        self.orders = list(reply.warm)
        self.draining = reply.drain
        for gone in [*reply.release, *reply.forget]:
            self.sandboxes.pop((gone.session, gone.epoch), None)
        for snapshot in reply.forget_snapshots:
            self.snapshots.pop(snapshot, None)


class FakeAgents(Scripted[ShoalError]):
    """The `AgentClient` port over `FakeHost`s.

    `fail_call` scripts the n-th call from now: `after` lets it take effect and loses the answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hosts: dict[HostId, FakeHost] = {}
        #: Called inside every call, before its effect: where a test makes something happen in between.
        self.meanwhile: Callable[[str], None] | None = None

    def add(self, id: str, **about: object) -> FakeHost:
        """A new host."""
        capacity = about.pop(
            "capacity", Capacity(cpu_millis=100_000, memory_mib=100_000, disk_mib=1_000_000, sandboxes=100)
        )
        host = FakeHost(id=HostId(id), address=f"http://{id}", capacity=capacity, **about)  # type: ignore[arg-type]
        self.hosts[host.id] = host
        return host

    def _usual_error(self, *, after: bool) -> ShoalError:
        return ShoalError(ErrorCode.HOST_UNREACHABLE, "scripted", details={"sent": after})

    async def start(self, host: HostRef, start: SandboxStart) -> SandboxStatus:
        """As the port says."""
        agent, lost = await self._reach(host, f"start {start.session} {start.epoch}")
        key = (start.session, start.epoch)
        if key not in agent.sandboxes:
            held, asked = agent.reserved(), start.resources
            if (
                held.sandboxes + 1 > agent.capacity.sandboxes
                or held.cpu_millis + asked.cpu_millis > agent.capacity.cpu_millis
                or held.memory_mib + asked.memory_mib > agent.capacity.memory_mib
                or held.disk_mib + asked.disk_mib > agent.capacity.disk_mib
                or agent.draining
                or agent.full
            ):
                raise ShoalError(ErrorCode.HOST_REFUSED, "full")
            agent.starts[start.session] = start
            agent.sandboxes[key] = SandboxStatus(
                session=start.session,
                epoch=start.epoch,
                state="starting" if agent.cold else "running",
                last_seq=start.first_seq - 1,
                settings=agent.settings(start.session).mark(),
            )
        self._end(lost)
        return agent.sandboxes[key]

    async def status(self, host: HostRef, session: SessionId, *, wait_s: float = 0.0) -> SandboxStatus:
        """As the port says."""
        agent, lost = await self._reach(host, f"status {session}")
        self._end(lost)
        return self._newest(agent, session)

    async def patch(self, host: HostRef, session: SessionId, patch: SandboxPatch) -> SandboxStatus:
        """As the port says."""
        agent, lost = await self._reach(host, f"patch {session}")
        newest = self._newest(agent, session)
        if newest.epoch != patch.epoch:
            raise ShoalError(ErrorCode.EPOCH_MISMATCH, "another epoch runs here")
        agent.patches.append(patch)
        agent.hear(session, patch)
        self._end(lost)
        return self._newest(agent, session)

    async def end(
        self, host: HostRef, session: SessionId, *, epoch: int, reason: EndReason, wait_s: float = 0.0
    ) -> SandboxStatus:
        """As the port says."""
        agent, lost = await self._reach(host, f"end {session} {epoch}")
        status = agent.sandboxes.get((session, epoch))
        if status is None:
            raise ShoalError(ErrorCode.NOT_FOUND, "no such sandbox")
        ended = status.model_copy(update={"state": "ended", "end_reason": reason, "journal_flushed": True})
        agent.sandboxes[(session, epoch)] = ended
        self._end(lost)
        return ended

    async def take_snapshot(self, host: HostRef, session: SessionId, take: SnapshotTake) -> SnapshotTaken:
        """As the port says; the layer is named after the snapshot."""
        agent, lost = await self._reach(host, f"snapshot {session}")
        status, start = self._newest(agent, session), agent.starts[session]
        digest = "sha256:" + take.snapshot.encode().hex().ljust(64, "0")[:64]
        layer = Layer(digest=digest, diff_id=digest, size_bytes=10, role="snapshot")
        agent.snapshots[take.snapshot] = SnapshotTaken(
            snapshot=take.snapshot,
            session=session,
            epoch=take.epoch,
            state="uploaded",
            seq=status.last_seq,
            layers=[*start.source.layers, layer],
            image_digest=start.source.image_digest,
            config=start.source.config,
            size_bytes=10,
        )
        self._end(lost)
        return agent.snapshots[take.snapshot]

    async def snapshot_status(
        self, host: HostRef, session: SessionId, snapshot: SnapshotId, *, wait_s: float = 0.0
    ) -> SnapshotTaken:
        """As the port says."""
        agent, lost = await self._reach(host, f"snapshot_status {snapshot}")
        self._end(lost)
        if snapshot not in agent.snapshots:
            raise ShoalError(ErrorCode.NOT_FOUND, "no such snapshot")
        return agent.snapshots[snapshot]

    async def close(self) -> None:
        """As the port says."""

    @staticmethod
    def _newest(agent: FakeHost, session: SessionId) -> SandboxStatus:
        found = [status for (name, _), status in agent.sandboxes.items() if name == session]
        if not found:
            raise ShoalError(ErrorCode.NOT_FOUND, "no such sandbox")
        return max(found, key=lambda status: status.epoch)

    def _recorded(self, call: str) -> None:
        if self.meanwhile is not None:
            self.meanwhile(call)

    async def _reach(self, host: HostRef, call: str) -> tuple[FakeHost, ShoalError | None]:
        lost = await self._begin(call)
        agent = self.hosts.get(host.id)
        if agent is None or not agent.reachable:
            raise ShoalError(ErrorCode.HOST_UNREACHABLE, "no such host", details={"sent": False})
        return agent, lost
