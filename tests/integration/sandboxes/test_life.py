"""A sandbox's life: start, limits, measures, freeze, kill groups, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from runtime_image.agent.link import ProcessSpec
from runtime_image.agent.sandboxes import (
    Limits,
    NoIdRange,
    RuntimeSettings,
    SandboxGone,
    SandboxRuntime,
    SandboxRuntimeError,
    SandboxSpec,
    StartFailed,
)

MIB = 1 << 20


async def test_a_sandbox_runs_commands_as_root_inside_and_nobody_outside(make_box: Any) -> None:
    """Root inside is the first id of the sandbox's own range on the host."""
    box = await make_box()
    assert (await box.sh("id -u")).stdout == "0\n"
    status = Path(f"/proc/{box.sandbox.pid}/status").read_text()
    assert f"Uid:\t{box.sandbox.id_base}\t" in status


async def test_what_is_written_is_in_the_upper_with_unshifted_ids(make_box: Any) -> None:
    """The private layer holds exactly what changed, with the ids the sandbox sees."""
    box = await make_box()
    ran = await box.sh(
        "echo hi > /root/a && chown user /root/a && rm /bin/vi && mkdir /made && ls -n /root/a"
    )
    assert ran.code == 0
    upper = box.sandbox.upper
    assert (upper / "root" / "a").read_text() == "hi\n"
    assert (upper / "root" / "a").stat().st_uid == 1000
    assert (upper / "made").stat().st_uid == 0
    # A whiteout, as overlayfs writes one.
    assert (upper / "bin" / "vi").stat().st_rdev == 0
    assert sorted(os.listdir(upper)) == ["bin", "made", "root"]
    assert (box.sandbox.merged / "root" / "a").read_text() == "hi\n"


async def test_a_fresh_sandbox_has_an_empty_upper(make_box: Any) -> None:
    """Mount points are not the sandbox's doing, so they are in no snapshot and no diff."""
    box = await make_box()
    assert os.listdir(box.sandbox.upper) == []


async def test_layers_are_not_changed_by_a_sandbox(make_box: Any, images: Any) -> None:
    """A write to a file of a layer goes to the private copy."""
    before = (images.busybox / "etc/passwd").read_bytes()
    box = await make_box()
    assert (await box.sh("echo x:x:7:7::/: >> /etc/passwd; chown 5 /etc/passwd")).code == 0
    assert (images.busybox / "etc/passwd").read_bytes() == before
    assert (images.busybox / "etc/passwd").stat().st_uid == 0


async def test_neighbours_have_id_ranges_apart(make_box: Any) -> None:
    """Two sandboxes at once never share an id."""
    one, two = await asyncio.gather(make_box(), make_box())
    assert abs(one.sandbox.id_base - two.sandbox.id_base) >= 65_536


async def test_an_id_range_is_used_again_only_after_teardown(
    settings: RuntimeSettings, runtime: SandboxRuntime, images: Any
) -> None:
    """A full host refuses; a stopped sandbox makes room."""
    specs = [
        SandboxSpec(sandbox_id=f"full-{n}", layers=(images.busybox,)) for n in range(settings.id_count + 1)
    ]
    boxes = [await runtime.start(spec) for spec in specs[:-1]]
    assert len({box.id_base for box in boxes}) == settings.id_count
    with pytest.raises(NoIdRange):
        await runtime.start(specs[-1])
    await runtime.stop("full-3")
    last = await runtime.start(specs[-1])
    assert last.id_base == boxes[3].id_base
    for box in (*boxes, last):
        assert box.sock is not None
        box.sock.close()


async def test_the_disk_is_a_hard_limit_and_full_is_an_ordinary_error(make_box: Any) -> None:
    """ENOSPC inside at the class's size; the sandbox goes on."""
    box = await make_box(limits=Limits(memory_mib=128, disk_mib=200))
    assert box.sandbox.disk_class_mib == 256
    ran = await box.sh("dd if=/dev/zero of=/big bs=1M count=400; ls -l /big | awk '{print $5}'")
    assert "No space left" in ran.stderr
    assert 180 * MIB < int(ran.stdout) <= 256 * MIB
    assert box.runtime.usage(box.sandbox).disk_bytes > 180 * MIB
    assert (await box.sh("rm /big; echo ok > /small; cat /small")).stdout == "ok\n"
    assert box.runtime.usage(box.sandbox).disk_bytes < 20 * MIB


async def test_memory_beyond_the_limit_kills_the_process_and_is_counted(make_box: Any) -> None:
    """The eater dies, the guest does not, and `oom_kills` tells."""
    box = await make_box(limits=Limits(memory_mib=64, disk_mib=256), python=True)
    assert box.runtime.usage(box.sandbox).oom_kills == 0
    ran = await box.py("x = bytearray(200 << 20); print(len(x))")
    assert ran.exit.signal == "KILL"
    used = box.runtime.usage(box.sandbox)
    assert used.oom_kills == 1
    assert used.memory_peak_bytes is None or used.memory_peak_bytes <= 64 * MIB
    assert (await box.sh("echo alive")).stdout == "alive\n"


