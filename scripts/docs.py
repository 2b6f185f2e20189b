"""Writes the pages that code tells better than people: docs/settings.md and the state machines in docs/house.md.

`python scripts/docs.py` writes them, `--check` exits with 1 when one is not what the code says.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from pydantic import BaseModel

from api.settings import ApiSettings
from costs import data_path
from costs.prices import prices
from provisioner.aws.settings import AwsSettings, BatchPool, EcsPool
from provisioner.lifecycle import DIAGRAMS, diagram
from provisioner.settings import PoolSettings, ProvisionerSettings
from runtime_image.agent.settings import AgentSettings

ROOT = Path(__file__).resolve().parents[1]
SETTINGS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The HTTP surface", ApiSettings),
    ("The provisioner", ProvisionerSettings),
    ("Each of the provisioner's pools (`SHOAL_PROVISIONER_POOLS`, a JSON list)", PoolSettings),
    ("The profiles `aws` and `localstack`", AwsSettings),
    ("Each pool of `SHOAL_AWS_POOLS` (a JSON list) with `kind` `ecs`", EcsPool),
    ("Each pool of `SHOAL_AWS_POOLS` with `kind` `batch`", BatchPool),
    ("A host's agent (also as flags: `--max-sandboxes 64`)", AgentSettings),
)


def _meanings(settings: type[BaseModel]) -> dict[str, str]:
    """What each name means, from the class's `Attributes:` section; one line may be of several names."""
    text = inspect.cleandoc(settings.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=    \S)", "\n" + text):
        names, _, meaning = block.strip().partition(": ")
        for name in names.split(","):
            found[name.strip()] = " ".join(meaning.split())
    return found


def settings_page() -> str:
    """docs/settings.md. Raises KeyError for a setting whose class does not say what it means."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `python scripts/docs.py`; change the settings' docstrings. -->",
        "",
    ]
    lines += [
        "Read once at the start, from flags or the environment; unknown keys are refused. Units are in the names.",
        "",
    ]
    for title, settings in SETTINGS:
        prefix = str(settings.model_config.get("env_prefix", ""))
        lines += [f"## {title}", "", "| variable | default | meaning |", "|---|---|---|"]
        meanings = _meanings(settings)
        for name, field in settings.model_fields.items():
            default = "required" if field.is_required() else f"`{field.default}`"
            if field.default == "":
                default = "empty"
            if name == "kind":
                continue
            if settings is ProvisionerSettings and name == "pools":
                default = "one pool with the defaults below"
            lines.append(
                f"| `{(prefix + name).upper() if prefix else name}` | {default} | {meanings[name]} |"
            )
        lines.append("")
    return "\n".join(lines)


def house_page(now: str) -> str:
    """docs/house.md with its state machines as the tables have them."""
    drawn = "\n\n".join(
        f"**{kind}**\n\n```mermaid\n{diagram(table)}\n```" for kind, table in DIAGRAMS.items()
    )
    begin, end = "<!-- lifecycle:begin -->", "<!-- lifecycle:end -->"
    before, after = now.partition(begin)[0], now.partition(end)[2]
    return f"{before}{begin}\n{drawn}\n{end}{after}"


def data_path_page(now: str) -> str:
    """docs/data-path.md with its table as the prices have it."""
    begin, end = "<!-- data-path:begin -->", "<!-- data-path:end -->"
    before, after = now.partition(begin)[0], now.partition(end)[2]
    return f"{before}{begin}\n{data_path.table(prices())}\n{end}{after}"


def main() -> int:
    """Writes or checks."""
    house, way = ROOT / "docs" / "house.md", ROOT / "docs" / "data-path.md"
    pages = {
        ROOT / "docs" / "settings.md": settings_page(),
        house: house_page(house.read_text()),
        way: data_path_page(way.read_text()),
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is not what the code says; run python scripts/docs.py",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
