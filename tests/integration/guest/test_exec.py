"""What an exec promises, by a real guest: statuses, bytes, limits, environment, life of children."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime_image.agent.link import LinkClosedError, SpawnError

if TYPE_CHECKING:
    from .conftest import Box, Launch

EVERY_BYTE = bytes(range(256)) * 3


@pytest.mark.parametrize("code", [0, 1, 2, 77, 126, 127, 128, 255])
async def test_exit_codes_are_exact(box: Box, code: int) -> None:
    """Whatever a program exits with arrives unchanged."""
    done = await box.run(f"exit {code}")
    assert (done.exit.exit_code, done.exit.signal) == (code, None)


@pytest.mark.parametrize("name", ["KILL", "TERM", "INT", "PIPE", "SEGV", "USR1", "XFSZ"])
async def test_signals_are_exact(box: Box, name: str) -> None:
    """A program ended by a signal has no exit code; the guest's own dispositions are not inherited."""
    done = await box.run(f"kill -{name} $$")
    assert (done.exit.exit_code, done.exit.signal) == (None, name)


async def test_streams_are_apart_and_byte_exact(box: Box) -> None:
    """NUL, invalid UTF-8 and a missing last newline survive on each stream."""
    done = await box.run("cat; printf 'e\\0\\377' >&2", stdin=EVERY_BYTE)
    assert (done.stdout, done.stderr) == (EVERY_BYTE, b"e\0\xff")
    assert done.process.stdout.total_bytes == len(EVERY_BYTE)
    assert not done.process.stdout.truncated


async def test_stdin_of_50_mib_arrives_and_holds_up_nobody(box: Box) -> None:
    """A big stdin is streamed as the program reads; meanwhile another exec runs to its end."""
    data = os.urandom(50 << 20)
    process = await box.spawn("while ! [ -e $GO ]; do sleep 0.01; done; sha256sum",
                              stdin=data, env={"GO": f"/tmp/shoal-guest-{os.getpid()}"})  # fmt: skip
    assert (await box.run("echo hi")).stdout == b"hi\n"
    assert not process.exited
    await box.run(f"touch /tmp/shoal-guest-{os.getpid()}")
    done = await box.done(process)
    await box.run(f"rm /tmp/shoal-guest-{os.getpid()}")
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_stdin_that_nobody_reads_is_dropped(box: Box) -> None:
    """A program that does not read its stdin ends as it would in a shell."""
    done = await box.run("exit 3", stdin=b"x" * (4 << 20))
    assert done.exit.exit_code == 3


async def test_stdin_is_empty_unless_given(box: Box) -> None:
    """Tools that read stdin see its end at once."""
    done = await box.run("cat; wc -c")
    assert done.stdout.strip() == b"0"


async def test_stdin_open_is_written_later(box: Box) -> None:
    """What is written while the program runs is read then, and its end is told."""
    process = await box.spawn("read -r line; echo got $line; cat", stdin="open")
    await process.write_stdin(b"one\n")
    await process.stdout.changed(0)
    assert process.stdout.snapshot().data == b"got one\n"
    await process.write_stdin(b"two")
    await process.close_stdin()
    done = await box.done(process)
    assert done.stdout == b"got one\ntwo"


async def test_arguments_of_1_mib_in_total(box: Box) -> None:
    """Long argument lists go in pieces and arrive whole."""
    arguments = [chr(97 + number) * (64 << 10) for number in range(16)]
    done = await box.run(["sh", "-c", 'echo $#; printf "%s" "$@" | sha256sum', "sh", *arguments])
    count, digest = done.stdout.split()[:2]
    assert (count, digest.decode()) == (b"16", hashlib.sha256("".join(arguments).encode()).hexdigest())


async def test_a_command_longer_than_an_argument_may_be(box: Box) -> None:
    """A command string over the kernel's 128 KiB an argument runs all the same, with no extra descriptor."""
    done = await box.run(f"x={'y' * (200 << 10)}\necho ${{#x}}; ls /proc/self/fd")
    assert done.stdout.split() == [str(200 << 10).encode(), b"0", b"1", b"2", b"3"]


