"""Life and death: kill groups, limits, agents that come and go, attacks on the guest from inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime_image.agent.link import GuestLink, LinkClosedError, SpawnError

if TYPE_CHECKING:
    from .conftest import Box, Launch

_PIDS, _MEMORY = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/memory")
NEW_PID_1 = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]


def _v2_root() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    pytest.skip("no v2 cgroup hierarchy is mounted")


@contextlib.contextmanager
def _cgroup(parent: Path) -> Iterator[Path]:
    group = parent / f"shoal-guest-test-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            (group / "cgroup.kill").write_text("1")
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        removed = False
        while not removed:
            with contextlib.suppress(OSError):
                group.rmdir()
                removed = True
            os.sched_yield()


async def test_the_kill_group_is_joined_before_the_program_runs(box: Box, tmp_path: Path) -> None:
    """The child writes 0 to the descriptor it was handed, of its own, and does not keep it."""
    file = tmp_path / "procs"
    with file.open("wb") as procs:
        done = await box.run("cat; ls /proc/self/fd", procs_fd=procs.fileno())
    assert file.read_bytes() == b"0"
    assert done.stdout.split() == [b"0", b"1", b"2", b"3"]


async def test_a_group_that_cannot_be_joined_fails_the_start(box: Box) -> None:
    """What could not be killed later is not started."""
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        with pytest.raises(SpawnError) as caught:
            await box.spawn("true", procs_fd=fd)
    finally:
        os.close(fd)
    assert (caught.value.errno_name, caught.value.stage) == ("EBADF", "group")


async def test_one_write_kills_the_whole_tree(box: Box) -> None:
    """Daemonised and setsid'ed children are in the group as well; output so far is kept."""
    with _cgroup(_v2_root()) as group:
        fd = os.open(group / "cgroup.procs", os.O_WRONLY)
        process = await box.spawn(
            "setsid sh -c 'sleep 60 & sleep 60' & (sh -c 'trap \"\" TERM HUP; sleep 60' &) ; echo up; sleep 60",
            procs_fd=fd,
        )
        os.close(fd)
        await process.stdout.changed(0)
        await box.until(lambda: len((group / "cgroup.procs").read_text().split()) >= 6)
        assert box.popen.pid not in map(int, (group / "cgroup.procs").read_text().split())
        (group / "cgroup.kill").write_text("1")
        done = await box.done(process)
        assert (done.exit.signal, done.stdout) == ("KILL", b"up\n")
        await box.until(lambda: not (group / "cgroup.procs").read_text())


@pytest.mark.skipif(not _PIDS.is_dir(), reason="needs the v1 pids controller")
async def test_at_the_pids_limit_starts_fail_and_the_guest_lives(launch: Launch) -> None:
    """No more processes: spawn and file operations say EAGAIN; when there is room again they work."""
    with _cgroup(_PIDS) as group:
        async with launch(before=lambda: (group / "cgroup.procs").write_text("0")) as box:
            (group / "pids.max").write_text("6")
            bomb = await box.spawn("for i in 1 2 3 4 5 6 7 8 9; do sleep 60 & done; wait")
            await bomb.stderr.changed(0)
            await box.until(lambda: int((group / "pids.current").read_text()) >= 6)
            with pytest.raises(SpawnError) as caught:
                await box.spawn(["true"])
            assert (caught.value.errno_name, caught.value.stage) == ("EAGAIN", "fork")
            assert (await box.link.file_op({"op": "stat", "path": "/"}))["error"]["errno"] == "EAGAIN"
            for pid in (group / "cgroup.procs").read_text().split():
                if int(pid) != box.popen.pid:
                    os.kill(int(pid), signal.SIGKILL)
            await bomb.wait()
            await box.until(lambda: int((group / "pids.current").read_text()) <= 1)
            assert (await box.run(["true"])).exit.exit_code == 0