async def test_shared_memory_counts_and_is_bounded(make_box: Any) -> None:
    """/dev/shm has its own size and is charged to the sandbox's memory."""
    box = await make_box(limits=Limits(memory_mib=128, disk_mib=256, shm_mib=16))
    before = box.runtime.usage(box.sandbox).memory_bytes
    ran = await box.sh("dd if=/dev/zero of=/dev/shm/x bs=1M count=64 2>&1; wc -c < /dev/shm/x")
    assert ran.stdout.splitlines()[-1] == str(16 * MIB)
    assert box.runtime.usage(box.sandbox).memory_bytes - before > 12 * MIB


async def test_a_fork_bomb_stops_at_the_pids_limit(make_box: Any) -> None:
    """No more processes than allowed; the neighbourhood is unharmed and the group can be killed."""
    box = await make_box(limits=Limits(memory_mib=256, disk_mib=256, pids=40))
    neighbour = await make_box()
    group = box.runtime.kill_group(box.sandbox, "bomb")
    process = await box.link.spawn(
        ProcessSpec(process_id="bomb", command=":(){ :|:& };:; sleep 1; :(){ :|:& };:"),
        procs_fd=group.procs_fd,
    )
    await process.wait()
    assert box.runtime.usage(box.sandbox).pids <= 40
    assert (await neighbour.sh("echo fine")).stdout == "fine\n"
    group.kill()
    await _until(lambda: not group.alive())
    assert group.remove()
    assert (await box.sh("echo again")).stdout == "again\n"


async def test_limits_can_be_set_at_the_claim(make_box: Any) -> None:
    """A warm sandbox gets cpu, memory and pids of the session that takes it."""
    box = await make_box(limits=Limits(memory_mib=64, disk_mib=256, pids=20), python=True)
    for memory_mib in (512, 96, 300):
        await box.runtime.set_limits(box.sandbox, Limits(memory_mib=memory_mib, pids=100, cpu_millis=250))
    assert (await box.py("x = bytearray(200 << 20); print(1)")).code == 0
    spins = "import time; s=time.perf_counter(); c=time.process_time()\nwhile time.perf_counter()-s<1: pass\n"
    ran = await box.py(spins + "print(time.process_time()-c)")
    # The upper bound is the promise; the lower one depends on who else is on the machine.
    assert 0.01 < ran.json() < 0.40
    ran = await box.sh("for n in $(seq 200); do sleep 1000 & done; echo more")
    assert "can't fork" in ran.stderr
    assert box.runtime.usage(box.sandbox).pids <= 100


async def test_open_files_are_bounded(make_box: Any) -> None:
    """RLIMIT_NOFILE, hard as well as soft."""
    box = await make_box(limits=Limits(memory_mib=128, disk_mib=256, open_files=100))
    assert (await box.sh("ulimit -n; ulimit -Hn; ulimit -n 101 || echo refused")).stdout.split() == [
        "100", "100", "refused",
    ]  # fmt: skip


async def test_frozen_processes_stand_still_until_thawed(make_box: Any) -> None:
    """`freeze` returns when nothing runs any more: the file stops growing, and grows again after."""
    box = await make_box()
    group = box.runtime.kill_group(box.sandbox, "writer")
    await box.link.spawn(
        ProcessSpec(process_id="writer", command="while :; do echo x >> /log; done"), procs_fd=group.procs_fd
    )
    log = box.sandbox.upper / "log"
    await _until(lambda: log.exists() and log.stat().st_size > 0)
    for _ in range(5):
        await box.runtime.freeze(box.sandbox)
        size, used = log.stat().st_size, box.runtime.usage(box.sandbox).cpu_usec
        await asyncio.sleep(0.05)
        assert log.stat().st_size == size
        # The kernel counts the last step into the freezer a few microseconds late.
        assert box.runtime.usage(box.sandbox).cpu_usec - used < 1000
        assert box.runtime.alive(box.sandbox)
        await box.runtime.thaw(box.sandbox)
        await _until(lambda: log.stat().st_size > size)  # noqa: B023
    group.kill()
    group.remove()


async def test_a_frozen_sandbox_can_be_stopped(make_box: Any, settings: RuntimeSettings) -> None:
    """Stop does not wait for a thaw."""
    box = await make_box(sandbox_id="frozen")
    await box.runtime.freeze(box.sandbox)
    await asyncio.wait_for(box.runtime.stop("frozen"), 10)
    assert not (settings.home / "sandboxes" / "frozen").exists()


