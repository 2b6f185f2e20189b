"""Id ranges of a host, each leased with a fresh user and network namespace of its own.

A range goes back only after the sandbox's teardown; ranges are taken in the order in which they were
freed, so that one rests as long as possible. Namespaces are used once: they are made ahead in batches
(3 ms each, off the path of a start), and closed when the sandbox has joined them.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from runtime_image.agent.sandboxes.model import (
    ID_RANGE_SIZE,
    Defences,
    NoIdRange,
    NotSupported,
    SandboxRuntimeError,
)

_MAKER: Final = Path(__file__).with_name("namespace_maker.py")
_BATCH: Final = 16
_REFILL_BELOW: Final = 6
_MAKER_TIMEOUT_S: Final = 60.0
# Counted per user namespace by the kernel (/proc/sys/user): what a sandbox may have at most. No user
# namespace inside, whatever the system call filter says.
NAMESPACE_LIMITS: Final = {
    "max_user_namespaces": 0,
    "max_inotify_instances": 128,
    "max_inotify_watches": 65_536,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """A leased range and the namespaces made for it. `close` closes the descriptors only."""

    id_base: int
    userns_fd: int
    netns_fd: int

    def close(self) -> None:
        """Once, when the sandbox runs or its start failed."""
        os.close(self.userns_fd)
        os.close(self.netns_fd)


class IdentityPool:
    """Leases ranges. Blocking, thread-safe."""

    def __init__(self, *, id_base: int, id_count: int, defences: Defences) -> None:
        self._free = collections.deque(id_base + n * ID_RANGE_SIZE for n in range(id_count))
        self._count = id_count
        self._leases: dict[str, int] = {}
        self._defences = defences
        self._ready: dict[int, Identity] = {}
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._closed = False

    def mark_leased(self, owner: str, id_base: int) -> None:
        """Takes a range out that a sandbox found on this host already has."""
        with self._lock, contextlib.suppress(ValueError):
            self._free.remove(id_base)
            self._leases[owner] = id_base

    def lease(self, owner: str) -> Identity:
        """The next range, for a sandbox that has none. Raises NoIdRange when none is free."""
        with self._lock:
            if not self._free:
                raise NoIdRange(f"all {self._count} id ranges of this host are leased")
            id_base = self._leases[owner] = self._free.popleft()
            identity = self._ready.pop(id_base, None)
        if identity is not None:
            return identity
        try:
            with self._making:
                with self._lock:
                    identity = self._ready.pop(id_base, None)
                if identity is None:
                    self._make([id_base, *self._unready(_BATCH - 1)])
                    with self._lock:
                        identity = self._ready.pop(id_base)
        except BaseException:
            self.release(owner)
            raise
        return identity

    def release(self, owner: str) -> None:
        """Takes a range back; twice is once. The caller has torn everything down that used it."""
        with self._lock:
            id_base = self._leases.pop(owner, None)
            if id_base is not None:
                self._free.append(id_base)

    def refill(self) -> None:
        """Makes the next batch when few are left; for a background thread."""
        with self._lock:
            if len(self._ready) >= min(_REFILL_BELOW, len(self._free)) or self._closed:
                return
        with self._making:
            missing = self._unready(_BATCH)
            if missing:
                self._make(missing)

    def leased_count(self) -> int:
        """How many ranges are out."""
        with self._lock:
            return len(self._leases)

    def close(self) -> None:
        """Closes the namespaces that were made ahead."""
        with self._making, self._lock:
            self._closed = True
            for identity in self._ready.values():
                identity.close()
            self._ready.clear()

    def _unready(self, count: int) -> list[int]:
        with self._lock:
            ahead = [id_base for id_base in self._free if id_base not in self._ready]
        return ahead[:count]

    def _make(self, id_bases: list[int]) -> None:
        for identity in make_namespaces(id_bases, self._defences):
            with self._lock:
                self._ready[identity.id_base] = identity


def make_namespaces(id_bases: Iterable[int], defences: Defences) -> Iterator[Identity]:
    """Runs the maker once. Raises NotSupported when the kernel refuses."""
    wanted = list(id_bases)
    order = json.dumps(
        {
            "id_bases": wanted,
            "id_size": ID_RANGE_SIZE,
            "limits": NAMESPACE_LIMITS if defences.user_namespace_limits else {},
            "own_accounts": defences.own_accounts,
        }
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            maker = subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", str(_MAKER), order],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={},
                text=True,
            )
        ours.settimeout(_MAKER_TIMEOUT_S)
        try:
            for _ in wanted:
                identity = _receive(ours)
                if identity is None:
                    break
                yield identity
        except TimeoutError:
            maker.kill()
            raise
        finally:
            ours.close()
            _, complaint = maker.communicate()
    if maker.returncode:
        raise NotSupported(
            f"user namespaces cannot be made here: {complaint.strip()}",
            "check that user.max_user_namespaces is not 0 and that this is real root",
        )


def _receive(sock: socket.socket) -> Identity | None:
    descriptors = array.array("i")
    message, ancillary, _, _ = sock.recvmsg(
        4096, socket.CMSG_SPACE(2 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    if not message:
        return None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if len(descriptors) != 2:
        raise SandboxRuntimeError("the namespace maker sent no descriptors; is the open file limit reached?")
    return Identity(id_base=json.loads(message)["id_base"], userns_fd=descriptors[0], netns_fd=descriptors[1])
