"""Who may import whom: the contracts hold, and each of them can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("shoal", "provisioner", "api", "costs", "runtime_image")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_contracts_hold() -> None:
    """No room imports what it may not."""
    result = lint(_ROOT)
    assert result.returncode == 0, result.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    for room in _ROOMS:
        shutil.copytree(_ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
    shutil.copy(_ROOT / ".importlinter", root)
    return root


def test_each_contract_can_fail(copy: Path) -> None:
    """A forbidden import in each of the places is found, by the contract that forbids it."""
    broken = {
        "provisioner/planner.py": ("import time", "What decides has no clock"),
        "provisioner/snapshots.py": ("import provisioner.store.sqlite", "Use cases know ports"),
        "provisioner/usage.py": ("import fastapi", "No HTTP server in the heart"),
        "provisioner/pools.py": ("import runtime_image.layers", "The control plane starts"),
        "api/function.py": ("import mangum", "Mangum is in the Lambda handler"),
        "provisioner/images.py": ("import boto3", "The AWS SDK is in its adapters"),
        "provisioner/keys.py": ("import api.errors", "The rooms stand above one another"),
        "provisioner/demand.py": ("import shoal.client", "The service speaks to the client"),
        "shoal/contract/usage.py": ("import httpx", "The contract depends on nothing"),
        "shoal/client/retry.py": ("import provisioner.keys", "What a trainer installs"),
        "runtime_image/layers/__init__.py": ("import runtime_image.agent", "Layers and images are made"),
        "runtime_image/agent/__init__.py": ("import provisioner.keys", "What runs on a host"),
        "runtime_image/guest/__init__.py": ("import shoal.contract", "The guest depends on nothing"),
    }
    for name, (line, _) in broken.items():
        path = copy / name
        path.write_text(path.read_text() + f"\n{line}\n")
    result = lint(copy)
    assert result.returncode != 0
    # A verdict may be followed by how many imports its contract lets pass.
    verdicts = dict(re.findall(r"^(.+?) (BROKEN|KEPT)(?: \(.*\))?$", result.stdout, re.MULTILINE))
    for _, contract in broken.values():
        assert [word for name, word in verdicts.items() if name.startswith(contract)] == ["BROKEN"], contract
