"""Writing into a descriptor that may be full."""

from __future__ import annotations

import os

from .loop import OUT, Loop


class Feeder:
    """Writes what it is given, in order, as far as the other end takes it; drops it once that is gone."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._waiting = b""
        os.set_blocking(fd, False)

    def write(self, data: bytes) -> None:
        """Queue bytes."""
        self._waiting += data
        self._flush(0)

    def close(self) -> None:
        """Close the descriptor. Repeatable."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._waiting = b""

    def _flush(self, events: int) -> None:
        while self._waiting and self._fd >= 0:
            try:
                count = os.write(self._fd, self._waiting)
            except BlockingIOError:
                self._loop.watch(self._fd, OUT, self._flush)
                return
            except OSError:
                self._waiting = b""
                break
            self._waiting = self._waiting[count:]
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
