"""What happens to a session while it is being placed costs it neither its sandbox nor a seq."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.sessions import SessionAck, SessionPatch, SessionReplace
from shoal.contract.states import SessionState
from tests.unit.provisioner.world import WHO, World


@pytest.fixture
async def world() -> World:
    return await World().open()


def after_next(world: World, call: str, then: Callable[[Any], Awaitable[object]]) -> None:
    """Let `then` (given the call's session) happen between the next effect of an agent's call and its answer."""
    original = getattr(world.agents, call)

    async def interrupted(host: Any, subject: Any, *rest: Any, **named: Any) -> Any:
        setattr(world.agents, call, original)
        answer = await original(host, subject, *rest, **named)
        await then(getattr(subject, "session", subject))
        return answer

    setattr(world.agents, call, interrupted)


async def test_a_patch_during_the_start_keeps_the_sandbox_and_reaches_it(world: World) -> None:
    """A session that is patched while its sandbox starts gets that very sandbox, and the sandbox hears the change."""
    host = await world.host()

    async def patch(id: Any) -> object:
        return await world.services.sessions.patch(WHO, id, SessionPatch(ttl_s=60, labels={"k": "v"}))

    after_next(world, "start", patch)
    id = await world.create()
    await world.services.context.background.idle()
    session = await world.services.sessions.get(WHO, id)
    assert (session.state, session.epoch, session.labels) == (SessionState.RUNNING, 1, {"k": "v"})
    assert [call for call in world.agents.calls if call.startswith(("start", "end"))] == [f"start {id} 1"]
    assert host.patches[-1].labels == {"k": "v"}
    assert host.patches[-1].expires_at == session.expires_at


async def test_a_delete_during_the_start_ends_the_sandbox(world: World) -> None:
    """A session that is deleted while its sandbox starts leaves no sandbox."""
    host = await world.host()

    async def delete(id: Any) -> object:
        return await world.services.sessions.delete(WHO, id)

    after_next(world, "start", delete)
    id = await world.create()
    await world.services.context.background.idle()
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.ENDED
    assert host.live() == []


async def test_a_write_while_the_old_sandbox_ends_uses_no_seq_twice(world: World) -> None:
    """A replaced session that is patched while its old sandbox goes still learns how far that one came."""
    host = await world.host()
    id = await world.create()
    host.change(id, last_seq=5)

    async def patch(id: Any) -> object:
        return await world.services.sessions.patch(WHO, id, SessionPatch(labels={"k": "v"}))

    after_next(world, "end", patch)
    session = await world.finish(world.services.sessions.replace(WHO, id, SessionReplace()), beats=False)
    assert (session.state, session.epoch) == (SessionState.RUNNING, 2)
    start = host.starts[id]
    assert start.first_seq == 6
    assert start.history == [1]
    assert start.labels == {"k": "v"}


async def test_a_rewind_is_acknowledged_only_once_it_has_happened(world: World) -> None:
    """While the next sandbox starts nobody knows what is lost: an early ack is told to wait, and the sandbox is
    started as one whose disk went back."""
    host = await world.host()
    id = await world.create()
    host.change(id, last_seq=5)
    host.cold = True
    session = await world.finish(world.services.sessions.replace(WHO, id, SessionReplace(wait_s=0)))
    assert session.state is SessionState.RESTORING
    with pytest.raises(ShoalError) as raised:
        await world.services.sessions.acknowledge(WHO, id, SessionAck(epoch=2))
    assert raised.value.code is ErrorCode.SESSION_NOT_READY
    await world.services.context.background.idle()
    assert host.starts[id].rewound
    host.run_all()
    await world.beat()
    acknowledged = await world.services.sessions.acknowledge(WHO, id, SessionAck(epoch=2))
    assert acknowledged.restored is not None
    assert acknowledged.restored.acknowledged
