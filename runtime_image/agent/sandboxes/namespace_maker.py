"""Makes fresh user and network namespaces, one pair per id range; run as a program of its own.

A user namespace can only be made by a single-threaded process, which the agent is not. The agent
starts this file with its own interpreter and a socket as standard input, names id ranges, and gets
back one message per range that carries two descriptors: user namespace, network namespace (its
loopback up, nothing else in it).

The namespace is made by the *effective uid of the range*, not by root: the kernel charges what is
counted per user (inotify instances and watches, pending signals, locked memory, message queues ...)
to the maker's account in the parent namespace as well. With root as the maker all sandboxes of a
host would share root's 128 inotify instances, and one could take them all.

Standard library only; imports nothing of ours, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _raise_capabilities() -> None:
    """Makes every permitted capability effective again after the effective uid changed."""
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    _checked(_libc.capget(header, data), "capget")
    sets = list(struct.unpack("=6I", data.raw))
    sets[0], sets[3] = sets[1], sets[4]
    _checked(_libc.capset(header, struct.pack("=6I", *sets)), "capset")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _child(order: dict[str, Any], id_base: int, made: int, mapped: int, out: int) -> None:
    if order["own_accounts"]:
        os.setegid(id_base)
        os.seteuid(id_base)
        _raise_capabilities()
    _checked(_libc.unshare(CLONE_NEWUSER), "unshare(user)")
    os.write(made, b"1")
    if os.read(mapped, 1) != b"1":
        raise OSError("its ids were not mapped")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _checked(_libc.unshare(CLONE_NEWNET), "unshare(net)")
    _loopback_up()
    for name, value in order["limits"].items():
        with open(f"/proc/sys/user/{name}", "w") as limit:
            limit.write(str(value))
    descriptors = array.array(
        "i",
        [os.open("/proc/self/ns/user", os.O_RDONLY), os.open("/proc/self/ns/net", os.O_RDONLY)],
    )
    with socket.socket(fileno=os.dup(out)) as sock:
        sock.sendmsg(
            [json.dumps({"id_base": id_base}).encode()],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
        )


def _make(order: dict[str, Any], id_base: int, out: int) -> None:
    made_read, made_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # Its own copies would keep it waiting for ever when the maker gives up.
            os.close(made_read)
            os.close(mapped_write)
            _child(order, id_base, made_write, mapped_read, out)
            status = 0
        except OSError as error:
            os.write(2, f"id range {id_base}: {error}\n".encode())
        finally:
            os._exit(status)
    os.close(made_write)
    os.close(mapped_read)
    try:
        if os.read(made_read, 1) == b"1":
            for kind in ("uid", "gid"):
                with open(f"/proc/{pid}/{kind}_map", "w") as id_map:
                    id_map.write(f"0 {id_base} {order['id_size']}\n")
            os.write(mapped_write, b"1")
    finally:
        os.close(mapped_write)
        os.close(made_read)
        _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(f"no namespaces for the id range at {id_base}")


def main() -> int:
    """Reads the order from argv[1] (JSON) and answers on descriptor 0."""
    order = json.loads(sys.argv[1])
    for id_base in order["id_bases"]:
        try:
            _make(order, id_base, 0)
        except OSError as error:
            os.write(2, f"{error}\n".encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
