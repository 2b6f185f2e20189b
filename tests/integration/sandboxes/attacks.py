"""What hostile root tries from inside: code that runs in a sandbox and prints whether it won.

Each names the defences that, all down at once, let it win. Where several are named each of them holds
the attack off alone.
"""

from __future__ import annotations

import dataclasses

# Raw system calls, so that an attack does not depend on what a library refuses to do.
PRELUDE = """
import ctypes, errno, fcntl, json, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    kept = [a if isinstance(a, (bytes, ctypes.Array, ctypes._SimpleCData)) else ctypes.c_long(a) for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *kept)
    return result if result >= 0 else -ctypes.get_errno()
def done(won, detail=""):
    print(json.dumps({"won": bool(won), "detail": str(detail)}))
    sys.stdout.flush()
    os._exit(0)
def attempt(work):
    try:
        done(work(), "")
    except OSError as error:
        done(False, error)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """One attempt. `code` follows the prelude; `{names}` in it are filled from the host's facts."""

    name: str
    code: str
    off: tuple[str, ...]
    not_alone: tuple[str, ...] = ()
    """Defences of `off` that are not tried alone: the sandbox cannot even start so, or they only help."""
    machine: str = ""
    """Only on this machine (system call numbers)."""


def _calls(*names: tuple[str, int, str]) -> list[Attack]:
    return [
        Attack(
            name=name,
            machine="x86_64",
            code=f"r = call({number}, {arguments}); done(r != -errno.EPERM and r != -errno.ENOSYS, r)",
            off=("seccomp",),
        )
        for name, number, arguments in names
    ]


