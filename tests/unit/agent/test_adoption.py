"""What a restarted agent does with sandboxes that another left: nothing, until the control plane has spoken."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime_image.agent.fakes import FakeLink, FakeProcess, FakeRuntime, MemoryStore
from runtime_image.agent.heartbeat import Heart
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.keeper import About, Keeper
from runtime_image.agent.link import LinkClosedError, ProcessSpec
from runtime_image.agent.sandboxes import Limits, SandboxSpec
from shoal.contract.actions import Action, Exec, RunCode
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Incarnation
from shoal.contract.identity import digest, kept_json
from shoal.contract.states import ActionStatus, EndReason
from tests.unit.agent.conftest import SOURCE, Host
from tests.unit.agent.test_heartbeat import Beating


@dataclass
class Restart:
    """A host whose agent died: `leave` says what lives on, `start` is the next agent's beginning."""

    root: Path
    runtime: FakeRuntime = field(default_factory=FakeRuntime)
    store: MemoryStore = field(default_factory=MemoryStore)
    guests: dict[str, socket.socket] = field(default_factory=dict)
    hosts: list[Host] = field(default_factory=list)

    async def leave(self, session: str, *actions: Action) -> str:
        """A running sandbox, with steps that had begun; its id."""
        before = Host(self.root)
        spec, name = before.spec(session), f"sbx_{session}"
        await self.runtime.start(SandboxSpec(sandbox_id=name, layers=(Path("/l"),), resources=Limits()))
        ours, self.guests[session] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper = Keeper(self.store)
        keeper.keep_session(name, ours, About(layers=list(SOURCE.layers), spec=spec, running=True))
        ours.close()
        journal = before.journals.open(spec)
        before.journals.mark_ran(session, 1)
        for seq, action in enumerate(actions, 1):
            kept = kept_json(action)
            sha = digest(session, action, kept)
            journal.intent(seq=seq, id=f"s{seq}", sha=sha, action=kept, at=before.clock.now())
        journal.close()
        return name

    async def start(self, host: Host | None = None) -> tuple[Host, Beating, Heart]:
        """The new agent, up to its first beat."""
        host = host or Host(self.root, runtime=self.runtime, store=self.store)
        self.hosts.append(host)
        first = Beating(host)
        await first.heart.register()
        heart = first.new_heart()
        assert heart.load()
        await host.adopter.adopt()
        return host, first, heart

    def hears(self, session: str) -> bool:
        """Whether the guest's socket is still open on the host's side."""
        try:
            self.guests[session].setblocking(False)
            return self.guests[session].recv(1) != b""
        except BlockingIOError:
            return True


@pytest.fixture
async def restart(tmp_path: Path) -> AsyncIterator[Restart]:
    """Cleaned up."""
    made = Restart(tmp_path)
    yield made
    for host in made.hosts:
        host.ender.give_up()
        for hosted in host.service:
            host.service.end(hosted, EndReason.DELETED)
            if hosted.ending is not None:
                await hosted.ending
            hosted.journal.close()
        await host.warm.close()
    for guest in made.guests.values():
        guest.close()
    for name in list(made.store.kept):
        made.store.drop(name)


def _statuses(hosted: Hosted) -> list[ActionStatus]:
    return [entry.status for entry in hosted.journal.entries()]


async def test_nothing_goes_on_before_a_beat_is_acknowledged(restart: Restart) -> None:
    """However often the agent restarts and however long nobody answers: sandboxes that run are stopped, those that
    stood still stand still, nobody speaks to a guest, starts are refused. The first acknowledgement lets all go on,
    with the step that ran."""
    ran, stood = await restart.leave("ses_a", Exec(command="sleep 9")), await restart.leave("ses_b")
    restart.runtime.frozen = {stood}
    host = Host(restart.root, runtime=restart.runtime, store=restart.store)
    process = FakeProcess(ProcessSpec(process_id="a1", command="sleep 9"), None)
    host.on_connect = lambda link: link.left.append(process)
    host, beating, heart = await restart.start(host)
    assert (host.service.fenced, restart.runtime.frozen, host.links) == (True, {ran, stood}, [])
    for _ in range(3):
        host.control.down = True
        assert not await heart.beat()
        host.clock.advance(100)
        assert restart.runtime.frozen == {ran, stood}
        assert (host.service.fenced, heart.ready, host.links) == (True, False, [])
        with pytest.raises(ShoalError) as refused:
            await host.service.start(host.spec("ses_new"))
        assert refused.value.code is ErrorCode.HOST_FENCED
    host.control.down = False
    assert await heart.beat()
    assert {one.session: one.state for one in host.control.beats[-1].sandboxes} == {
        "ses_a": "running",
        "ses_b": "running",
    }
    assert (host.service.fenced, heart.ready, restart.runtime.frozen) == (False, True, set())
    went_on = host.service.current("ses_a")
    assert went_on.actions is not None
    run = went_on.actions.get("s1")
    assert run is not None
    process.end(0)
    await run.settled.wait()
    assert _statuses(went_on) == [ActionStatus.DONE]
    # Standing still was not idleness.
    assert went_on.idle_s == 0
    assert beating.shutdowns == 0


