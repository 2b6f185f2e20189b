"""What an output stream of a process gave so far."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from runtime_image.guest.tape import Tape


class Snapshot(NamedTuple):
    """A piece of a stream."""

    data: bytes
    next_offset: int
    """Where to go on; offsets count every byte of the stream, kept or not."""
    dropped: int
    """Bytes between the offset asked for and `data` that are not kept."""


class OutputTap:
    """Head and tail of one stream, live.

    Until the process has ended the tail comes in turns of about 100 ms once the head is full;
    before that everything comes as it is printed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._tape = Tape(limit_bytes)
        self._ended = False
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def total_bytes(self) -> int:
        """How many bytes the process has printed, as far as known here; exact once ended."""
        return self._tape.total

    @property
    def kept_bytes(self) -> int:
        """How many of them are kept."""
        return self._tape.total - self._tape.dropped

    @property
    def truncated(self) -> bool:
        """Some bytes in the middle are not kept."""
        return self._tape.dropped > 0

    @property
    def ended(self) -> bool:
        """Nothing more comes."""
        return self._ended

    def snapshot(self, offset: int = 0, size: int | None = None) -> Snapshot:
        """Kept bytes from `offset` on, up to the hole where the middle was dropped or to the end.

        Ask again with `next_offset` for what is behind the hole or came since. At the end of what
        there is, `data` is empty.
        """
        start, data = self._tape.read(offset, (1 << 62) if size is None else size)
        end = start + len(data)
        if size is None and end < self._tape.total and end == self._tape.tail_start:
            # Head and tail touch: no hole, so one piece.
            _, more = self._tape.read(end, 1 << 62)
            data, end = data + more, end + len(more)
        return Snapshot(data, end, max(0, start - offset))

    def kept(self) -> tuple[bytes, bytes]:
        """Head and tail; the tail is empty when nothing was dropped."""
        head = self.snapshot()
        tail = self.snapshot(head.next_offset)
        return head.data, tail.data

    async def changed(self, offset: int) -> None:
        """Wait until the stream is longer than `offset`, or has ended."""
        while self._tape.total <= offset and not self._ended:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # For the link.

    def feed(self, offset: int, data: memoryview) -> None:
        """Bytes arrived; what lies between is lost."""
        self._tape.skip(offset)
        self._tape.feed(data)
        self._wake()

    def end(self, total: int | None = None) -> None:
        """The stream is complete; `total` is the guest's count, None when unknown."""
        if total is not None:
            self._tape.skip(total)
        self._ended = True
        self._wake()
