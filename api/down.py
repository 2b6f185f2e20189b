"""Stopping a server from outside: told by its home, waited for until nothing of it is left."""

from __future__ import annotations

import os
import signal
import sys
import time

from api.home import Home
from api.options import DownOptions

_LOOK_S = 0.05


def run_down(options: DownOptions) -> int:
    """Stop the server of a home. 0: none runs any more; 1: it did not stop in time, or is not ours to signal."""
    home = Home(options.home)
    server = home.server()
    if not home.is_locked():
        print(f"shoal: no server runs on {home.path}", file=sys.stderr)
        return 0
    if server is None or not server.alive():
        print(f"shoal: the server on {home.path} is just starting or stopping; try again", file=sys.stderr)
        return 1
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        print(f"shoal: not allowed to stop pid {server.pid}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + options.timeout_s
    while server.alive() or home.is_locked():
        if time.monotonic() > deadline:
            print(f"shoal: pid {server.pid} has not stopped in {options.timeout_s:g} s", file=sys.stderr)
            return 1
        time.sleep(_LOOK_S)
    return 0
