"""Root inside attacks the host, its neighbours and the guest; each attack also has to win where its defence is off."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import secrets
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime_image.agent.link import ProcessSpec
from runtime_image.agent.sandboxes import (
    Defences,
    Limits,
    RuntimeSettings,
    Sandbox,
    SandboxRuntime,
    SandboxSpec,
    syscalls,
)
from tests.integration.sandboxes.attacks import ATTACKS, PRELUDE, Attack

LIMITS = Limits(memory_mib=512, disk_mib=256, pids=60)

# A PID 1 with none of the guest's own hardening: runs what it is sent, answers what was printed.
STAND_IN = """
import os, socket, subprocess, sys
link = socket.socket(fileno=0)
link.send(b"ready")
while code := link.recv(60000):
    ran = subprocess.run([sys.executable, "-I", "-c", code.decode()], capture_output=True, stdin=subprocess.DEVNULL)
    link.send((ran.stdout or ran.stderr)[-60000:] or b"nothing")
"""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What of the host the attacks aim at."""

    values: dict[str, Any]

    def code(self, attack: Attack) -> str:
        code = attack.code
        for name, value in self.values.items():
            code = code.replace("{" + name + "}", str(value))
        return PRELUDE + code


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    marker = tmp_path_factory.mktemp("host") / "marker"
    marker.write_text("secret")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = f"shoal-test-{secrets.token_hex(6)}"
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind("\0" + abstract)
        local.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    with peer, contextlib.suppress(OSError):
                        peer.sendall(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown, socket.SHUT_RDWR)
        victim = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(victim.kill)
        libc = ctypes.CDLL(None, use_errno=True)
        key = secrets.randbelow(1 << 30) + 1
        segment = libc.shmget(key, 4096, 0o666 | 0o1000)
        assert segment >= 0
        stack.callback(libc.shmctl, segment, 0, None)
        image = marker.with_name("disk.img")
        image.write_bytes(b"secret".ljust(1 << 20, b"."))
        device, loop = syscalls.attach_loop(str(image))
        stack.callback(os.close, loop)
        disk = os.stat(device).st_rdev
        yield Facts(
            {
                "marker": marker,
                "port": server.getsockname()[1],
                "abstract": abstract,
                "victim": victim.pid,
                "shm_key": key,
                "major": os.major(disk),
                "minor": os.minor(disk),
            }
        )


class StandIn:
    """A sandbox whose PID 1 is the stand-in."""

    def __init__(self, sandbox: Sandbox) -> None:
        assert sandbox.sock is not None
        self.sandbox = sandbox
        self._sock = sandbox.sock
        self._sock.settimeout(30)

    async def run(self, code: str) -> dict[str, Any]:
        def talk() -> bytes:
            self._sock.send(code.encode())
            return self._sock.recv(65536)

        said = await asyncio.to_thread(talk)
        try:
            found: dict[str, Any] = json.loads(said)
        except ValueError:
            raise AssertionError(said.decode(errors="replace")) from None
        return found


