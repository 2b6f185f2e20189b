"""Named shells and Python contexts: state lives on, output is apart and exact, ends are told."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime_image.agent.link import CodeSpec, SpawnError

if TYPE_CHECKING:
    from .conftest import Box, Done

SHELLS = ["/bin/bash", "/bin/dash", "busybox"]
Sh = Callable[..., Any]


@pytest.fixture(params=SHELLS)
def sh(request: pytest.FixtureRequest, box: Box, tmp_path: Path) -> Sh:
    """Runs a command in the shell named "main", of each kind of shell."""
    kind = request.param
    if kind == "busybox":
        if shutil.which("busybox") is None:
            pytest.skip("needs busybox")
        (tmp_path / "sh").symlink_to(shutil.which("busybox") or "")
        kind = str(tmp_path / "sh")

    async def run(command: str, **fields: Any) -> Done:
        async with asyncio.timeout(20):
            return await box.run(command, shell="main", shell_kind=kind, **fields)

    return run


async def test_state_lives_on(sh: Sh) -> None:
    """Directory, variables, functions, options and the last status are there for the next command."""
    first = await sh("cd /usr; X='a b'; f() { echo \"f:$1\"; }; false")
    assert (first.exit.exit_code, first.exit.shell_restarted) == (1, False)
    second = await sh('echo "$?"; pwd; echo "$X"; f 1; exit_code() { return 42; }; exit_code')
    assert (second.exit.exit_code, second.stdout) == (42, b"1\n/usr\na b\nf:1\n")


async def test_streams_are_apart_exact_and_without_noise(sh: Sh) -> None:
    """No prompt, no echo; NULs, no last newline; each command has its own."""
    done = await sh("printf 'a\\0\\377'; printf e >&2")
    assert (done.stdout, done.stderr) == (b"a\0\xff", b"e")
    assert ((await sh("true")).stdout, (await sh("cat")).stdout) == (b"", b"")
    done = await sh("cat; echo", stdin=b"in\0put")
    assert done.stdout == b"in\0put\n"
    done = await sh("wc -c", stdin=b"x" * 1_000_000)
    assert done.stdout.strip() == b"1000000"


async def test_commands_of_many_lines_and_bytes(sh: Sh) -> None:
    """Here-documents, quotes, odd bytes and long texts are the shell's as they are."""
    done = await sh("cat <<'END'\n  a \\ b\t$X\n\nEND\nprintf '%s' \"it's\"")
    assert done.stdout == b"  a \\ b\t$X\n\nit's"
    done = await sh("x='" + "y" * 200_000 + "'; echo ${#x}; echo '\udcff'")
    assert done.stdout == b"200000\n\xff\n"


async def test_what_runs_on_keeps_its_own_streams(sh: Sh) -> None:
    """A background job of one command prints nothing into the next, and does not hold it up."""
    first = await sh("(while :; do echo noise; sleep 0.01; done) & pid=$!; echo started")
    assert b"started\n" in first.stdout
    second = await sh("sleep 0.1; echo quiet; kill $pid")
    assert second.stdout == b"quiet\n"


async def test_exit_ends_the_shell_and_says_so(sh: Sh) -> None:
    """The command's status is exact; the next command is in a new shell and knows."""
    assert (await sh("X=1")).exit.shell_ended is False
    done = await sh("echo bye; exit 7")
    assert (done.exit.exit_code, done.exit.shell_ended, done.stdout) == (7, True, b"bye\n")
    done = await sh("echo ${X:-gone}")
    assert (done.exit.shell_restarted, done.stdout) == (True, b"gone\n")
    assert (await sh("true")).exit.shell_restarted is False


async def test_errors_do_not_hang_the_shell(sh: Sh) -> None:
    """Syntax errors, `set -e`, unknown commands: an exit code and messages on stderr, then it goes on."""
    done = await sh("if then (")
    assert done.exit.exit_code == 2
    assert done.stderr
    assert (await sh("nosuchcommand")).exit.exit_code == 127
    assert (await sh("set -e; false; echo no")).exit.exit_code == 1
    assert (await sh("echo on")).stdout == b"on\n"
    assert (await sh("set -u; set -f; IFS=x; echo on")).stdout == b"on\n"
    assert (await sh("echo on")).stdout == b"on\n"