async def test_a_new_agent_loses_no_byte_and_no_exit(box: Box) -> None:
    """One process still runs, one ended meanwhile, one had ended before: all are whole afterwards."""
    before = await box.run("echo before; exit 3", stdin=b"")
    running = await box.spawn("echo r1; read -r a; echo $a; read -r b; echo $b", stdin="open")
    meanwhile = await box.spawn("echo m1; read -r a <$FIFO; seq 100000; exit 4", env={"FIFO": "/dev/null"})
    await running.write_stdin(b"one\n")
    await running.stdout.changed(3)
    await meanwhile.stdout.changed(0)
    box.link.close()
    with pytest.raises(LinkClosedError):
        await running.wait()

    link = await box.reconnect()
    assert (link.hello.greeted, link.hello.processes) == (2, 3)
    found = {process.process_id: process for process in await link.processes()}
    assert found.keys() == {before.process.process_id, running.process_id, meanwhile.process_id}
    done = await box.done(found[before.process.process_id])
    assert (done.exit.exit_code, done.stdout) == (3, b"before\n")
    done = await box.done(found[meanwhile.process_id])
    expected = subprocess.run(["seq", "100000"], capture_output=True).stdout
    assert (done.exit.exit_code, done.stdout) == (4, b"m1\n" + expected)
    again = found[running.process_id]
    assert again.pid == running.pid
    await again.write_stdin(b"two\n")
    done = await box.done(again)
    assert (done.exit.exit_code, done.stdout) == (0, b"r1\none\ntwo\n")


async def test_a_crash_in_the_middle_of_everything(box: Box) -> None:
    """Twenty agents die with frames unread, streams half sent and helpers at work; the last sees all."""
    flood = await box.spawn("seq 400000; exit 5", output_limit_bytes=8 << 20)
    expected = subprocess.run(["seq", "400000"], capture_output=True).stdout
    for round_number in range(20):
        reader = await box.link.open_read("/dev/../usr/bin/python3")
        await reader.read()
        await box.spawn(f"echo {round_number}")
        box.link.close()
        await reader.aclose()
        await box.reconnect()
        await box.link.processes()
    found = {process.process_id: process for process in await box.link.processes()}
    assert len(found) == 21
    done = await box.done(found[flood.process_id])
    assert (done.exit.exit_code, done.stdout) == (5, expected)
    names = {(await box.done(process)).stdout for name, process in found.items() if name != flood.process_id}
    assert names == {f"{number}\n".encode() for number in range(20)}
    await box.until(lambda: box.zombies() == 0)


async def test_answers_to_a_dead_agent_do_not_reach_the_next(box: Box) -> None:
    """Requests under way when an agent dies are answered to nobody, though the next counts from one again."""
    for number in range(20):
        starting = [asyncio.create_task(box.spawn(f"exit {number}")) for _ in range(5)]
        starting.append(asyncio.create_task(box.spawn("true", shell=f"shell{number}")))  # type: ignore[arg-type]
        asking = asyncio.create_task(box.link.file_op({"op": "stat", "path": "/"}))
        await asyncio.sleep(0)
        box.link.close()
        await asyncio.gather(*starting, asking, return_exceptions=True)
        await box.reconnect()
        assert (await box.run(f"echo {number}")).stdout == f"{number}\n".encode()
        assert (await box.link.file_op({"op": "stat", "path": "/etc/passwd"}))["kind"] == "file"
    for process in await box.link.processes():
        await process.wait()
        await box.link.forget(process.process_id)
    assert await box.link.processes() == []


