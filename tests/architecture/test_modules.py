"""What STYLE asks of modules and a tool can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_MODULES = sorted((_ROOT / "provisioner").rglob("*.py"))


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_modules_stay_small(path: Path) -> None:
    """A module of the heart is under 400 lines: split by concept."""
    assert len(path.read_text().splitlines()) < 400