async def test_a_killed_shell_starts_again(sh: Sh, box: Box) -> None:
    """Killed with its group in the middle of a command: output so far, the signal, then a new shell."""
    spec = box.spec("echo up; read -r x", shell="main", stdin="open")
    await sh("true")
    process = await box.link.spawn(spec)
    await process.stdout.changed(0)
    os.kill(process.pid, signal.SIGKILL)
    done = await box.done(process)
    assert (done.exit.signal, done.exit.shell_ended, done.stdout) == ("KILL", True, b"up\n")
    done = await sh("echo again")
    assert (done.exit.shell_restarted, done.stdout) == (True, b"again\n")


async def test_each_command_joins_its_own_kill_group(box: Box, tmp_path: Path) -> None:
    """The shell writes itself into the first group; the guest moves it into those that follow."""
    first, second = tmp_path / "first", tmp_path / "second"
    with first.open("wb") as procs:
        await box.run("true", shell="main", procs_fd=procs.fileno())
    with second.open("wb") as procs:
        done = await box.run("true", shell="main", procs_fd=procs.fileno())
    assert (first.read_bytes(), second.read_bytes()) == (b"0", str(done.process.pid).encode())


async def test_a_busy_shell_refuses_and_others_do_not_care(box: Box) -> None:
    """One command at a time in a shell; another name is another shell."""
    process = await box.spawn("read -r x; echo $x", shell="main", stdin="open")
    with pytest.raises(SpawnError) as caught:
        await box.spawn("true", shell="main")
    assert (caught.value.errno_name, caught.value.stage) == ("EBUSY", "shell")
    assert (await box.run("echo ${x:-none}", shell="other")).stdout == b"none\n"
    await process.write_stdin(b"late\n")
    assert (await box.done(process)).stdout == b"late\n"
    assert (await box.run("echo $x", shell="main")).stdout == b"late\n"


async def test_a_shell_of_another_user_and_place(box: Box) -> None:
    """User, directory and environment count when it starts."""
    done = await box.run("id -un; pwd; echo $A", shell="main", user="nobody", cwd="/tmp", env={"A": "1"})
    assert done.stdout == b"nobody\n/tmp\n1\n"
    done = await box.run("id -un; cat", shell="main", stdin=b"x")
    assert done.stdout == b"nobody\nx"


async def test_shells_survive_an_agent(box: Box) -> None:
    """A new agent finds the shell as it was, also one at work."""
    await box.run("X=kept", shell="main")
    process = await box.spawn("read -r go; echo $X", shell="main", stdin="open")
    box.link.close()
    link = await box.reconnect()
    found = {found.process_id: found for found in await link.processes()}
    await found[process.process_id].write_stdin(b"\n")
    assert (await box.done(found[process.process_id])).stdout == b"kept\n"
    assert (await box.run("echo $X", shell="main")).stdout == b"kept\n"


async def test_shells_leave_nothing_behind(box: Box) -> None:
    """No FIFO stays anywhere, no descriptor in the guest."""
    await box.run("true", shell="main")
    before = len(os.listdir(f"/proc/{box.popen.pid}/fd"))
    for _ in range(20):
        done = await box.run("echo x", shell="main", stdin=b"y")
        await box.link.forget(done.process.process_id)
    assert len(os.listdir(f"/proc/{box.popen.pid}/fd")) == before
    leftovers = [
        name for place in ("/dev/shm", "/tmp") for name in os.listdir(place) if name.startswith(".shell-")
    ]
    assert leftovers == []


async def test_no_shell_in_the_image(box: Box) -> None:
    """Told as such, and again the next time."""
    for _ in range(2):
        with pytest.raises(SpawnError) as caught:
            await box.spawn("true", shell="main", env={"PATH": "/nowhere"})
        assert caught.value.errno_name == "ENOENT"
    assert (await box.run("echo $X", shell="main", env={"X": "1"})).stdout == b"1\n"


async def py(box: Box, code: str, procs_fd: int | None = None, **fields: Any) -> Done:
    """Run code in the context "main"."""
    spec = CodeSpec(
        process_id=f"c{next(box.ids)}", context=fields.pop("context", "main"), code=code, **fields
    )
    async with asyncio.timeout(20):
        return await box.done(await box.link.run_code_context(spec, procs_fd=procs_fd))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 + 1", ("2", 2)),
        ("'é'", ("'é'", "é")),
        ("[1, (2.5, None), {'a': True}]", ("[1, (2.5, None), {'a': True}]", [1, [2.5, None], {"a": True}])),
        ("float('nan')", ("nan", None)),
        ("{1, 2}", ("{1, 2}", None)),
        ("x = 5", (None, None)),
        ("None", (None, None)),
        ("", (None, None)),
        ("x = 5\nx", ("5", 5)),
        ("x;", ("5", 5)),
        ("for i in range(3): pass", (None, None)),
        ("class A:\n    def __repr__(self): return 'me'\nA()", ("me", None)),
    ],
)
async def test_the_last_expression_is_the_result(
    box: Box, code: str, expected: tuple[object, object]
) -> None:
    """As text, and as JSON where it is plain data; statements have none."""
    await py(box, "x = 5")
    done = await py(box, code)
    assert done.exit.exit_code == 0, done.stderr
    assert done.process.result_value() == expected