ATTACKS = [
    # Mounts and namespaces.
    Attack(
        name="mount a filesystem",
        code="done(libc.mount(b't', b'/tmp', b'tmpfs', 0, None) == 0, os.strerror(ctypes.get_errno()))",
        off=("seccomp", "drop_capabilities"),
    ),
    Attack(
        name="make the read-only parts of proc writable",
        code="""
if libc.umount2(b'/proc/sys', 2):
    done(False, os.strerror(ctypes.get_errno()))
attempt(lambda: os.open('/proc/sys/net/ipv4/ip_default_ttl', os.O_WRONLY) >= 0)
""",
        off=("seccomp", "drop_capabilities"),
    ),
    Attack(
        name="a user namespace of its own",
        code="done(libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno()))",
        off=("seccomp", "user_namespace_limits"),
    ),
    Attack(
        name="a user namespace by clone",
        machine="x86_64",
        code="""
r = call(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if r == 0:
    os._exit(0)
done(r > 0, r)
""",
        off=("seccomp", "user_namespace_limits"),
    ),
    Attack(
        name="a network namespace of its own",
        code="done(libc.unshare(0x40000000) == 0, os.strerror(ctypes.get_errno()))",
        off=("seccomp", "drop_capabilities"),
    ),
    Attack(
        name="clone3 past the filter",
        machine="x86_64",
        # CLONE_NEWUSER in a struct that the filter cannot see.
        code="""
arguments = ctypes.create_string_buffer(struct.pack('=8Q', 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
r = call(435, arguments, 64)
if r == 0:
    os._exit(0)
done(r > 0, r)
""",
        off=("seccomp", "user_namespace_limits"),
    ),
    Attack(
        name="open a host file by its handle",
        machine="x86_64",
        # The guest's directory lies on a host filesystem; inode 2 is the root of an ext4.
        code="""
mount = os.open('/.shoal', os.O_RDONLY)
handle = ctypes.create_string_buffer(struct.pack('=IiII', 8, 1, 2, 0))
r = call(304, mount, handle, os.O_RDONLY)
done(r >= 0, r)
""",
        off=("seccomp", "drop_capabilities", "user_namespace"),
        # Linux 6.18 allows it to whoever has the capability over the mount's namespace; that is the host's.
    ),
    Attack(
        name="write to the guest's program",
        code="attempt(lambda: os.open('/.shoal/writable', os.O_WRONLY | os.O_CREAT) >= 0)",
        off=("read_only_guest",),
    ),
    # Files of the host and of the kernel.
    Attack(
        name="a host file through another process's root",
        code="""
def work():
    for pid in os.listdir('/proc'):
        if pid.isdigit():
            try:
                if open(f'/proc/{pid}/root{marker}').read() == 'secret':
                    return True
            except OSError:
                pass
    return False
attempt(work)
""",
        off=("user_namespace", "pid_namespace", "drop_capabilities"),
        # proc cannot be mounted by a user namespace that does not own the process namespace.
        not_alone=("user_namespace",),
    ),
    Attack(
        name="signal a host process",
        code="attempt(lambda: os.kill({victim}, 0) is None)",
        off=("user_namespace", "pid_namespace"),
        not_alone=("user_namespace",),
    ),
    Attack(
        name="the kernel's page tables of cgroups",
        code="""
path = '/proc/kpagecgroup'
attempt(lambda: os.open(path, os.O_RDONLY) >= 0 and not os.path.samefile(path, '/dev/null'))
""",
        off=("mask_paths", "user_namespace"),
    ),
    Attack(
        name="the kernel's list of keys",
        code="attempt(lambda: len(open('/proc/keys').read()) > 0)",
        off=("mask_paths",),
    ),
    Attack(
        name="the host's block devices and their files",
        code="attempt(lambda: len(os.listdir('/sys/block')) > 0)",
        off=("mask_paths",),
    ),
    Attack(
        name="write a sysctl of its namespaces",
        code="""
path = '/proc/sys/kernel/shm_rmid_forced'
attempt(lambda: open(path, 'w').write(open(path).read()) > 0)
""",
        off=("readonly_paths",),
    ),
    Attack(
        name="write a sysctl of the host",
        # The value it has already, so that the control changes nothing.
        code="""
path = '/proc/sys/kernel/core_pattern'
def work():
    value = open(path).read()
    with open(path, 'w') as sysctl:
        sysctl.write(value)
    return True
attempt(work)
""",
        off=("readonly_paths", "user_namespace"),
    ),
    Attack(
        name="a device node of another's disk",
        code="""
def work():
    os.mknod('/dev/disk', 0o600 | 0o060000, os.makedev({major}, {minor}))
    return os.read(os.open('/dev/disk', os.O_RDONLY), 6) == b'secret'
attempt(work)
""",
        off=("user_namespace", "drop_capabilities", "device_list"),
    ),
    Attack(
        name="a set-uid program",
        code="""
import shutil
# Not busybox: that gives set-uid rights up by itself.
shutil.copy('/usr/bin/python3', '/tmp/su')
os.chmod('/tmp/su', 0o4755)
read, write = os.pipe()
if os.fork() == 0:
    os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)
    os.dup2(write, 1)
    os.execv('/tmp/su', ['su', '-I', '-c', 'import os; print(os.geteuid())'])
os.close(write)
said = os.read(read, 99)
done(said.strip() == b'0', said)
""",
        off=("no_new_privileges", "root_mount_flags"),
    ),
    # The network.
    Attack(
        name="a server on the host's loopback",
        code="attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 2).recv(9) == b'hello')",
        off=("network_namespace",),
    ),
    Attack(
        name="a server on the host's abstract socket",
        code="""
def work():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect('\\0{abstract}')
    return True
attempt(work)
""",
        off=("network_namespace",),
    ),
    Attack(
        name="the machine's supervisor by vsock",
        code="attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).fileno() >= 0)",
        off=("seccomp",),
    ),
    Attack(
        name="raw packets",
        code="attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).fileno() >= 0)",
        off=("drop_capabilities",),
    ),
    Attack(
        name="packet sockets",
        code="attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).fileno() >= 0)",
        off=("seccomp", "drop_capabilities"),
    ),
    # Shared kernel objects.
    Attack(
        name="shared memory of the host",
        code="done(libc.shmget({shm_key}, 0, 0o666) >= 0, os.strerror(ctypes.get_errno()))",
        off=("ipc_namespace",),
    ),
    Attack(
        name="input for a terminal",
        code="""
import pty
def work():
    # A number that only the filter refuses with EPERM; the kernel cuts it to 32 bits.
    master, slave = pty.openpty()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        fcntl.ioctl(slave, 0x540E, 0)
        for number in (0x5412, 0x5412 | 1 << 32):
            r = libc.ioctl(slave, ctypes.c_ulong(number), b'x')
            if r == 0 or ctypes.get_errno() != errno.EPERM:
                os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] != 0
attempt(work)
""",
        off=("seccomp",),
    ),
    Attack(
        name="processes without end",
        code="""
count = 0
pids = []
try:
    for _ in range(150):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        pids.append(pid)
except OSError as error:
    for pid in pids: os.kill(pid, 9)
    done(False, error)
for pid in pids: os.kill(pid, 9)
done(True)
""",
        off=("pids_limit",),
    ),
    Attack(
        name="a filesystem context",
        machine="x86_64",
        code="r = call(430, b'absent', 0); done(r != -errno.EPERM and r != -errno.ENOSYS, r)",
        off=("seccomp", "drop_capabilities"),
    ),
    *_calls(
        ("a key", 248, "b'user', b'name', b'payload', 7, -2"),
        ("keyctl", 250, "0, -3, 1"),
        ("request a key", 249, "b'user', b'absent', 0, 0"),
        ("userfaultfd", 323, "1"),
        ("io_uring", 425, "1, ctypes.create_string_buffer(120)"),
        ("the machine's asynchronous I/O contexts", 206, "65536, ctypes.create_string_buffer(8)"),
        ("handles of files", 304, "-1, ctypes.create_string_buffer(struct.pack('=Ii', 0, 0)), 0"),
        ("quotactl", 179, "1 << 30, 0, 0, 0"),
        ("modify_ldt", 154, "0, ctypes.create_string_buffer(16), 16"),
        ("fanotify", 300, "1 << 9, 0"),
        ("memory policy of others", 256, "0, 0, 0, 0"),
    ),
]  # fmt: skip
