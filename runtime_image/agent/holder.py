"""Keeps an agent running, and its descriptors while it is not.

    python -m runtime_image.agent.holder --socket PATH -- AGENT ARG...

The holder starts the agent and starts it again when it dies. A sandbox lives as long as someone has
the other end of its guest's socket open; the agent leaves copies of those sockets here, so that the
next agent finds every sandbox as the last one left it. Small, standard library only, and it opens
nothing of what it keeps: there is little in it that could die.

It ends when the agent exits with 0, after `HolderClient.shutdown`, or after SIGTERM or SIGINT, which
it passes on to the agent; always together with the agent. What it kept is then closed, and guests
nobody holds any more end their sandboxes. Nothing else ends it, a closed pipe of its parent neither.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

# Where the agent finds its holder, in its environment.
SOCKET_VARIABLE = "SHOAL_AGENT_HOLDER"
_NAME_BYTES = 200
_FRAME = 4096
# A kernel limit: SCM_MAX_FD is 253. Names of a page must fit the frame as well.
_PAGE = 16
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# An agent that lived this long was well; its death starts the backoff anew.
_WELL_S = 30.0
_PUT, _DROP, _GET, _SHUTDOWN, _OK = b"P", b"D", b"G", b"S", b"K"
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)


class HolderError(OSError):
    """The holder is not there, or answers otherwise than it should."""


class HolderClient:
    """The agent's way to its holder. Blocking; each call is one round trip on this machine (0.1 ms).

    Args:
        path: the holder's socket.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._sock: socket.socket | None = None

    def put(self, name: str, fd: int) -> None:
        """Keep a copy of `fd` under `name` (at most 200 bytes); replaces what was there.

        Raises:
            HolderError: it is not kept.
        """
        self._call(_PUT + _checked(name), [fd])

    def get_all(self) -> dict[str, int]:
        """Copies of all that is kept, by name; the caller owns them. Closed on exec.

        Raises:
            HolderError: the holder did not answer; nothing was taken over.
        """
        found: dict[str, int] = {}
        after = b""
        try:
            while True:
                names, fds = self._exchange(_GET + after, [])
                if not fds:
                    return found
                listed = names[1:].split(b"\0")
                found.update(zip((name.decode() for name in listed), fds, strict=True))
                after = listed[-1]
        except BaseException:
            for fd in found.values():
                os.close(fd)
            raise

    def drop(self, name: str) -> None:
        """Keep it no longer; harmless when there is none.

        Raises:
            HolderError: the holder did not answer.
        """
        self._call(_DROP + _checked(name), [])

    def shutdown(self) -> None:
        """Do not start the agent again: the holder ends when this one does.

        Raises:
            HolderError: the holder did not answer.
        """
        self._call(_SHUTDOWN, [])

    def close(self) -> None:
        """Let go of the connection; what is kept stays."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, message: bytes, fds: Sequence[int]) -> None:
        self._exchange(message, fds)

    def _exchange(self, message: bytes, fds: Sequence[int]) -> tuple[bytes, list[int]]:
        try:
            if self._sock is None:
                self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._sock.settimeout(10)
                with _address(Path(self._path)) as address:
                    self._sock.connect(address)
            _send(self._sock, message, fds)
            answer, received = _receive(self._sock)
        except OSError as err:
            self.close()
            raise HolderError(err.errno, f"holder at {self._path}: {err}") from err
        if answer[:1] != _OK:
            self.close()
            raise HolderError(0, f"holder at {self._path}: {answer.decode('utf-8', 'replace') or 'gone'}")
        return answer, received


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """`path` by way of its directory's descriptor: addresses end at 107 bytes, homes may be deeper."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _checked(name: str) -> bytes:
    raw = name.encode()
    if not 0 < len(raw) <= _NAME_BYTES or b"\0" in raw:
        raise HolderError(0, f"not a name: {name!r:.300}")
    return raw


