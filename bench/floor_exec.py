"""The floor of exec: fork and exec of /bin/true and the wait for it, from a process as small as Python gets.

Run as a program of its own (`python -I -S floor_exec.py N`), so that the size of the benchmark's own process does
not count. Prints one duration in milliseconds a line.
"""

import os
import sys
import time


def main() -> None:
    """Measure as many times as the first argument says."""
    durations = []
    for _ in range(int(sys.argv[1])):
        begun = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            try:
                os.execv("/bin/true", ["true"])
            finally:
                os._exit(127)
        os.waitpid(pid, 0)
        durations.append((time.perf_counter() - begun) * 1000)
    sys.stdout.write("\n".join(f"{duration:.4f}" for duration in durations) + "\n")


main()
