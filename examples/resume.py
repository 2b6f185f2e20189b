"""A script that can be killed at any moment and run again: recorded steps are answered, not repeated.

Run it twice, or kill it in between: `increment` happens once a round, however often the script is started.
"""

from __future__ import annotations

import sys

from shoal import SandboxLost, SessionRewound, Shoal

ROUNDS = 5
INCREMENT = "echo x >> counter; wc -l < counter"


def main(image: str = "code:1.0.0", name: str = "resume-example") -> None:
    """Count up in a named session; crash after a round when told to by `--crash-after N`."""
    crash_after = int(sys.argv[2]) if sys.argv[1:2] == ["--crash-after"] else None
    with Shoal() as shoal, shoal.session(image, run="examples", name=name) as box:
        for number in range(1, ROUNDS + 1):
            try:
                result = box.exec(INCREMENT)
            except SandboxLost:
                box.replace()
                result = box.exec(INCREMENT)
            except SessionRewound:
                box.ack()
                result = box.exec(INCREMENT)
            told = " (from the record)" if result.replayed else ""
            print(f"round {number}: counter is {result.stdout.strip()}{told}")
            if number == crash_after:
                raise SystemExit("crashed, as asked; run it again")


if __name__ == "__main__":
    main()