def _send(sock: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    rights = [(*_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([message], rights)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize
    message, ancillary, _, _ = sock.recvmsg(_FRAME, socket.CMSG_SPACE(_PAGE * size), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == _RIGHTS:
            fds.frombytes(payload[: len(payload) // size * size])
    return message, list(fds)


class Holder:
    """The process itself: one loop over its clients, its agent and its signals."""

    def __init__(self, path: Path, argv: Sequence[str]) -> None:
        self._path = path
        self._argv = list(argv)
        self._kept: dict[bytes, int] = {}
        self._agent: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._failures = 0
        self._start_at: float | None = 0.0
        self._ending = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Serve until the end; the exit code."""
        listener = self._listen()
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        for ignored in (signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        try:
            while True:
                if self._start_at is not None and time.monotonic() >= self._start_at:
                    self._start()
                timeout = None if self._start_at is None else max(0.0, self._start_at - time.monotonic())
                for key, _ in self._selector.select(timeout):
                    if key.fileobj is listener:
                        self._accept(listener)
                    elif key.fileobj is wake:
                        for caught in wake.recv(256):
                            self._signalled(caught)
                    elif isinstance(key.fileobj, socket.socket):
                        self._serve(key.fileobj)
                code = self._reap()
                if code is not None:
                    return code
        finally:
            self._path.unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Under its name only once it takes connections.
        aside = self._path.with_name(f".{os.getpid()}")
        # Only the same user may connect: whoever has a guest's socket commands its sandbox.
        before = os.umask(0o177)
        try:
            with _address(aside) as address:
                listener.bind(address)
        finally:
            os.umask(before)
        listener.listen(16)
        aside.rename(self._path)
        listener.setblocking(False)
        return listener

    def _start(self) -> None:
        self._start_at = None
        self._started = time.monotonic()
        environment = {**os.environ, SOCKET_VARIABLE: str(self._path)}
        try:
            self._agent = subprocess.Popen(self._argv, env=environment)
        except OSError as err:
            _say(f"cannot start {self._argv[0]}: {err}")
            self._again()

    def _again(self) -> None:
        lived = time.monotonic() - self._started
        self._failures = 0 if lived > _WELL_S else self._failures + 1
        self._start_at = time.monotonic() + _BACKOFF_S[min(self._failures, len(_BACKOFF_S)) - 1]

    def _signalled(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._ending = True
            self._start_at = None
            if self._agent is not None:
                self._agent.send_signal(number)

    def _reap(self) -> int | None:
        if self._agent is None:
            return 0 if self._ending else None
        code = self._agent.poll()
        if code is None:
            return None
        self._agent = None
        if self._ending or code == 0:
            return code if code >= 0 else 128 - code
        _say(f"the agent ended with {code}; starting it again")
        self._again()
        return None

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            client.close()
            return
        # One that does not read its answers shall not hold up the others.
        client.setblocking(False)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket) -> None:
        fds: list[int] = []
        try:
            message, fds = _receive(client)
            if not message:
                raise ConnectionError
            command, name = message[:1], message[1:]
            if command == _PUT and len(fds) == 1:
                self._drop(name)
                self._kept[name] = fds.pop()
                _send(client, _OK, [])
            elif command == _DROP:
                self._drop(name)
                _send(client, _OK, [])
            elif command == _GET:
                page = sorted(kept for kept in self._kept if kept > name)[:_PAGE]
                _send(client, _OK + b"\0".join(page), [self._kept[kept] for kept in page])
            elif command == _SHUTDOWN:
                self._ending = True
                _send(client, _OK, [])
            else:
                _send(client, b"what?", [])
        except OSError:
            self._selector.unregister(client)
            client.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _drop(self, name: bytes) -> None:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)


def _say(message: str) -> None:
    try:
        sys.stderr.write(f"holder: {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # Our parent's pipe is gone; we are not.
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="holder", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("--socket", type=Path, required=True, help="where the agent reaches its holder")
    parser.add_argument("agent", nargs=argparse.REMAINDER, help="-- and the agent's command")
    arguments = parser.parse_args(argv)
    command = arguments.agent[1:] if arguments.agent[:1] == ["--"] else arguments.agent
    if not command:
        parser.error("no agent to start")
    return Holder(arguments.socket, command).run()


if __name__ == "__main__":
    raise SystemExit(main())
