"""The agent's end of the socket pair: datagrams in and out without blocking."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from runtime_image.guest import wire

# Datagrams taken in one turn of the event loop: one busy sandbox must not starve the others.
_BURST = 16


class Transport:
    """Sends and receives frames; tells once when the other end is gone.

    Descriptors are sent, never accepted: the guest has none that the agent should hold.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_frame: Callable[[memoryview], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._writable = asyncio.Event()
        self._writable.set()
        self._buffer = bytearray(wire.FRAME_LIMIT + 1)
        self.closed = False
        sock.setblocking(False)
        self._loop.add_reader(self._fd, self._receive)

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame, in order; the descriptors in `fds` stay the caller's. Lost after close."""
        if self.closed:
            return
        if not self._queue and self._try(frame, fds):
            return
        # The caller may close its descriptors before their turn comes.
        self._queue.append((frame, [os.dup(fd) for fd in fds]))
        if len(self._queue) == 1:
            self._loop.add_writer(self._fd, self._flush)
        self._writable.clear()

    async def drain(self) -> None:
        """Wait until nothing is queued (or the link is closed)."""
        await self._writable.wait()

    def close(self) -> None:
        """Stop, and close the socket. Repeatable."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()
        self._writable.set()

    def _try(self, frame: bytes, fds: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([frame], rights)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            # Gone; reading tells.
            return True
        return True

    def _flush(self) -> None:
        while self._queue:
            frame, fds = self._queue[0]
            if not self._try(frame, fds):
                return
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._fd)
        self._writable.set()

    def _receive(self) -> None:
        for _ in range(_BURST):
            if self.closed:
                return
            try:
                # One byte more than a frame has: a longer datagram shows as too long. Descriptors
                # that came along are dropped by the kernel, there is no room given for them.
                count = self._sock.recv_into(self._buffer)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                count = 0
            except OSError as err:
                self._on_closed(f"reading failed: {err.strerror}")
                return
            if count == 0:
                self._on_closed("the guest is gone")
                return
            self._on_frame(memoryview(self._buffer)[:count])
