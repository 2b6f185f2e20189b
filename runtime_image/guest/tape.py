"""What is kept of an output stream: its first bytes, its last bytes, and how many there were.

The guest keeps one for each stream of each process until the agent forgets it; the agent keeps one
of what it received. Memory is bounded by the limit whatever the process prints.
"""

from __future__ import annotations


class Tape:
    """Head half and tail half of a byte stream, by offset.

    The head keeps the first `limit - limit // 2` bytes; what follows goes through a ring of
    `limit // 2` bytes. A stream of at most `limit` bytes is kept whole.
    """

    __slots__ = ("_contiguous_from", "_ring", "_tail_limit", "head", "head_limit", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._tail_limit = limit // 2
        self.head_limit = limit - self._tail_limit
        self.head = bytearray()
        # Grows to its limit, then bytes at offset o sit at (o - head_limit) % tail_limit.
        self._ring = bytearray()
        self._contiguous_from = 0
        self.total = 0

    @property
    def tail_start(self) -> int:
        """Offset of the first byte kept behind the head."""
        return max(self.head_limit, self.total - self._tail_limit, self._contiguous_from)

    @property
    def dropped(self) -> int:
        """How many bytes of the stream so far are not kept."""
        return self.total - len(self.head) - max(0, self.total - self.tail_start)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append the stream's next bytes."""
        view = memoryview(data)
        room = self.head_limit - self.total
        if room > 0:
            self.head += view[:room]
            self.total += min(room, len(view))
            view = view[room:]
        size = len(view)
        if not size:
            return
        limit = self._tail_limit
        self.total += size
        if not limit:
            return
        view = view[-limit:]
        at = (self.total - len(view) - self.head_limit) % limit
        while len(view):
            piece = view[: limit - at]
            end = at + len(piece)
            if end > len(self._ring):
                # The first lap, or a lap after a skip: fill up to where the ring is written.
                self._ring.extend(bytes(end - len(self._ring)))
            self._ring[at:end] = piece
            view = view[len(piece) :]
            at = 0

    def skip(self, offset: int) -> None:
        """Go on at `offset`: bytes from `total` to there are known to be lost."""
        if offset > self.total:
            # A hole ends the head, also one that is not full.
            self.head_limit = min(self.head_limit, self.total)
            self.total = self._contiguous_from = offset

    def next_kept(self, offset: int) -> int:
        """The first offset at or after `offset` whose byte is kept (or `total`)."""
        if offset < len(self.head):
            return offset
        return min(self.total, max(offset, self.tail_start))

    def read(self, offset: int, size: int) -> tuple[int, bytes]:
        """Up to `size` kept bytes from the first kept one at or after `offset`.

        Returns:
            Their offset and the bytes, which have no hole; empty at the end of the stream.
        """
        start = self.next_kept(offset)
        if start < len(self.head):
            return start, bytes(memoryview(self.head)[start : start + size])
        size = min(size, self.total - start)
        if size <= 0:
            return start, b""
        at = (start - self.head_limit) % self._tail_limit
        ring = memoryview(self._ring)
        first = ring[at : at + size]
        return start, bytes(first) + bytes(ring[: size - len(first)])