async def test_python_state_lives_on_and_streams_are_apart(box: Box) -> None:
    """Names, imports, classes that pickle, `_`; output of each code is its own."""
    await py(box, "import os, pickle, sys\nclass P:\n    n = 1\np = P()")
    done = await py(
        box,
        "print('out'); print('err', file=sys.stderr); os.write(1, b'\\xff\\0'); pickle.loads(pickle.dumps(p)).n",
    )
    assert (done.stdout, done.stderr) == (b"out\n\xff\0", b"err\n")
    assert done.process.result_value() == ("1", 1)
    assert (await py(box, "_ + 1")).process.result_value() == ("2", 2)
    assert (await py(box, "__name__")).process.result_value()[1] == "__main__"
    assert (await py(box, "sys.stdin.read()", stdin=b"in")).process.result_value()[1] == "in"
    assert (await py(box, "sys.stdin.read()")).process.result_value()[1] == ""


async def test_exceptions_are_tracebacks_of_the_code_alone(box: Box) -> None:
    """Exit code 1, the code's own lines shown, nothing of the machinery; state before it is kept."""
    done = await py(box, "y = 1\ndef f():\n    return 1 / 0\nf()")
    text = done.stderr.decode()
    assert done.exit.exit_code == 1
    assert text.startswith(
        'Traceback (most recent call last):\n  File "<context:1>", line 4, in <module>\n    f()'
    )
    assert "return 1 / 0" in text
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "driver" not in text
    assert (await py(box, "y")).process.result_value() == ("1", 1)
    done = await py(box, "def (")
    assert done.exit.exit_code == 1
    assert b"SyntaxError" in done.stderr
    assert b"ast.py" not in done.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(4)", 4),
        ("raise SystemExit", 0),
        ("exit('why')", 1),
        ("raise KeyboardInterrupt", 1),
    ],
)
async def test_leaving_is_a_status_not_the_end(box: Box, code: str, status: int) -> None:
    """sys.exit gives the status; the context stays."""
    await py(box, "z = 3")
    assert (await py(box, code)).exit.exit_code == status
    done = await py(box, "z")
    assert (done.process.result_value(), done.exit.context_restarted) == (("3", 3), False)


async def test_a_killed_context_starts_again(box: Box) -> None:
    """Its end is told with the signal, the next code knows that the state is gone."""
    await py(box, "x = 1")
    done = await py(box, "print('so far', flush=True)\nimport os; os.kill(os.getpid(), 9)")
    assert (done.exit.signal, done.exit.context_ended, done.stdout) == ("KILL", True, b"so far\n")
    done = await py(box, "x")
    assert (done.exit.exit_code, done.exit.context_restarted) == (1, True)
    assert (await py(box, "1")).exit.context_restarted is False


async def test_a_fork_that_falls_out_of_the_code_ends(box: Box) -> None:
    """Only one process goes on with the context."""
    done = await py(box, "import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()")
    assert done.stdout == b"child\n"
    assert (await py(box, "6 * 7")).process.result_value() == ("42", 42)


async def test_children_get_no_descriptor_of_the_machinery(box: Box) -> None:
    """A program started by the code has 0, 1, 2."""
    done = await py(
        box, "import subprocess; subprocess.run('ls /proc/self/fd', shell=True, close_fds=False).returncode"
    )
    assert done.stdout.split() == [b"0", b"1", b"2", b"3"]


async def test_no_python_in_the_image(box: Box) -> None:
    """ENOENT at stage command: the agent can say that the image has none."""
    with pytest.raises(SpawnError) as caught:
        await py(box, "1", env={"PATH": "/nowhere"})
    assert (caught.value.errno_name, caught.value.stage) == ("ENOENT", "command")
    assert (await py(box, "1")).exit.context_restarted is False
