"""A Python function that runs in sandboxes: untrusted programs scored in parallel, their results as data."""

from __future__ import annotations

import shoal

PROGRAMS = ["print(sum(range(10)))", "print(1/0)", "import os; print(os.getuid())", "while True: pass"]


@shoal.function(image="code:1.0.0", timeout_s=30, resources={"memory_mib": 256})
def judge(program: str) -> dict[str, object]:
    """Runs a program and says how it ended; all of it inside the sandbox."""
    import subprocess
    import sys

    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=5, check=False
        )
    except subprocess.TimeoutExpired:
        return {"ended": "timed out", "printed": ""}
    return {"ended": f"exit {done.returncode}", "printed": done.stdout.strip()}


def main() -> None:
    """One sandbox a program."""
    for program, seen in zip(PROGRAMS, judge.map(PROGRAMS, concurrency=4), strict=True):
        print(f"{program!r}: {seen['ended']} {seen['printed']}")


if __name__ == "__main__":
    main()
