"""Sandboxes of sessions: idempotent starts, typed failures, complete ends, patches, reports."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta

import pytest

from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxPatch
from shoal.contract.sessions import Network
from shoal.contract.states import EndReason, Substrate
from tests.unit.agent.conftest import SMALL, Host


async def _refused(host: Host, session: str = "ses_x", **fields: object) -> ShoalError:
    with pytest.raises(ShoalError) as refusal:
        await host.service.start(host.spec(session, **fields))
    return refusal.value


async def test_the_same_start_makes_one_sandbox(host: Host) -> None:
    """Repeated at once and later: one record, one sandbox."""
    first, second = await asyncio.gather(host.service.start(host.spec()), host.service.start(host.spec()))
    assert first is second
    await host.start()
    assert host.runtime.started == 1
    assert first.status().state == "running"
    assert host.nudges >= 1


async def test_no_room_is_refused_until_there_is(host: Host) -> None:
    """The refusal says what is short; an ended sandbox's room is free again; nothing was made of the refused."""
    boxes = [await host.start(f"ses_{n}") for n in range(4)]
    refusal = await _refused(host)
    assert (refusal.code, refusal.details["short_of"]) == (ErrorCode.HOST_REFUSED, "sandboxes")
    assert not host.journals.directory("ses_x", 1).exists()
    host.service.end(boxes[0], EndReason.DELETED)
    await host.ended(boxes[0])
    assert (await host.start("ses_x")).state == "running"
    assert host.service.refused == 1


async def test_what_this_host_does_not_do_is_refused(host: Host) -> None:
    """Substrate, network, disk too large, draining, fenced: each with its own code."""
    assert (await _refused(host, substrate=Substrate.GVISOR)).code is ErrorCode.SUBSTRATE_UNAVAILABLE
    network = Network(mode="allowlist", allow=["example.org"])
    assert (await _refused(host, network=network)).code is ErrorCode.NOT_IMPLEMENTED
    large = SMALL.model_copy(update={"disk_mib": 100_000})
    assert (await _refused(host, resources=large)).code is ErrorCode.HOST_REFUSED
    host.service.draining = True
    assert (await _refused(host)).code is ErrorCode.HOST_REFUSED
    host.service.fenced = True
    assert (await _refused(host)).code is ErrorCode.HOST_FENCED


@pytest.mark.parametrize("step", ["layers", "runtime"])
async def test_a_failed_start_is_typed_and_leaves_nothing(host: Host, step: str) -> None:
    """No sandbox, no pinned layer, no reservation; the record stays until forgotten."""
    host.layers.missing = step == "layers"
    host.runtime.fail_starts = int(step == "runtime")
    hosted = await host.start()
    status = hosted.status()
    assert (status.state, status.end_reason, status.journal_flushed) == ("failed", "failed", True)
    assert status.error is not None
    assert status.error.code == ("image_pull_failed" if step == "layers" else "sandbox_start_failed")
    assert (host.layers.held, host.runtime.living, host.service.reserved().sandboxes) == (0, {}, 0)
    host.service.forget(hosted.session, 1)
    assert list(host.service) == []
    assert list((host.root / "journals").iterdir()) == []


async def test_an_end_while_it_starts_undoes_the_start(host: Host) -> None:
    """...wherever the start is; nothing is left, and the reason is the end's."""
    host.runtime.gate = asyncio.Event()
    hosted = await host.service.start(host.spec())
    await asyncio.sleep(0)
    host.service.end(hosted, EndReason.DELETED)
    host.service.end(hosted, EndReason.TTL)
    await host.ended(hosted)
    assert (hosted.state, hosted.end_reason) == ("ended", EndReason.DELETED)
    assert (host.layers.held, host.runtime.living) == (0, {})


async def test_the_journal_is_durable_before_the_end_is_told(host: Host) -> None:
    """While the control plane is away the sandbox is gone but `ending`; the room is not promised before that."""
    hosted = await host.start()
    hosted.journal.intent(seq=1, id="a", sha="s", action=b"{}", at=host.clock.now())
    host.control.down = True
    host.service.end(hosted, EndReason.DELETED)
    while hosted.phase != "flushing_journal":
        await asyncio.sleep(0)
    assert (hosted.state, hosted.journal_flushed, host.runtime.living) == ("ending", False, {})
    host.control.down = False
    await host.ended(hosted)
    assert (hosted.state, hosted.journal_flushed) == ("ended", True)
    assert (host.blobs / "ses_1-1").exists()