async def test_what_the_first_answer_releases_never_ran_here_again(restart: Restart) -> None:
    """A session that was given to another host meanwhile: its sandbox ends without having been thawed or spoken to,
    its step is unknown, its socket is closed."""
    name = await restart.leave("ses_a", Exec(command="sleep 9"))
    host, beating, heart = await restart.start()
    thawed: list[str] = []
    thaw = restart.runtime.thaw

    async def watched(sandbox: object) -> None:
        thawed.append(name)
        await thaw(sandbox)  # type: ignore[arg-type]

    restart.runtime.thaw = watched  # type: ignore[method-assign]
    beating.order(release=[Incarnation(session=SessionId("ses_a"), epoch=1)])
    assert await heart.beat()
    hosted = host.service.current("ses_a")
    await host.ended(hosted)
    assert (thawed, host.links, restart.runtime.living) == ([], [], {})
    assert _statuses(hosted) == [ActionStatus.UNKNOWN]
    assert not restart.hears("ses_a")


async def test_a_guest_that_does_not_answer_ends_alone(restart: Restart) -> None:
    """Its session is told as failed, its step as unknown; the other sandbox goes on."""
    await restart.leave("ses_a", Exec(command="sleep 9"))
    await restart.leave("ses_b")
    host = Host(restart.root, runtime=restart.runtime, store=restart.store)
    greeted: list[FakeLink] = []

    def refuse_first(link: FakeLink) -> None:
        greeted.append(link)
        if len(greeted) == 1:
            raise LinkClosedError("gone")

    host.on_connect = refuse_first
    host, _, heart = await restart.start(host)
    assert await heart.beat()
    assert not host.service.fenced
    lost = host.service.current("ses_a")
    await host.ended(lost)
    assert (lost.end_reason, _statuses(lost)) == (EndReason.FAILED, [ActionStatus.UNKNOWN])
    assert host.service.current("ses_b").state == "running"
    assert not restart.hears("ses_a")


@pytest.mark.parametrize("left", ["a1c", "a1c.1", None])
async def test_what_an_unknown_step_left_is_killed(restart: Restart, left: str | None) -> None:
    """The agent died during a compilation, or an operation that is no process: the step is unknown, and its whole
    tree is killed, whatever it is named."""
    name = await restart.leave("ses_a", RunCode(code="int main(){}", language="c"))
    host = Host(restart.root, runtime=restart.runtime, store=restart.store)
    compiler = FakeProcess(ProcessSpec(process_id=left or "x", command="gcc"), None)
    group = restart.runtime.kill_group(restart.runtime.living[name], "a1")
    group.processes.append(compiler)
    if left is not None:
        host.on_connect = lambda link: link.left.append(compiler)
    host, _, heart = await restart.start(host)
    assert await heart.beat()
    assert (group.kills, compiler.exited, group.removed) == (1, True, True)
    assert _statuses(host.service.current("ses_a")) == [ActionStatus.UNKNOWN]


async def test_the_second_choice_of_interpreter_goes_on(restart: Restart) -> None:
    """A program whose first interpreter the image lacks runs under another name: it is found by it."""
    await restart.leave("ses_a", RunCode(code="pass"))
    host = Host(restart.root, runtime=restart.runtime, store=restart.store)
    process = FakeProcess(ProcessSpec(process_id="a1.1", command="python"), None)
    host.on_connect = lambda link: link.left.append(process)
    host, _, heart = await restart.start(host)
    assert await heart.beat()
    hosted = host.service.current("ses_a")
    assert hosted.actions is not None
    run = hosted.actions.get("s1")
    assert run is not None
    process.end(3)
    await run.settled.wait()
    assert _statuses(hosted) == [ActionStatus.DONE]


async def test_a_host_with_nothing_on_it_is_ready_when_it_is_taken(host: Host) -> None:
    """Nothing of a new host can run elsewhere: its registration is acknowledgement enough, and only that."""
    beating = Beating(host)
    assert host.service.fenced
    await beating.heart.register()
    assert not host.service.fenced
