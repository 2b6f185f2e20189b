"""The heartbeat and the fence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from runtime_image.agent.heartbeat import Heart, Reporter
from runtime_image.agent.machine import LoadMeter
from runtime_image.agent.report import Report
from runtime_image.agent.settings import AgentSettings
from runtime_image.agent.snapshots import Snapshots
from runtime_image.agent.tokens import TokenVerifier
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import HeartbeatReply, Incarnation
from shoal.contract.states import EndReason
from tests.unit.agent.conftest import Host


class Beating:
    """A host with a heart."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.shutdowns = 0
        settings = AgentSettings(control_url="http://x", join_token="join", home=host.root)  # type: ignore[arg-type]
        snapshots = Snapshots(
            find=host.service.current,
            runtime=host.runtime,
            layers=cast(Any, host.layers),
            control=host.control,
            transfer=cast(Any, None),
            staging=host.root / "snapshots",
            clock=host.clock,
            nudge=lambda: None,
        )

        def shutdown() -> None:
            self.shutdowns += 1

        self.report = Report(
            settings=settings,
            address="http://127.0.0.1:1",
            boot_id="boot_1",
            service=host.service,
            warm=host.warm,
            layers=cast(Any, host.layers),
            snapshots=snapshots,
            usage=host.usage,
            events=host.events,
            load=LoadMeter(host.root, host.clock),
            clock=host.clock,
            shutdown=shutdown,
        )
        self.tokens = TokenVerifier(host.clock)
        self.heart = self.new_heart()

    def new_heart(self) -> Heart:
        """As after a restart."""
        return Heart(
            home=self.host.root,
            control=self.host.control,
            reporter=Reporter(register=self.report.register, beat=self.report.beat, obey=self.report.obey),
            service=self.host.service,
            runtime=self.host.runtime,
            tokens=self.tokens,
            clock=self.host.clock,
            go_on=self.host.go_on,
        )

    def order(self, **orders: Any) -> None:
        """What the next replies say."""
        self.host.control.reply = HeartbeatReply(lease_s=10, heartbeat_s=1, keys=[], **orders)


@pytest.fixture
async def beating(host: Host) -> Beating:
    """A registered host."""
    made = Beating(host)
    await made.heart.register()
    return made


async def test_a_restarted_agent_is_the_same_host(beating: Beating) -> None:
    """The join token is used once; the identity is private on the disk; beat numbers go up over restarts."""
    await beating.heart.beat()
    again = beating.new_heart()
    await again.register()
    assert again.host == "hst_1"
    assert len(beating.host.control.registrations) == 1
    assert beating.host.control.resumed == ("hst_1", "t")
    assert (beating.host.root / "host.json").stat().st_mode & 0o077 == 0
    beating.host.clock.advance(0.01)
    await again.beat()
    numbers = [beat.beat for beat in beating.host.control.beats]
    assert numbers == sorted(set(numbers))


async def test_a_refused_join_token_is_final(host: Host) -> None:
    """The agent does not try for ever with a token that nobody takes."""
    host.control.refuse = ShoalError(ErrorCode.UNAUTHENTICATED, "used")
    with pytest.raises(ShoalError):
        await Beating(host).heart.register()


async def test_beats_name_everything(beating: Beating) -> None:
    """Sandboxes, what is reserved, usage and events, until they are acknowledged."""
    hosted = await beating.host.start()
    beating.host.clock.advance(1)
    beating.host.ender.cut(hosted)
    await beating.heart.beat()
    beat = beating.host.control.beats[-1]
    assert [(one.session, one.state) for one in beat.sandboxes] == [("ses_1", "running")]
    assert beat.reserved.sandboxes == 1
    assert (len(beat.usage), len(beat.events)) == (1, 1)
    beating.order(acked_usage=1, acked_event=beat.events[-1].n)
    await beating.heart.beat()
    await beating.heart.beat()
    beat = beating.host.control.beats[-1]
    assert (beat.usage, beat.events) == ([], [])


