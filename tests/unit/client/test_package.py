"""What the wheel promises and what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import shoal

_BLOCKED = (
    "api provisioner costs runtime_image fastapi uvicorn uvloop aiohttp starlette structlog prometheus_client"
)
_BLOCKED += " jwt pydantic_settings zstandard boto3 cryptography httptools"

_IMPORT_ALL = f"""
import importlib, pkgutil, sys
for name in {_BLOCKED.split()!r}:
    sys.modules[name] = None
import shoal
count = 0
for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
    importlib.import_module(module.name)
    count += 1
print(count)
"""

_CONTRACT_ALONE = """
import sys, shoal.contract.actions
print([name for name in ("httpx", "typer", "cloudpickle", "rich") if name in sys.modules])
"""


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_all_is_promised() -> None:
    """A change here is a change of the public API."""
    assert shoal.__all__ == sorted(
        shoal.__all__, key=lambda name: (name.startswith("_") or name[0].islower(), name)
    )
    assert {name for name in shoal.__all__ if name[0].islower() or name[0] == "_"} == {
        "__version__",
        "function",
    }
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None


def test_every_module_imports_without_the_servers_packages() -> None:
    """The wheel is the SDK and the command line alone."""
    assert int(_python(_IMPORT_ALL)) > 30


def test_the_contract_does_not_load_the_sdk() -> None:
    """Agents import shoal.contract: it must not cost them an HTTP client."""
    assert _python(_CONTRACT_ALONE).strip() == "[]"


def test_every_promised_name_is_documented() -> None:
    """docs/sdk.md names what __all__ promises."""
    text = (Path(shoal.__file__).parent.parent / "docs" / "sdk.md").read_text(encoding="utf-8")
    missing = [name for name in shoal.__all__ if f"`{name}" not in text and f" {name}" not in text]
    assert missing == []