@pytest.fixture(scope="module")
def open_guest(guest_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guest directory that anyone may write to on the host."""
    copy = tmp_path_factory.mktemp("open") / "guest"
    shutil.copytree(guest_dir, copy, symlinks=True)
    copy.chmod(0o777)
    return copy


@pytest.fixture
async def stand_in(
    settings: RuntimeSettings, images: Any, open_guest: Path, tmp_path: Path
) -> AsyncIterator[Any]:
    """Starts sandboxes with a plain PID 1, whose guest directory is not protected by its own mode."""
    async with contextlib.AsyncExitStack() as stack:
        number = 0

        async def make(defences: Defences) -> StandIn:
            nonlocal number
            number += 1
            runtime = await stack.enter_async_context(
                SandboxRuntime(
                    dataclasses.replace(
                        settings,
                        home=tmp_path / f"stand-in{number}",
                        cgroup_name=f"{settings.cgroup_name}-s{number}",
                        id_base=settings.id_base + number * 65_536 * 16,
                        id_count=1,
                        guest_dir=open_guest,
                        guest_argv=("/usr/bin/python3", "-I", "-c", STAND_IN),
                        defences=defences,
                    )
                )
            )
            stack.push_async_callback(runtime.sweep, set())
            sandbox = await runtime.start(
                SandboxSpec(sandbox_id="box", layers=(images.busybox, images.python), resources=LIMITS)
            )
            assert sandbox.sock is not None
            stack.callback(sandbox.sock.close)
            box = StandIn(sandbox)
            assert await asyncio.to_thread(sandbox.sock.recv, 99) == b"ready"
            return box

        yield make


def _without(*names: str) -> Defences:
    return dataclasses.replace(Defences(), **dict.fromkeys(names, False))


def _here(attack: Attack) -> None:
    if attack.machine and attack.machine != platform.machine():
        pytest.skip(f"the attack is written for {attack.machine}")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_the_attack_fails_in_a_real_sandbox(attack: Attack, make_box: Any, facts: Facts) -> None:
    """As any command of an agent would run: under the real guest, all defences up."""
    _here(attack)
    box = await make_box(limits=LIMITS, python=True)
    found = (await box.py(facts.code(attack))).json()
    assert not found["won"], found
    assert (await box.sh("echo alive")).stdout == "alive\n"


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_the_attack_wins_where_its_defences_are_off(
    attack: Attack, stand_in: Any, facts: Facts
) -> None:
    """The positive control, and that each of several defences holds alone."""
    _here(attack)
    code = facts.code(attack)
    weak = await stand_in(_without(*attack.off))
    found = await weak.run(code)
    assert found["won"], found
    for alone in attack.off:
        if alone not in attack.not_alone:
            others = [name for name in attack.off if name != alone]
            strong = await stand_in(_without(*others))
            found = await strong.run(code)
            assert not found["won"], f"{alone} alone does not hold: {found}"


async def test_metadata_and_networks_are_unreachable_by_construction(make_box: Any) -> None:
    """No route at all: the kernel refuses at once, nothing is sent. Loopback inside works."""
    box = await make_box(python=True)
    found = (
        await box.py("""
import errno, json, socket
def reach(address):
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        s = socket.socket(family, kind); s.settimeout(5)
        try:
            s.connect((address, 80))
            return "reached"
        except OSError as error:
            answer = errno.errorcode.get(error.errno, str(error))
        if answer != "ENETUNREACH":
            return answer
    return answer
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
print(json.dumps({a: reach(a) for a in
    ("169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.1.1", "192.0.2.1", "fd00:ec2::254")}
    | {"interfaces": [name for _, name in socket.if_nameindex()]}))
""")
    ).json()
    assert found.pop("interfaces") == ["lo"]
    assert set(found.values()) <= {"ENETUNREACH", "EADDRNOTAVAIL"}, found


GUEST_ATTACKS = {
    "ptrace": "done(libc.ptrace(0x4206, 1, 0, 0) == 0, os.strerror(ctypes.get_errno()))",
    "its memory": "attempt(lambda: os.open('/proc/1/mem', os.O_RDWR) >= 0)",
    "its descriptors": "attempt(lambda: os.readlink('/proc/1/fd/0') is not None)",
    "its environment": "attempt(lambda: open('/proc/1/environ').read() is not None)",
    "its memory by process_vm_readv": """
buffer = ctypes.create_string_buffer(16)
here = ctypes.create_string_buffer(struct.pack('=QQ', ctypes.addressof(buffer), 8))
there = ctypes.create_string_buffer(struct.pack('=QQ', 4096, 8))
# Nothing is at that address: whoever may look gets EFAULT.
done(call(310, 1, here, 1, there, 1, 0) == -errno.EFAULT)
""",
    "its socket by pidfd_getfd": "done(call(438, call(434, 1, 0), 0, 0) >= 0)",
}


LIMIT_ATTACK = """
limit = ctypes.create_string_buffer(struct.pack('=QQ', 64, 64))
answers = [call(302, pid, kind, limit, 0) for kind in (0, 1, 3, 6, 7, 9) for pid in (1, (1 << 32) | 1)]
done(any(answer == 0 for answer in answers), answers)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="written for x86_64")
async def test_root_inside_cannot_set_the_guests_limits(make_box: Any, stand_in: Any) -> None:
    """A guest without descriptors or CPU time could neither start nor end an action. One's own limits can be set, and
    anybody's read; without the filter the same attack wins."""
    box = await make_box(python=True)
    found = (await box.py(PRELUDE + LIMIT_ATTACK)).json()
    assert not found["won"], found
    own = (
        "import os, resource as r\nn = r.RLIMIT_NOFILE\nr.setrlimit(n, (99, 99))\nr.prlimit(0, n, (98, 98))\n"
    )
    assert (
        await box.py(own + "print(r.getrlimit(n)[0], r.prlimit(os.getppid(), n)[0] > 99)")
    ).stdout == "98 True\n"
    assert (await box.sh("echo alive")).stdout == "alive\n"
    found = await (await stand_in(_without("seccomp"))).run(PRELUDE + LIMIT_ATTACK)
    assert found["won"], found


