"""`python -m runtime_image.agent.doctor`: what this machine lacks for running sandboxes and building images."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

from runtime_image.agent.sandboxes.doctor import Check, doctor

_DEFAULT_HOME = Path("~/.local/share/shoal")
#: Programs that only images need, with the package that brings each.
_IMAGE_PROGRAMS = {"mmdebstrap": "mmdebstrap", "skopeo": "skopeo", "zstd": "zstd", "tar": "tar"}


def image_programs() -> Check:
    """Whether images can be built and taken from registries here."""
    missing = sorted({package for name, package in _IMAGE_PROGRAMS.items() if shutil.which(name) is None})
    return Check(
        name="image programs",
        ok=not missing,
        found="all there" if not missing else f"missing: {', '.join(missing)}",
        remedy="" if not missing else f"run: apt-get install {' '.join(missing)}",
    )


def main() -> int:
    """Prints the checks. 0: all fine; 1: something is missing."""
    parser = argparse.ArgumentParser(prog="python -m runtime_image.agent.doctor", description=__doc__)
    parser.add_argument("--home", type=Path, default=_DEFAULT_HOME, help="where the server keeps its state")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    checks = [*doctor(options.home.expanduser()), image_programs()]
    fine = all(check.ok for check in checks)
    if options.json:
        print(json.dumps({"ok": fine, "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        for check in checks:
            print(f"{'ok' if check.ok else 'MISSING':<8} {check.name}: {check.found}")
            if not check.ok:
                print(f"         next: {check.remedy}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
