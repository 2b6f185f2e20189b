"""The functions' zip as MiniStack runs it: our bundle, for the Python of MiniStack instead of Lambda's."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path

from scripts import bundle
from scripts.localstack.places import ROOT, Places


def make_bundle(places: Places) -> tuple[Path, str]:
    """The zip, and the name of the Lambda runtime that it is for. Wheels that were fetched before are used again.

    Raises:
        bundle.CannotBundle: A wheel cannot be had.
    """
    python = ROOT / ".venv-ministack" / "bin" / "python"
    told = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    # The bundle is made for one Python, Lambda's; here it is another.
    bundle.PYTHON = version
    wheels = {"x86_64": "x86_64", "aarch64": "arm64"}[platform.machine()]
    architecture = next(each for each in bundle.ARCHITECTURES if each.name == wheels)
    lock = (ROOT / "requirements" / "lambda.txt").read_bytes()
    kept = places.cache / f"wheels-{version}-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (kept / "complete").exists():
        kept.mkdir(parents=True, exist_ok=True)
        bundle.download(architecture, kept)
        (kept / "complete").touch()
    target = places.cache / f"shoal-lambda-{architecture.name}-{version}.zip"
    bundle.bundle(architecture, sorted(kept.glob("*.whl")), target, str(python))
    return target, f"python{version}"