async def test_a_background_child_does_not_hold_the_call(box: Box) -> None:
    """`cmd &` returns when the leader ends; the child lives on and may go on printing."""
    async with asyncio.timeout(5):
        done = await box.run("(while echo tick; do sleep 0.01; done) & echo $!")
    assert done.exit.exit_code == 0
    pid = int(done.stdout.replace(b"tick\n", b""))
    # It writes to a pipe whose action is over: a reader must still be there, or SIGPIPE ends it.
    alive = await box.run(f"sleep 0.2; kill -0 {pid} && kill -9 {pid}")
    assert alive.exit.exit_code == 0


async def test_output_in_the_pipe_when_the_leader_ends_is_not_lost(box: Box) -> None:
    """Everything the leader wrote counts, however fast it was gone."""
    for _ in range(30):
        done = await box.run(
            "head -c 60000 /dev/zero; sleep 1 >/dev/null 2>&1 </dev/null & exec 1>&2; echo e"
        )
        assert (len(done.stdout), done.stderr) == (60000, b"e\n")


async def test_orphans_are_reaped_and_steal_no_status(box: Box) -> None:
    """Grandchildren that lose their parent leave no zombie; statuses of actions stay right meanwhile."""
    runs = [box.run(f"for i in 1 2 3 4 5; do (sh -c 'exit 9' &); done; exit {code}") for code in range(40)]
    codes = [done.exit.exit_code for done in await asyncio.gather(*runs)]
    assert codes == list(range(40))
    await box.until(lambda: box.zombies() == 0)


