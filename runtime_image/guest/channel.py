"""The guest's end of the link: whole frames out, streams in turns."""

from __future__ import annotations

import _socket
import os
from struct import Struct

from . import wire
from .loop import GONE, IN, OUT, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Source = Callable[[], bytes | None]

_FD = Struct("@i")
_ANCILLARY = _socket.CMSG_SPACE(_FD.size * wire.FDS_LIMIT)
# Frames read in one turn of the loop, so that a flood of requests does not starve the pipes.
_BURST = 32


class Channel:
    """Sends control frames first, then one frame of each stream that has something, in turns.

    Nothing here blocks: when the socket is full, sending goes on when it is writable.
    """

    def __init__(
        self,
        loop: Loop,
        sock: _socket.socket,
        on_frame: Callable[[int, int, int, memoryview, list[int]], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._control: list[bytes] = []
        # Insertion-ordered, used as a queue without doubles.
        self._sources: dict[Source, None] = {}
        self._blocked = False
        self._pumping = False
        sock.setblocking(False)
        loop.watch(sock.fileno(), IN, self._ready)

    def post(self, frame: bytes) -> None:
        """Send a control frame, after those posted before."""
        self._control.append(frame)
        if not self._blocked:
            self._pump()

    def wake(self, source: Source) -> None:
        """Ask `source` for frames, in its turn, until it gives None."""
        self._sources[source] = None
        if not self._blocked:
            self._pump()

    def reset(self) -> None:
        """Forget what is not sent: it was meant for an agent that is gone."""
        self._control.clear()
        self._sources.clear()

    def _ready(self, events: int) -> None:
        if events & OUT:
            self._blocked = False
            self._loop.watch(self._sock.fileno(), IN, self._ready)
            self._pump()
        if events & (IN | GONE):
            self._receive()

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    wire.FRAME_LIMIT, _ANCILLARY, _socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, ancillary, flags = b"", [], 0
            fds = [
                fd
                for level, kind, payload in ancillary
                if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS
                for (fd,) in _FD.iter_unpack(payload[: len(payload) // _FD.size * _FD.size])
            ]
            if not data:
                self._loop.unwatch(self._sock.fileno())
                self._on_closed()
                return
            try:
                kind, stream, ident, body = wire.split(data)
                if flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC):
                    raise wire.WireError("cut frame")
            except wire.WireError:
                for fd in fds:
                    os.close(fd)
                raise
            self._on_frame(kind, stream, ident, body, fds)

    def _pump(self) -> None:
        # A source that ends may post; what it posts goes out in this same loop.
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self._blocked:
                if self._control:
                    if self._send(self._control[0]):
                        self._control.pop(0)
                elif self._sources:
                    source = next(iter(self._sources))
                    del self._sources[source]
                    frame = source()
                    if frame is not None:
                        self._sources[source] = None
                        if not self._send(frame):
                            self._control.insert(0, frame)
                else:
                    return
        finally:
            self._pumping = False

    def _send(self, frame: bytes) -> bool:
        try:
            self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            self._blocked = True
            self._loop.watch(self._sock.fileno(), IN | OUT, self._ready)
            return False
        except OSError:
            # The other end is gone; reading tells so as well.
            return True
        return True
