"""The one place that waits for processes.

PID 1 inherits every orphan. A second waiter would steal exit statuses, so everything that forks
registers its child here, and everything else that ends is reaped and ignored.
"""

from __future__ import annotations

import os

from .loop import IN, Loop, guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from resource import struct_rusage

    OnExit = Callable[[int, struct_rusage], None]
else:
    import _signal


class Reaper:
    """Calls back with (wait status, resource usage) when a registered child ends."""

    def __init__(self, loop: Loop) -> None:
        self._children: dict[int, OnExit] = {}
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.watch(self._wake, IN, self._reap)
        # A handler of its own is what makes the signal reach the pipe. As PID 1 the guest can be
        # sent only signals it handles, which is this one: a forged SIGCHLD costs one empty wait.
        _signal.signal(_signal.SIGCHLD, _ignore)
        _signal.siginterrupt(_signal.SIGCHLD, False)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._reap(IN)

    def expect(self, pid: int, on_exit: OnExit) -> None:
        """Call `on_exit` once, when child `pid` has ended."""
        self._children[pid] = on_exit

    def _reap(self, events: int) -> None:
        try:
            while os.read(self._wake, 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            on_exit = self._children.pop(pid, None)
            if on_exit is not None:
                guarded(on_exit, status, usage)


def _ignore(signum: int, frame: object) -> None:
    """Python asks for a handler; the wakeup pipe does the work."""