async def test_a_stream_without_credit_blocks_no_other(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of one stream stands still: its own stderr, and other processes, go on."""
    process = await box.spawn(
        "head -c 2000000 /dev/zero; echo done >&2; read -r x", stdin="open", output_limit_bytes=8 << 20
    )
    monkeypatch.setattr(process, "_grant", lambda stream, allowed: None)
    await process.stderr.changed(0)
    assert process.stderr.snapshot().data == b"done\n"
    assert process.stdout.total_bytes < 2000000, "it was held up, or the test shows nothing"
    assert (await box.run("echo hi")).stdout == b"hi\n"
    monkeypatch.undo()
    process._grant(1, 3000000)
    await process.close_stdin()
    done = await box.done(process)
    assert len(done.stdout) == 2000000


async def test_head_and_tail_are_kept_and_the_middle_is_counted(box: Box) -> None:
    """Past the cap the program runs on; first half, last half and the exact total are kept."""
    full = subprocess.run(["seq", "300000"], capture_output=True).stdout
    done = await box.run("seq 300000", output_limit_bytes=64 << 10)
    tap = done.process.stdout
    head, tail = tap.kept()
    assert (head, tail) == (full[: 32 << 10], full[-32 << 10 :])
    assert (tap.total_bytes, tap.truncated, done.exit.exit_code) == (len(full), True, 0)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537])
async def test_output_up_to_the_cap_is_whole(box: Box, size: int) -> None:
    """At the cap nothing is dropped; one byte beyond, one is."""
    done = await box.run(f"head -c {size} /dev/zero", output_limit_bytes=65536)
    tap = done.process.stdout
    assert (tap.total_bytes, tap.truncated, len(done.stdout)) == (size, size > 65536, min(size, 65536))


async def test_endless_output_is_bounded_in_the_guest_and_here(box: Box) -> None:
    """`yes` for a second: totals told, memory of the guest bounded, other actions served meanwhile."""
    process = await box.spawn("exec timeout 1 yes", output_limit_bytes=1 << 20)
    await process.stdout.changed(4 << 20)
    assert (await box.run("echo hi")).stdout == b"hi\n"
    done = await box.done(process)
    assert done.process.stdout.total_bytes > 10 << 20
    assert len(done.stdout) == 1 << 20
    assert done.stdout.replace(b"y\n", b"").strip(b"y\n") == b""
    assert box.rss_mib() < 20


async def test_output_is_live(box: Box) -> None:
    """What is printed shows before the program ends: at once in the head, soon in the tail."""
    process = await box.spawn(
        "echo a; read -r x; seq 1000; echo last; read -r y", stdin="open", output_limit_bytes=100
    )
    await process.stdout.changed(0)
    assert process.stdout.snapshot().data == b"a\n"
    await process.write_stdin(b"\n")
    async with asyncio.timeout(5):
        while not process.stdout.kept()[1].endswith(b"last\n"):
            await process.stdout.changed(process.stdout.total_bytes)
    assert not process.exited
    await process.close_stdin()
    assert (await process.wait()).exit_code == 1


@pytest.mark.parametrize(
    ("what", "errno_name", "stage"),
    [
        ({"command": ["no-such-program"]}, "ENOENT", "command"),
        ({"command": ["/etc/passwd"]}, "EACCES", "command"),
        ({"command": ["/etc"]}, "EACCES", "command"),
        ({"command": []}, "ENOENT", "command"),
        ({"command": "true", "cwd": "/no/such/place"}, "ENOENT", "cwd"),
        ({"command": "true", "cwd": "/etc/passwd"}, "ENOTDIR", "cwd"),
        ({"command": "true", "cwd": "/root", "user": "nobody"}, "EACCES", "cwd"),
        ({"command": "true", "user": "nobody-of-that-name"}, "ENOENT", "user"),
        ({"command": "true", "user": "root:no-such-group"}, "ENOENT", "user"),
        ({"command": "true", "env": {"PATH": "/nowhere"}}, "ENOENT", "command"),
        ({"command": "a\0b"}, "EINVAL", "command"),
    ],
    ids=repr,
)  # fmt: skip
async def test_a_start_that_fails_says_why(
    box: Box, what: dict[str, object], errno_name: str, stage: str
) -> None:
    """Nothing runs, the errno and the stage are told, and the id is free again."""
    with pytest.raises(SpawnError) as caught:
        await box.link.spawn(box.spec(**what))  # type: ignore[arg-type]
    assert (caught.value.errno_name, caught.value.stage) == (errno_name, stage)
    assert (await box.run("echo fine")).stdout == b"fine\n"
    assert len(await box.link.processes()) == 1


async def test_an_id_in_use_is_refused(box: Box) -> None:
    """The same process id never starts a second process."""
    process = await box.spawn("true")
    spec = box.spec("true")
    with pytest.raises(SpawnError) as caught:
        await box.link.spawn(type(spec)(process_id=process.process_id, command="true"))
    assert caught.value.errno_name == "EEXIST"


async def test_defaults_of_a_process(box: Box) -> None:
    """Environment, umask, descriptors, session, dispositions, privileges, limits as promised."""
    done = await box.run(["env"], user="nobody")
    entry = next(line for line in Path("/etc/passwd").read_text().splitlines() if line.startswith("nobody:"))
    assert dict(line.split("=", 1) for line in done.stdout.decode().split()) == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": entry.split(":")[5],
        "USER": "nobody",
        "LOGNAME": "nobody",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
    }
    done = await box.run(
        ["sh", "-c", "umask; ls /proc/self/fd; cat /proc/self/oom_score_adj; ulimit -c; ulimit -n"],
        open_files=321,
    )
    assert done.stdout.split() == [b"0022", b"0", b"1", b"2", b"3", b"1000", b"0", b"321"]
    status = dict(
        line.split(":\t", 1)
        for line in (await box.run(["cat", "/proc/self/status"])).stdout.decode().splitlines()
        if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1"
    assert {status[name] for name in ("SigBlk", "SigCgt")} == {"0" * 16}
    # 32 and 33 are the C library's own, which lets nobody set them: what make starts has them ignored.
    libcs_own = 1 << 31 | 1 << 32
    assert int(status["SigIgn"], 16) & ~libcs_own == 0
    forbidden = {
        12: "NET_ADMIN",
        16: "SYS_MODULE",
        17: "SYS_RAWIO",
        19: "SYS_PTRACE",
        21: "SYS_ADMIN",
        27: "MKNOD",
    }
    for mask in ("CapBnd", "CapEff", "CapPrm", "CapInh"):
        assert not [name for bit, name in forbidden.items() if int(status[mask], 16) >> bit & 1]
    sid = await box.run(["sh", "-c", "cut -d' ' -f6 /proc/$$/stat; echo $$"])
    assert len(set(sid.stdout.split())) == 1


async def test_given_environment_wins(box: Box) -> None:
    """What the caller sets is set, defaults or not."""
    done = await box.run("echo $LANG:$HOME:$X", env={"LANG": "C", "HOME": "/tmp", "X": "ü"})
    assert done.stdout.decode() == "C:/tmp:ü\n"


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("nobody", "uid={nobody} gid={nogroup}"),
        ("12345", "uid=12345 gid=0"),
        ("12345:54321", "uid=12345 gid=54321"),
        ("nobody:daemon", "uid={nobody} gid=1"),
        (None, "uid=0 gid=0"),
    ],
)
async def test_users_by_the_sandboxs_own_files(box: Box, user: str | None, expected: str) -> None:
    """Names and numbers become ids; root's groups are left behind."""
    done = await box.run(["sh", "-c", "echo uid=$(id -u) gid=$(id -g) groups=$(id -G)"], user=user)
    ids = {"nobody": "65534", "nogroup": "65534"}
    head, _, groups = done.stdout.decode().strip().partition(" groups=")
    assert head == expected.format(**ids)
    assert groups.split()[0] == head.rpartition("=")[2]


async def test_bash_is_taken_when_present(box: Box, tmp_path: Path) -> None:
    """A command string is bash's; where the PATH has sh only, it is sh's."""
    assert (await box.run("echo ${BASH_VERSION:+bash}")).stdout == b"bash\n"
    (tmp_path / "sh").symlink_to("/bin/dash")
    tmp_path.chmod(0o755)
    done = await box.run("echo ${BASH_VERSION:-none}", env={"PATH": str(tmp_path)})
    assert done.stdout == b"none\n"


async def test_login_reads_the_profile(box: Box, tmp_path: Path) -> None:
    """Only a login shell reads the user's profile."""
    (tmp_path / ".profile").write_text("FROM_PROFILE=yes\n")
    env = {"HOME": str(tmp_path)}
    assert (await box.run("echo $FROM_PROFILE", env=env)).stdout == b"\n"
    assert (await box.run("echo $FROM_PROFILE", env=env, login=True)).stdout == b"yes\n"


async def test_a_terminal(box: Box) -> None:
    """A real one: size, resize, control characters, output on stdout."""
    process = await box.spawn("tty; stty size; read -r x; stty size; exec cat", tty=(24, 80))
    while b"24 80" not in process.stdout.snapshot().data:
        await process.stdout.changed(process.stdout.total_bytes)
    assert process.stdout.snapshot().data.startswith(b"/dev/pts/")
    await process.resize(50, 132)
    await process.write_stdin(b"\n")
    while b"50 132" not in process.stdout.snapshot().data:
        await process.stdout.changed(process.stdout.total_bytes)
    # Echoed by the terminal, then by cat: cat is there, so the interrupt is for it.
    await process.write_stdin(b"here\n")
    while process.stdout.snapshot().data.count(b"here") < 2:
        await process.stdout.changed(process.stdout.total_bytes)
    await process.write_stdin(b"\x03")
    assert (await process.wait()).signal == "INT"


async def test_a_terminals_stdin_ends(box: Box) -> None:
    """Closing stdin of a terminal is its end of file."""
    process = await box.spawn("cat", tty=(24, 80))
    await process.write_stdin(b"line\n")
    await process.close_stdin()
    assert (await process.wait()).exit_code == 0


async def test_cpu_time_and_duration_are_measured(box: Box) -> None:
    """CPU time is the tree's that was waited for; the duration runs from the start."""
    done = await box.run("i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; sleep 0.1")
    assert done.exit.cpu_ms is not None
    assert done.exit.cpu_ms > 20
    assert done.exit.duration_ms >= 100 + done.exit.cpu_ms / 2
    assert done.exit.max_rss_mib is not None
    assert 1 < done.exit.max_rss_mib < 200


async def test_the_guest_gives_memory_back_when_told_to_forget(box: Box) -> None:
    """Output is kept until forgotten and not longer."""
    before = box.rss_mib()
    runs = [await box.run("head -c 2000000 /dev/zero", output_limit_bytes=4 << 20) for _ in range(20)]
    held = box.rss_mib()
    assert held - before > 30, "nothing was kept, so nothing is shown"
    for done in runs:
        await box.link.forget(done.process.process_id)
    assert box.rss_mib() - before < 6
    assert await box.link.processes() == []


async def test_forgetting_a_running_process_leaves_it_running(box: Box) -> None:
    """It goes on unheard; whoever still waits is told."""
    process = await box.spawn("echo hi; exec sleep 60")
    await process.stdout.changed(0)
    await box.link.forget(process.process_id)
    with pytest.raises(LinkClosedError):
        await process.wait()
    done = await box.run(f"kill -9 {process.pid}")
    assert done.exit.exit_code == 0


async def test_the_guest_ends_when_nobody_holds_its_socket(launch: Launch) -> None:
    """Without agent and holder a sandbox must not live on."""
    async with launch() as box:
        pid = box.popen.pid
    assert box.popen.returncode == 0
    assert not Path(f"/proc/{pid}").exists()