@pytest.mark.parametrize("name", GUEST_ATTACKS)
async def test_root_inside_cannot_touch_the_guest(name: str, make_box: Any, stand_in: Any) -> None:
    """Against a PID 1 without the guest's hardening the same attack wins."""
    if "call(" in GUEST_ATTACKS[name] and platform.machine() != "x86_64":
        pytest.skip("written for x86_64")
    code = PRELUDE + GUEST_ATTACKS[name]
    box = await make_box(python=True)
    found = (await box.py(code)).json()
    assert not found["won"], found
    found = await (await stand_in(Defences())).run(code)
    assert found["won"], found


async def test_the_guest_cannot_be_killed_or_stopped_from_inside(make_box: Any, stand_in: Any) -> None:
    """Every signal to PID 1 is harmless; the same kill ends a guest that is not PID 1 of its namespace."""
    box = await make_box(python=True)
    await box.py("import os\nfor n in range(1, 65):\n  try: os.kill(1, n)\n  except OSError: pass\nprint(1)")
    assert (await box.sh("echo alive")).stdout == "alive\n"
    weak = await stand_in(_without("pid_namespace", "user_namespace"))
    killed = threading.Event()

    def wait() -> None:
        handle = os.pidfd_open(weak.sandbox.pid)
        try:
            if select.select([handle], [], [], 20)[0]:
                killed.set()
        finally:
            os.close(handle)

    waiter = asyncio.create_task(asyncio.to_thread(wait))
    weak._sock.send(f"import os; os.kill({weak.sandbox.pid}, 9)".encode())
    await waiter
    assert killed.is_set()


INOTIFY = """
import ctypes, json, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
held = []
while len(held) < 4000:
    fd = libc.inotify_init1(0)
    if fd < 0:
        break
    held.append(fd)
print(json.dumps(len(held)))
sys.stdout.flush()
if len(sys.argv) > 1:
    time.sleep(1000)
"""


async def test_inotify_of_one_sandbox_is_not_that_of_its_neighbours(
    make_box: Any, settings: RuntimeSettings
) -> None:
    """One that takes all it can get leaves its neighbour's share whole; by a common account it would not."""

    async def neighbour_gets(defences: Defences) -> tuple[int, int]:
        greedy = await make_box(python=True, defences=defences)
        neighbour = await make_box(python=True, defences=defences)
        group = greedy.runtime.kill_group(greedy.sandbox, "greedy")
        process = await greedy.link.spawn(
            ProcessSpec(process_id="greedy", argv=("/usr/bin/python3", "-I", "-c", INOTIFY, "hold")),
            procs_fd=group.procs_fd,
        )
        async with asyncio.timeout(20):
            while not process.stdout.total_bytes:
                await process.stdout.changed(0)
        taken = int(process.stdout.snapshot().data)
        left = (await neighbour.py(INOTIFY)).json()
        group.kill()
        await process.wait()
        group.remove()
        return taken, left

    taken, left = await neighbour_gets(Defences())
    assert taken >= 64
    assert left == taken
    taken, left = await neighbour_gets(_without("own_accounts"))
    assert left < taken