async def test_without_acknowledgement_the_host_fences_itself(beating: Beating) -> None:
    """At the end of the lease, not before: sandboxes stand still and starts are refused. Acknowledged again, those
    that were not released go on."""
    host = beating.host
    kept, released = await host.start("ses_1"), await host.start("ses_2")
    await beating.heart.beat()
    host.control.down = True
    host.clock.advance(9)
    await beating.heart.beat()
    assert (host.service.fenced, host.runtime.frozen) == (False, set())
    host.clock.advance(2)
    await beating.heart.beat()
    assert host.service.fenced
    assert not beating.heart.ready
    assert host.runtime.frozen == {kept.sandbox_id, released.sandbox_id}
    with pytest.raises(ShoalError) as refused:
        await host.service.start(host.spec("ses_3"))
    assert refused.value.code is ErrorCode.HOST_FENCED
    host.control.down = False
    beating.order(release=[Incarnation(session=released.session, epoch=1)])
    frozen_id = released.sandbox_id
    await beating.heart.beat()
    assert not host.service.fenced
    assert kept.sandbox_id not in host.runtime.frozen
    await host.ended(released)
    assert (released.state, frozen_id in host.runtime.living) == ("ended", False)
    assert kept.state == "running"


async def test_the_lease_counts_from_when_the_beat_left(
    beating: Beating, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that took long does not stretch the lease: the control plane counts from when the beat came."""
    host = beating.host
    await host.start()
    slow = host.control.heartbeat

    async def heartbeat(beat: Any) -> HeartbeatReply:
        host.clock.advance(6)
        return await slow(beat)

    monkeypatch.setattr(host.control, "heartbeat", heartbeat)
    await beating.heart.beat()
    monkeypatch.undo()
    host.control.down = True
    host.clock.advance(5)
    await beating.heart.beat()
    assert host.service.fenced


async def test_orders(beating: Beating) -> None:
    """drain, forget and shutdown; unknown sandboxes in them are no error; a drain that is lifted is lifted."""
    host = beating.host
    hosted = await host.start()
    host.service.end(hosted, EndReason.DELETED)
    await host.ended(hosted)
    gone = Incarnation(session=cast(Any, "ses_none"), epoch=3)
    beating.order(drain=True, release=[gone], forget=[gone, Incarnation(session=hosted.session, epoch=1)])
    await beating.heart.beat()
    assert host.service.draining
    assert list(host.service) == []
    beating.order()
    await beating.heart.beat()
    assert not host.service.draining
    beating.order(shutdown=True)
    await beating.heart.beat()
    assert (beating.shutdowns, host.service.draining) == (1, True)


async def test_an_unknown_host_registers_again(beating: Beating) -> None:
    """A control plane that lost its records takes the host anew."""
    host = beating.host
    refusals: list[Callable[[], None]] = []
    original = host.control.heartbeat

    async def heartbeat(beat: Any) -> HeartbeatReply:
        if not refusals:
            refusals.append(lambda: None)
            raise ShoalError(ErrorCode.UNAUTHENTICATED, "who are you")
        return await original(beat)

    host.control.heartbeat = heartbeat  # type: ignore[method-assign]
    assert not await beating.heart.beat()
    assert len(host.control.registrations) == 2
    assert await beating.heart.beat()


def test_settings_refuse_what_they_do_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags win over the environment; an unknown key and a missing one are told."""
    from runtime_image.agent.settings import read_settings

    monkeypatch.setenv("SHOAL_AGENT_JOIN_TOKEN", "secret-join")
    monkeypatch.setenv("SHOAL_AGENT_MAX_SANDBOXES", "7")
    settings = read_settings(["--control-url", "http://x", "--home", str(tmp_path), "--max-sandboxes", "9"])
    assert (settings.max_sandboxes, settings.join_token.get_secret_value()) == (9, "secret-join")
    assert "secret-join" not in repr(settings)
    for wrong in (["--nonsense", "1"], ["--max-sandboxes", "0"]):
        with pytest.raises((SystemExit, ValueError)):
            read_settings(["--control-url", "http://x", "--home", str(tmp_path), *wrong])


async def test_silence_counts_from_the_last_word(beating: Beating) -> None:
    """A host is alone once nobody took notice of it for so long; every acknowledged beat begins that time anew."""
    host = beating.host
    waiting = asyncio.create_task(beating.heart.silence(0.05))
    await beating.heart.beat()
    host.clock.advance(0.04)
    await beating.heart.beat()
    host.clock.advance(0.04)
    await asyncio.sleep(0)
    assert not waiting.done()
    host.control.down = True
    host.clock.advance(0.05)
    await beating.heart.beat()
    await asyncio.wait_for(waiting, 10)
