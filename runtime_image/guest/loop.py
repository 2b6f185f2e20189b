"""One thread, one epoll set, a few timers."""

from __future__ import annotations

import select
import sys
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

IN, OUT, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class Timer:
    """A call to come; `cancel` makes it never come."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Forget the call."""
        self.call = None


class Loop:
    """Calls back when descriptors are ready and when timers are due.

    A callback that raises is reported to stderr and does not stop the others: the guest is PID 1,
    its end is the sandbox's.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        # Unsorted: there are a handful (drains, deferred tails).
        self._timers: list[Timer] = []
        self.running = True

    def watch(self, fd: int, events: int, call: Callable[[int], None]) -> None:
        """Call `call(events)` while `fd` has any of `events`; replaces an earlier watch."""
        if fd in self._calls:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._calls[fd] = call

    def unwatch(self, fd: int) -> None:
        """Stop watching; fine when it was not watched. Before closing `fd`."""
        if self._calls.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except OSError:
                pass

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once, `delay_s` from now."""
        timer = Timer(monotonic() + delay_s, call)
        self._timers.append(timer)
        return timer

    def run(self) -> None:
        """Serve until `running` is false."""
        while self.running:
            self._turn()

    def _turn(self) -> None:
        timeout = -1.0
        if self._timers:
            timeout = max(0.0, min(timer.when for timer in self._timers) - monotonic())
        for fd, events in self._epoll.poll(timeout, 64):
            call = self._calls.get(fd)
            if call is not None:
                guarded(call, events)
        if self._timers:
            now = monotonic()
            due = [timer for timer in self._timers if timer.when <= now or timer.call is None]
            if due:
                self._timers = [timer for timer in self._timers if timer not in due]
            for timer in due:
                if timer.call is not None:
                    guarded(timer.call)


def guarded(call: Callable[..., None], *args: object) -> None:
    """Run a callback; report what it raises."""
    try:
        call(*args)
    except Exception as err:  # noqa: BLE001 - the top of the loop
        complain(f"{getattr(call, '__qualname__', call)}: {err!r}")


def complain(message: str) -> None:
    """A line for whoever keeps the guest's stderr."""
    try:
        sys.stderr.write(f"guest: {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
