"""The README of every Terraform module: tables of its variables and outputs, in the style of terraform-docs.

`python -m scripts.infra_docs` writes them anew, `--check` fails when one is not what the module says. What stands above
the first marker is written by hand. Reads what `terraform fmt` leaves: blocks begin and end in column 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).resolve().parents[1] / "infra/modules"
BEGIN, END = "<!-- BEGIN_TF_DOCS -->", "<!-- END_TF_DOCS -->"
_SPACES = re.compile(r"\s+")
_BLOCK = re.compile(r'^(variable|output|resource|module) "(\w+)"(?: "(\w+)")? \{\n(.*?)^\}$', re.M | re.S)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A top-level block: kind, labels and its body as text."""

    kind: str
    name: str
    label: str | None
    body: str

    def attribute(self, name: str) -> str | None:
        """An argument of the block itself, as written, over as many lines as its brackets are open; None without."""
        lines = self.body.splitlines()
        for index, line in enumerate(lines):
            if not (found := re.match(rf"  {name}\s+= (.*)", line)):
                continue
            value = [found.group(1)]
            for more in lines[index + 1 :]:
                if _depth("\n".join(value)) <= 0:
                    break
                value.append(more[2:])
            return "\n".join(value)
        return None

    @property
    def description(self) -> str:
        """What it says of itself, with quotes as they are meant."""
        written = self.attribute("description") or '""'
        return written[1:-1].replace('\\"', '"')


def _depth(text: str) -> int:
    plain = re.sub(r'"(?:\\.|[^"\\])*"', "", text)
    return sum(plain.count(opening) for opening in "{[(") - sum(plain.count(closing) for closing in "}])")


def blocks(module: Path) -> Iterator[Block]:
    """All blocks of a module's files, in order of file and place."""
    for file in sorted(module.glob("*.tf")):
        for kind, name, label, body in _BLOCK.findall(file.read_text()):
            yield Block(kind=kind, name=name, label=label or None, body=body)


def tables(module: Path) -> str:
    """The generated part of a module's README."""
    found = list(blocks(module))
    variables = sorted((block for block in found if block.kind == "variable"), key=lambda block: block.name)
    outputs = sorted((block for block in found if block.kind == "output"), key=lambda block: block.name)
    resources = sorted({block.name for block in found if block.kind == "resource"})
    modules = sorted(block.name for block in found if block.kind == "module")
    lines = ["## Inputs", "", "| name | description | type | default |", "|---|---|---|---|"]
    for block in variables:
        default = block.attribute("default")
        lines.append(
            f"| `{block.name}` | {_cell(block.description)} | {_code(block.attribute('type'))} "
            f"| {'**required**' if default is None else _code(default)} |"
        )
    lines += ["", "## Outputs", "", "| name | description |", "|---|---|"]
    lines += [f"| `{block.name}` | {_cell(block.description)} |" for block in outputs]
    lines += ["", "## Resources", "", ", ".join(f"`{name}`" for name in resources) + "."]
    if modules:
        lines += ["", "Modules: " + ", ".join(f"[`{name}`](../{name})" for name in modules) + "."]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str | None) -> str:
    # One line: attributes of an object are set apart by commas instead of line ends.
    joined = re.sub(r"(?<![{(\[,])\n\s*(?![\s})\]])", ", ", text or "any")
    return f"`{_cell(re.sub(_SPACES, ' ', joined))}`"


def page(module: Path) -> str:
    """A module's whole README: what was written by hand, then the tables."""
    readme = module / "README.md"
    written = readme.read_text() if readme.exists() else f"# Module {module.name}\n\n{BEGIN}\n{END}\n"
    head, begun, rest = written.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise SystemExit(f"{readme}: no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n{tables(module)}\n{END}{tail}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.infra_docs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="fail when a README would change")
    options = parser.parse_args(argv)
    stale = []
    for module in sorted(path.parent for path in MODULES.glob("*/variables.tf")):
        readme, wanted = module / "README.md", page(module)
        if readme.exists() and readme.read_text() == wanted:
            continue
        stale.append(str(readme.relative_to(MODULES.parents[1])))
        if not options.check:
            readme.write_text(wanted)
    if options.check and stale:
        print(
            f"not what the modules say: {', '.join(stale)}; run: python -m scripts.infra_docs",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