async def test_a_guest_that_dies_ends_its_session(host: Host) -> None:
    """The link closes: failed, or oom when the memory limit killed it; what is asked then hears that it is lost."""
    plain, eaten = await host.start("ses_1"), await host.start("ses_2")
    host.runtime.counters[eaten.sandbox_id].count = 1
    for link in host.links:
        link.close()
    for hosted in (plain, eaten):
        while hosted.ending is None:
            await asyncio.sleep(0)
        await host.ended(hosted)
    assert (plain.end_reason, eaten.end_reason) == (EndReason.FAILED, EndReason.OOM)
    assert plain.refusal().code is ErrorCode.SANDBOX_LOST


async def test_patches_change_only_what_they_name(host: Host) -> None:
    """An explicit null clears an idle limit; another epoch is refused."""
    hosted = await host.start(idle_timeout_s=5)
    later = host.clock.now() + timedelta(days=1)
    await host.service.patch(hosted.session, SandboxPatch(epoch=1, expires_at=later))
    assert (hosted.spec.expires_at, hosted.spec.idle_timeout_s) == (later, 5)
    await host.service.patch(hosted.session, SandboxPatch(epoch=1, idle_timeout_s=None, labels={"a": "b"}))
    assert (hosted.spec.idle_timeout_s, hosted.spec.labels) == (None, {"a": "b"})
    with pytest.raises(ShoalError) as refused:
        await host.service.patch(hosted.session, SandboxPatch(epoch=2))
    assert refused.value.code is ErrorCode.EPOCH_MISMATCH


async def test_a_status_tells_by_which_settings_a_sandbox_goes(host: Host) -> None:
    """Whatever a patch changes shows in the report, as the sender of the patch would compute it."""
    hosted = await host.start(idle_timeout_s=5)
    wanted = hosted.spec.settings(acknowledged=True)
    assert hosted.status().settings == wanted.mark()
    for changes in (
        {"expires_at": host.clock.now() + timedelta(days=1)},
        {"idle_timeout_s": None},
        {"idle_pause_s": 60},
        {"labels": {"b": "1", "a": "2"}},
    ):
        before = hosted.status().settings
        wanted = wanted.model_copy(update=changes)
        over_the_wire = SandboxPatch.model_validate_json(
            SandboxPatch(epoch=1, **changes).model_dump_json(exclude_unset=True)
        )
        await host.service.patch(hosted.session, over_the_wire)
        assert hosted.status().settings == wanted.mark() != before


async def test_usage_has_no_gaps_and_no_overlaps(host: Host) -> None:
    """Starting, running, and cuts in between join exactly; reserved amounts are the session's."""
    hosted = await host.start()
    for seconds in (10, 20):
        host.clock.advance(seconds)
        host.ender.cut(hosted)
    host.clock.advance(5)
    host.service.end(hosted, EndReason.DELETED)
    await host.ended(hosted)
    records = host.usage.head()
    assert all(one.end == two.start for one, two in itertools.pairwise(records))
    assert sum(record.reserved_cpu_s for record in records) == pytest.approx(3.5)
    assert sum(record.reserved_memory_mib_s for record in records) == 64 * 35
    host.usage.acked(2)
    assert host.usage.head() == records[2:]


async def test_a_living_sandbox_is_not_forgotten(host: Host) -> None:
    """An order that comes too early changes nothing."""
    hosted = await host.start()
    host.service.forget(hosted.session, 1)
    assert host.service.get("ses_1") is hosted


async def test_idleness_counts_from_the_last_activity(host: Host) -> None:
    """Transfers count while they run, and from their end."""
    hosted = await host.start()
    host.clock.advance(7)
    assert hosted.idle_s == 7
    hosted.using += 1
    assert hosted.idle_s == 0
    hosted.using -= 1
    hosted.touch()
    host.clock.advance(2)
    assert hosted.idle_s == 2