@pytest.mark.skipif(not _MEMORY.is_dir(), reason="needs the v1 memory controller")
async def test_out_of_memory_takes_the_process_and_not_the_guest(launch: Launch) -> None:
    """At the memory limit the kernel chooses what was started, never the guest."""
    with _cgroup(_MEMORY) as group:
        (group / "memory.limit_in_bytes").write_text(str(48 << 20))
        async with launch(before=lambda: (group / "cgroup.procs").write_text("0")) as box:
            for _ in range(5):
                done = await box.run(["python3", "-c", "x = b'x' * (200 << 20)"])
                assert done.exit.signal == "KILL"
                assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_an_agent_of_another_version_is_told(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that do not match end the link with the reason, not the guest."""
    box.link.close()
    monkeypatch.setattr("runtime_image.guest.wire.VERSION", 999)
    with pytest.raises(LinkClosedError, match="version"):
        await GuestLink.connect(box.kept.dup())
    monkeypatch.undo()
    await box.reconnect()
    assert (await box.run(["true"])).exit.exit_code == 0


async def test_a_guest_that_does_not_answer_is_given_up() -> None:
    """The greeting has a deadline."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, pytest.raises(LinkClosedError, match="did not answer"):
        await GuestLink.connect(ours, timeout_s=0.05)


async def test_a_guest_that_dies_is_told_to_everybody(box: Box) -> None:
    """Whoever waits for anything learns that the guest is gone; `closed` is set."""
    process = await box.spawn("sleep 60")
    waiting = asyncio.gather(process.wait(), process.stdout.changed(0), return_exceptions=True)
    box.popen.kill()
    ended, changed = await waiting
    assert isinstance(ended, LinkClosedError)
    assert changed is None
    await box.link.closed.wait()
    with pytest.raises(LinkClosedError):
        await box.run("true")
    os.kill(process.pid, signal.SIGKILL)


ATTACH = """
import ctypes, sys, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, int(sys.argv[1]), 0, 0) < 0:
    print(os.strerror(ctypes.get_errno()))
else:
    print("attached")
"""


async def test_pid_1_cannot_be_killed_stopped_or_looked_into(launch: Launch) -> None:
    """From inside, as root: no signal ends or stops it, no memory, environment or descriptor is readable,
    no debugger attaches. The same attacks succeed on an ordinary process of the same user."""
    async with launch(prefix=NEW_PID_1) as box:
        assert box.link.hello.pid == 1
        victim = await box.spawn("exec sleep 60")
        for target, works in ((victim.pid, True), (1, False)):
            for secret in ("mem", "environ", "maps", "fd/3", "fd/10"):
                if secret.startswith("fd") and works:
                    continue
                done = await box.run(
                    f"exec 5</proc/{target}/{secret} && head -c 1 <&5 >/dev/null; "
                    f"ls -l /proc/{target}/fd >/dev/null && echo in"
                )
                assert (b"in" in done.stdout) == works, (target, secret, done)
            done = await box.run(["python3", "-c", ATTACH, str(target)])
            assert (done.stdout == b"attached\n") == works, done
        for name in (
            "KILL",
            "STOP",
            "TERM",
            "INT",
            "HUP",
            "QUIT",
            "SEGV",
            "USR1",
            "ALRM",
            "TSTP",
            "RTMIN",
            "CHLD",
        ):
            done = await box.run(f"for i in 1 2 3 4 5; do kill -{name} 1; done; echo sent")
            assert done.stdout == b"sent\n"
        done = await box.run(
            f"kill -KILL {victim.pid}; echo x > /proc/1/oom_score_adj; echo 0 > /proc/1/clear_refs"
        )
        assert (await victim.wait()).signal == "KILL"
        assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_it_runs_where_there_is_nothing_and_opens_nothing_of_the_sandboxs(
    launch: Launch, runtime: Path, tmp_path: Path
) -> None:
    """A root with one static program, no libc, no Python; and traps where a loader, a locale or a zone
    would be looked for: a FIFO would hang the start, a preload would break it."""
    if shutil.which("busybox") is None:
        pytest.skip("needs busybox-static")
    root = tmp_path / "root"
    for name in ("bin", "dev", "proc", "etc", "usr/share/zoneinfo", "usr/lib/locale/C.utf8", "tmp", ".shoal"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin" / "busybox")
    os.mknod(root / "dev/null", 0o666 | 0o020000, os.makedev(1, 3))
    for trap in ("etc/ld.so.preload", "etc/ld.so.cache", "etc/localtime", "usr/share/zoneinfo/UTC",
                 "usr/share/zoneinfo/Universal", "usr/lib/locale/locale-archive", "usr/lib/locale/C.utf8/LC_CTYPE",
                 "etc/passwd", "etc/group"):  # fmt: skip
        os.mkfifo(root / trap)
    shutil.copytree(runtime, root / ".shoal", dirs_exist_ok=True)
    prefix = [*NEW_PID_1[:-2], "--kill-child", f"--root={root}", "--mount-proc=/proc"]
    async with asyncio.timeout(20):
        async with launch(prefix=prefix, root=Path("/.shoal")) as box:
            assert box.link.hello.shells == ()
            done = await box.run(["/bin/busybox", "sh", "-c", "echo in; pwd"])
            assert done.stdout == b"in\n/\n"
            with pytest.raises(SpawnError) as caught:
                await box.run("echo no shell")
            assert caught.value.errno_name == "ENOENT"
            written = await box.link.file_op({"op": "write", "path": "/tmp/x", "content": b"a\nb\n"})
            assert written["size_bytes"] == 4
            edited = await box.link.file_op({"op": "edit", "path": "/tmp/x", "old": "b", "new": "c"})
            assert edited["replacements"] == 1
            found = await box.link.file_op({"op": "search", "path": "/", "pattern": "^c$"})
            assert [match["path"] for match in found["matches"]] == [b"/tmp/x"]
    assert (root / "tmp/x").read_bytes() == b"a\nc\n"
