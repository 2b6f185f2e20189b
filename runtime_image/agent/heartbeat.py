"""The heartbeat: what this host knows, what it is told to do, and the fence when nobody answers."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from runtime_image.agent.clock import Clock
from runtime_image.agent.control import ControlPlane
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.ports import RuntimePort
from runtime_image.agent.sandboxes import SandboxRuntimeError
from runtime_image.agent.service import FENCE, SandboxService
from runtime_image.agent.tokens import TokenVerifier
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Heartbeat, HeartbeatReply, Register, Registered
from shoal.contract.states import EndReason

_log = structlog.get_logger()

#: Changes within this time share one early heartbeat, seconds.
COALESCE_S = 0.02
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_IDENTITY = "host.json"


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """What a heartbeat is made of, and who carries out the reply."""

    register: Callable[[], Register]
    beat: Callable[[int], Heartbeat]
    obey: Callable[[HeartbeatReply, Heartbeat], None]


class Heart:
    """Registers this host, then beats: every `heartbeat_s`, and at once when something important has changed.

    A host whose beats nobody acknowledges for `lease_s` may have been declared lost and its sessions restored
    elsewhere: it freezes its sandboxes and refuses, until it is acknowledged again. An agent that restarts does not
    know how long that has been so: it begins fenced, and its first acknowledged beat lifts that.
    """

    def __init__(
        self,
        *,
        home: Path,
        control: ControlPlane,
        reporter: Reporter,
        service: SandboxService,
        runtime: RuntimePort,
        tokens: TokenVerifier,
        clock: Clock,
        go_on: Callable[[Hosted], Awaitable[None]],
    ) -> None:
        """`go_on` takes up the steps of a sandbox that an earlier agent left, once; it does nothing for others."""
        self._identity = home / _IDENTITY
        self._control = control
        self._reporter = reporter
        self._service = service
        self._runtime = runtime
        self._tokens = tokens
        self._clock = clock
        self._go_on = go_on
        self._wake = asyncio.Event()
        self._tried = asyncio.Event()
        self._registered: Registered | None = None
        #: Nothing is acknowledged to this process yet, whatever was to the one before.
        self._acked_at = -math.inf
        self._born_at = clock.monotonic()
        service.fenced = True
        self._lease_s = 30.0
        self._interval_s = 1.0
        self._beat = 0
        self.beats = self.missed = 0

    @property
    def host(self) -> str:
        """This host's id; empty before it has registered."""
        return self._registered.host if self._registered is not None else ""

    @property
    def ready(self) -> bool:
        """Whether a heartbeat was acknowledged within the lease."""
        return self.beats > 0 and not self._service.fenced

    def nudge(self) -> None:
        """Something important has changed: beat soon."""
        self._wake.set()

    async def register(self) -> None:
        """Be a host: the one that this home was before, or a new one. Tries until it works.

        Raises:
            ShoalError: The join token is refused for good.
        """
        if self._registered is not None or self.load():
            return
        for attempt in range(1_000_000):
            try:
                registered = await self._control.register(self._reporter.register())
            except ShoalError as error:
                if error.code in (ErrorCode.UNAUTHENTICATED, ErrorCode.FORBIDDEN, ErrorCode.INVALID_REQUEST):
                    raise
                _log.warning("host.register_failed", code=error.code.value, error=error.message)
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            else:
                self._adopt(registered)
                self._save(registered)
                if not any(self._service.live()):
                    # Taken just now, and nothing runs here that could run elsewhere, too.
                    self._acked_at = self._clock.monotonic()
                    self._service.fenced = False
                return

    def _adopt(self, registered: Registered) -> None:
        self._registered = registered
        self._lease_s, self._interval_s = registered.lease_s, registered.heartbeat_s
        self._tokens.trust(registered.host, registered.keys)
        _log.info("host.registered", host_id=registered.host)

    def load(self) -> bool:
        """Be the host that this home was before; False when it was none."""
        try:
            registered = Registered.model_validate_json(self._identity.read_bytes())
        except (FileNotFoundError, ValueError):
            return False
        self._control.resume(registered.host, registered.token)
        self._adopt(registered)
        return True

    def _save(self, registered: Registered) -> None:
        aside = self._identity.with_suffix(".new")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(registered.model_dump(mode="json"), file)
        aside.rename(self._identity)

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            # Woken by a change: give the changes that come with it a moment to be told together.
            if self._wake.is_set():
                await asyncio.sleep(COALESCE_S)
            self._wake.clear()
            delay = self._interval_s if await self.beat() else min(self._interval_s, 1.0)
            try:
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def first_beat(self, timeout_s: float) -> None:
        """Return when the first beat was acknowledged, or was not, or after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()
        except TimeoutError:
            pass

    async def beat(self) -> bool:
        """One heartbeat; whether it was acknowledged."""
        try:
            return await self._one_beat()
        finally:
            self._tried.set()

    async def _one_beat(self) -> bool:
        # Numbers begin at the clock's milliseconds: those of an agent that restarted are larger than all before.
        self._beat = max(self._beat + 1, int(self._clock.now().timestamp() * 1000))
        beat = self._reporter.beat(self._beat)
        sent_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(max(2.0, self._lease_s / 3)):
                reply = await self._control.heartbeat(beat)
        except (ShoalError, TimeoutError) as error:
            self.missed += 1
            refused = isinstance(error, ShoalError) and error.code is ErrorCode.UNAUTHENTICATED
            _log.warning("heartbeat.missed", error=str(error), refused=refused)
            if refused:
                await self._register_again()
            await self._fence_when_due()
            return False
        self.beats += 1
        # The lease runs from when the beat left: the control plane counts from when it came.
        self._acked_at = sent_at
        self._lease_s, self._interval_s = reply.lease_s, reply.heartbeat_s
        self._tokens.trust(self.host, reply.keys)
        self._reporter.obey(reply, beat)
        await self._unfence()
        return True

    async def _register_again(self) -> None:
        try:
            registered = await self._control.register(self._reporter.register())
        except ShoalError as error:
            _log.warning("host.register_failed", code=error.code.value, error=error.message)
        else:
            self._adopt(registered)
            self._save(registered)

    async def watch_lease(self) -> None:
        """Fence in time also while a heartbeat hangs. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._lease_s / 4))
            await self._fence_when_due()

    async def silence(self, seconds: float) -> None:
        """Return once the control plane has taken no notice of this host for so long; before it ever did, since this
        agent began."""
        while True:
            silent_s = self._clock.monotonic() - max(self._acked_at, self._born_at)
            if silent_s >= seconds:
                _log.error("host.orphaned", silent_s=round(silent_s, 1))
                return
            await asyncio.sleep(seconds - silent_s)

    async def _fence_when_due(self) -> None:
        if self._service.fenced or self._clock.monotonic() - self._acked_at < self._lease_s:
            return
        _log.error("host.fenced", silent_s=round(self._clock.monotonic() - self._acked_at, 3))
        self._service.fenced = True
        for hosted in self._service.live():
            if hosted.sandbox is None or hosted.state != "running":
                continue
            try:
                await hosted.freeze(self._runtime, FENCE)
            except (SandboxRuntimeError, TimeoutError, ShoalError) as error:
                _log.error("host.freeze_failed", session_id=hosted.session, error=str(error))

    async def _unfence(self) -> None:
        if not self._service.fenced:
            return
        # What is to be released is in `ending` by now and stays frozen: only the rest goes on.
        running = [hosted for hosted in self._service.live() if hosted.state == "running"]
        await asyncio.gather(*(self._let_go(hosted) for hosted in running))
        self._service.fenced = False
        _log.info("host.unfenced", sandboxes=len(running))
        # A guest that did not answer may have cost more time than the lease had left.
        await self._fence_when_due()

    async def _let_go(self, hosted: Hosted) -> None:
        try:
            await hosted.thaw(self._runtime, FENCE)
        except (SandboxRuntimeError, TimeoutError) as error:
            _log.error("host.thaw_failed", session_id=hosted.session, error=str(error))
        # Nobody could do anything meanwhile: that is not idleness.
        hosted.touch()
        try:
            await self._go_on(hosted)
        except Exception:  # noqa: BLE001 - one that resists must not keep the others
            _log.exception("adoption.failed", session_id=hosted.session)
            self._service.end(hosted, EndReason.FAILED, "the host's new agent could not take it over")