async def test_keys_of_one_sandbox_are_not_those_of_its_neighbours(stand_in: Any) -> None:
    """Even with the filter off: key quotas count per id, and ids are never shared."""
    if platform.machine() != "x86_64":
        pytest.skip("written for x86_64")
    grab = (
        PRELUDE
        + """
count = 0
while call(248, b'user', b'n%d' % count, b'payload', 7, -2) > 0 and count < 2000:
    count += 1
print(json.dumps({"count": count}))
"""
    )
    first = await stand_in(_without("seccomp"))
    second = await stand_in(_without("seccomp"))
    taken = (await first.run(grab))["count"]
    assert taken < 2000
    assert (await second.run(grab))["count"] > taken // 2


async def test_a_neighbours_processes_and_files_are_invisible(make_box: Any) -> None:
    """Own process list, own disk, own /dev/shm."""
    one, two = await make_box(), await make_box()
    assert (await one.sh("echo secret > /tmp/mine; echo secret > /dev/shm/mine; sleep 1000 & echo")).code == 0
    ran = await two.sh("ls /tmp /dev/shm; ps; ls /proc | grep -c '^[0-9]'")
    assert "mine" not in ran.stdout
    assert "sleep" not in ran.stdout


async def test_what_programs_need_still_works(make_box: Any) -> None:
    """Threads (clone3 is refused, libc falls back), debuggers of own children, terminals, sockets, chroot, ids."""
    box = await make_box(python=True)
    found = (
        await box.py(
            PRELUDE
            + """
import multiprocessing, pty, subprocess, tempfile, threading
works = {}
def threads():
    seen = []
    for thread in [threading.Thread(target=lambda: seen.append(1)) for _ in range(8)]:
        thread.start(); thread.join()
    return len(seen) == 8
def debugger():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    seized = libc.ptrace(0x4206, pid, 0, 0)
    os.kill(pid, 9)
    return seized == 0
def terminal():
    master, slave = pty.openpty()
    os.write(slave, b'x\\n')
    return os.ttyname(slave).startswith('/dev/pts/') and os.read(master, 9) == b'x\\r\\n'
def localhost():
    with socket.create_server(('localhost', 0)) as server, socket.create_connection(server.getsockname()) as client:
        return client.getpeername()[0] == '127.0.0.1'
def other_user():
    pid = os.fork()
    if pid == 0:
        os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)
        with tempfile.TemporaryFile() as file:
            os._exit(0 if os.fstat(file.fileno()).st_uid == 1000 else 1)
    return os.waitpid(pid, 0)[1] == 0
def change_root():
    pid = os.fork()
    if pid == 0:
        os.chroot('/tmp'); os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
def devices():
    return open('/dev/urandom', 'rb').read(4) and open('/dev/zero', 'rb').read(2) == b'\\0\\0'
def processors():
    return os.cpu_count() == len(os.sched_getaffinity(0)) and os.path.exists('/sys/devices/system/cpu/online')
def semaphores():
    return multiprocessing.get_context('fork').Lock().acquire()
def bind_low_port():
    return socket.create_server(('127.0.0.1', 80)) is not None
for check in (threads, debugger, terminal, localhost, other_user, change_root, devices, processors, semaphores,
              bind_low_port):
    try:
        works[check.__name__] = bool(check())
    except Exception as error:
        works[check.__name__] = repr(error)
print(json.dumps(works))
"""
        )
    ).json()
    assert {name: result for name, result in found.items() if result is not True} == {}
