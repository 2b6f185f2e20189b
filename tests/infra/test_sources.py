"""The Terraform sources as text: documented, typed, justified. Needs no Terraform."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import infra_docs

INFRA = Path(__file__).resolve().parents[2] / "infra"
MODULES = sorted(path.parent for path in (INFRA / "modules").glob("*/variables.tf"))
ROOTS = [*MODULES, *sorted((INFRA / "examples").iterdir())]


def _names(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("module", MODULES, ids=_names)
def test_a_readme_has_the_variables_and_outputs_of_its_module(module: Path) -> None:
    """Its tables are what the sources say; `python -m scripts.infra_docs` writes them."""
    assert (module / "README.md").read_text() == infra_docs.page(module)


@pytest.mark.parametrize("module", MODULES, ids=_names)
def test_a_readme_says_more_than_its_tables(module: Path) -> None:
    """What a module is for is written by hand, above the tables."""
    written = (module / "README.md").read_text().partition(infra_docs.BEGIN)[0]
    assert len(written.split()) > 20


@pytest.mark.parametrize("root", ROOTS, ids=_names)
def test_variables_are_typed_and_described_and_outputs_described(root: Path) -> None:
    """Every variable has a type and a sentence, every output a sentence."""
    for block in infra_docs.blocks(root):
        if block.kind == "variable":
            assert block.attribute("type"), block.name
        if block.kind in ("variable", "output"):
            assert block.description.endswith("."), block.name


@pytest.mark.parametrize("root", ROOTS, ids=_names)
def test_every_block_of_the_sources_is_seen(root: Path) -> None:
    """The reader of the tables misses none: it sees as many blocks as there are lines that begin one."""
    begun = sum(
        len(re.findall(r"^(?:variable|output|resource|module) ", file.read_text(), re.M))
        for file in root.glob("*.tf")
    )
    assert len(list(infra_docs.blocks(root))) == begun


def test_skipped_checks_say_why() -> None:
    """Each check of checkov that is skipped is skipped in place, with a reason, and none for a whole run."""
    skips = [
        (file.name, skip)
        for file in INFRA.glob("*/**/*.tf")
        if ".terraform" not in file.parts
        for skip in re.findall(r"checkov:skip=(.*)", file.read_text())
    ]
    assert skips
    for name, skip in skips:
        assert re.fullmatch(r"CKV2?_AWS_\d+:\S.{19,}", skip), (name, skip)
    check = (INFRA.parent / "scripts/infra_check.py").read_text()
    assert "--skip-check" not in check
    assert "--soft-fail" not in check


def test_tables_show_types_on_one_line(tmp_path: Path) -> None:
    """Objects over several lines are one cell, their attributes set apart; pipes do not end a cell."""
    (tmp_path / "variables.tf").write_text(
        'variable "disk" {\n'
        '  description = "Size | speed: \\"gib\\"."\n'
        "  type = object({\n    gib  = optional(number, 100)\n    tags = map(string)\n  })\n"
        "  default = {}\n"
        "}\n"
        'variable "name" {\n  description = "A name."\n  type        = string\n}\n'
    )
    text = infra_docs.tables(tmp_path)
    assert (
        '| `disk` | Size \\| speed: "gib". | `object({ gib = optional(number, 100), tags = map(string) })` | `{}` |'
        in text
    )
    assert "| `name` | A name. | `string` | **required** |" in text