async def test_a_kill_group_reaches_daemons_and_spares_the_rest(make_box: Any) -> None:
    """Double fork and a new session do not get out; another action's service lives on."""
    box = await make_box()
    service = box.runtime.kill_group(box.sandbox, "service")
    step = box.runtime.kill_group(box.sandbox, "step")
    await box.link.spawn(ProcessSpec(process_id="service", command="sleep 1000"), procs_fd=service.procs_fd)
    process = await box.link.spawn(
        ProcessSpec(process_id="step", command="(setsid sh -c 'sleep 1000 & sleep 1000' &) ; exit 3"),
        procs_fd=step.procs_fd,
    )
    assert (await process.wait()).exit_code == 3
    assert step.alive()
    assert step.remove() is False
    step.kill()
    await _until(lambda: not step.alive())
    assert step.remove() is True
    assert step.remove() is True
    step.kill()
    assert service.alive()


async def test_stop_is_repeatable_and_leaves_nothing(runtime: SandboxRuntime, images: Any) -> None:
    """Twice, and for what never was."""
    sandbox = await runtime.start(SandboxSpec(sandbox_id="once", layers=(images.busybox,)))
    assert sandbox.sock is not None
    sandbox.sock.close()
    await runtime.stop("once")
    await runtime.stop("once")
    await runtime.stop("never-was")
    assert not runtime.alive(sandbox)
    with pytest.raises(SandboxGone):
        runtime.usage(sandbox)
    with pytest.raises(SandboxGone):
        runtime.kill_group(sandbox, "x")
    with pytest.raises(SandboxGone):
        await runtime.freeze(sandbox)
    with pytest.raises(SandboxGone):
        await runtime.set_limits(sandbox, Limits())


async def test_an_id_in_use_is_refused_and_unharmed(runtime: SandboxRuntime, images: Any) -> None:
    """A second start under the same id does not touch the first."""
    spec = SandboxSpec(sandbox_id="same", layers=(images.busybox,))
    first = await runtime.start(spec)
    with pytest.raises(SandboxRuntimeError):
        await runtime.start(spec)
    assert runtime.alive(first)
    assert first.sock is not None
    first.sock.close()


async def test_a_missing_layer_is_a_typed_failure(runtime: SandboxRuntime, tmp_path: Path) -> None:
    """The step is named, nothing is left (the fixture looks)."""
    with pytest.raises(StartFailed) as failed:
        await runtime.start(SandboxSpec(sandbox_id="none", layers=(tmp_path / "absent",)))
    assert failed.value.step == "mount_root"


async def test_runc_is_quoted_when_it_refuses(
    runtime: SandboxRuntime, images: Any, settings: RuntimeSettings
) -> None:
    """What runc said is in the error."""
    other = dataclasses.replace(
        settings,
        home=settings.home / "other",
        cgroup_name=settings.cgroup_name + "-o",
        guest_argv=("/absent",),
    )
    async with SandboxRuntime(other) as broken:
        with pytest.raises(StartFailed, match="/absent") as failed:
            await broken.start(SandboxSpec(sandbox_id="none", layers=(images.busybox,)))
        assert failed.value.step == "run_runc"


async def test_a_cancelled_start_leaves_nothing(
    runtime: SandboxRuntime, images: Any, settings: RuntimeSettings
) -> None:
    """Cancelled at any moment: no record, no id range (the fixture looks for the rest)."""
    cancelled = 0
    for delay in (0.0, 0.002, 0.01, 0.03):
        task = asyncio.create_task(runtime.start(SandboxSpec(sandbox_id="cut", layers=(images.busybox,))))
        await asyncio.wait({task}, timeout=delay)
        task.cancel()
        try:
            started = await task
        except asyncio.CancelledError:
            cancelled += 1
        else:  # this machine was faster than the delay
            if started.sock is not None:
                started.sock.close()
            await runtime.stop("cut")
        assert not (settings.home / "sandboxes" / "cut").exists()
        assert runtime._ready().identities.leased_count() == 0
    assert cancelled >= 1


async def test_a_home_has_one_runtime_at_a_time(runtime: SandboxRuntime, settings: RuntimeSettings) -> None:
    """Two would sweep each other's sandboxes."""
    with pytest.raises(SandboxRuntimeError, match="another runtime"):
        async with SandboxRuntime(settings):
            pass


async def test_a_dead_guest_is_not_alive(make_box: Any) -> None:
    """The check at hand-over sees a guest that died in the pool."""
    box = await make_box()
    assert box.runtime.alive(box.sandbox)
    os.kill(box.sandbox.pid, 9)
    await _until(lambda: not box.runtime.alive(box.sandbox))


async def _until(true: Any, *, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.005)
