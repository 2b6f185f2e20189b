"""What importing the Lambda functions' handlers costs, each in a process of its own, from bytecode.

    lambda_import_ms            `import api.lambda_handler`: nothing heavy, no work
    lambda_app_ms               the app with all routes, and the profile, without the SDK
    lambda_import_all_ms        all that the first request needs, the SDK included: what a function does as it starts
    lambda_reconciler_import_ms `import provisioner.handlers`

Wall time of the import alone, the interpreter's own start left out: the median of five, after one to fill the caches.
Beside it the CPU time of the fastest, which a busy machine changes least.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = 5
_FUNCTION = {"AWS_LAMBDA_FUNCTION_NAME": "bench"}
_IMPORTS: dict[str, tuple[str, Mapping[str, str]]] = {
    "lambda_import_ms": ("api.lambda_handler", {}),
    "lambda_app_ms": ("api.function, provisioner.aws.profile", {}),
    "lambda_import_all_ms": ("api.lambda_handler", _FUNCTION),
    "lambda_reconciler_import_ms": ("provisioner.handlers", {}),
}
_PROGRAM = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {what}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
import json
print(json.dumps([wall * 1000, cpu * 1000]))
"""


def import_ms(
    *, python: str = sys.executable, path: Path = ROOT, isolated: bool = False
) -> dict[str, dict[str, float]]:
    """The figures by name, as `{"p50": wall, "cpu": fastest}`.

    Args:
        python: The interpreter.
        path: Where the rooms are: this tree, or an unpacked bundle.
        isolated: Whether nothing else may be imported (for a bundle).
    """
    return {
        name: _measured(what, environment, python, path, isolated)
        for name, (what, environment) in _IMPORTS.items()
    }


def _measured(
    what: str, environment: Mapping[str, str], python: str, path: Path, isolated: bool
) -> dict[str, float]:
    program = f"import sys; sys.path.insert(0, {str(path)!r})" + _PROGRAM.format(what=what)
    command = [python, *(["-I", "-S"] if isolated else []), "-c", program]
    runs: list[tuple[float, float]] = []
    for _ in range(RUNS + 1):
        told = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": os.environ["PATH"], **environment},
        )
        wall, cpu = json.loads(told.stdout)
        runs.append((wall, cpu))
    return {
        "p50": round(statistics.median(wall for wall, _ in runs[1:]), 1),
        "cpu": round(min(cpu for _, cpu in runs[1:]), 1),
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        found = import_ms(python=sys.argv[1], path=Path(sys.argv[2]).resolve(), isolated=True)
    else:
        found = import_ms()
    for name, value in found.items():
        print(f"{name:30} {value['p50']:8.1f} ms, CPU {value['cpu']:.1f} ms")
