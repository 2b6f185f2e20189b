"""What the tree promises beyond imports: rooms, sizes, pages, no addresses and no machine's paths."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("shoal", "provisioner", "api", "runtime_image", "costs")
#: Modules over the size wished for, each for the reason that it is one table or one vocabulary.
LARGE = {"shoal/contract/actions.py": 480, "provisioner/model.py": 450}


def _files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def test_modules_stay_small() -> None:
    """A module of the product has about 400 lines at the most, so that a reader holds it in mind."""
    large = {}
    for path in _files(*(f"{room}/**/*.py" for room in PRODUCT)):
        lines = len(path.read_text().splitlines())
        name = str(path.relative_to(ROOT))
        if lines > LARGE.get(name, 410):
            large[name] = lines
    assert large == {}


def test_no_module_is_called_by_no_concept() -> None:
    """No `utils`, `helpers`, `common` or `misc`: a file's name says what is in it."""
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for path in _files("*.py", "**/*.py") if path.stem in vague] == []


def test_every_product_module_says_what_it_is() -> None:
    """Each module opens with a docstring; an `__init__` may be empty."""
    silent = [
        str(path.relative_to(ROOT))
        for path in _files(*(f"{room}/**/*.py" for room in PRODUCT))
        if path.read_text().strip() and not path.read_text().lstrip().startswith(('"""', "#!", "# ", 'r"""'))
    ]
    assert silent == []


@pytest.mark.parametrize(
    "words",
    [
        "|".join(
            [
                "pypi" + r"\.org",
                "python" + "hosted",
                "npm" + "js",
                r"deb\.deb" + "ian",
                r"security\.deb" + "ian",
            ]
        ),
        "|".join(["/wo" + "rk/", "/op" + "t/(tf|py|wh)", "/ro" + r"ot/\."]),
    ],
    ids=["registries", "machine paths"],
)
def test_no_address_of_a_registry_and_no_path_of_a_machine(words: str) -> None:
    """Code, docs and locks name no package registry's host and no path of the machine they were written on."""
    pattern = re.compile(words)
    found = []
    for path in _files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit.group()}" for hit in pattern.finditer(text)]
    assert found == []


def test_locks_pin_hashes_and_record_no_address() -> None:
    """Every requirement of a lock has an exact version and hashes."""
    for lock in (ROOT / "requirements").glob("*.txt"):
        text = lock.read_text().replace("\\\n", " ")
        assert "://" not in text, lock.name
        for line in text.splitlines():
            if line and not line.startswith((" ", "#")):
                assert re.match(r"^[A-Za-z0-9._\[\]-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line), (
                    lock.name,
                    line,
                )


def test_pages_are_what_the_code_says() -> None:
    """docs/settings.md and the state machines of docs/house.md are those of the code."""
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_links_of_the_docs_lead_somewhere() -> None:
    """A relative link in a page of ours names a file that is there."""
    broken = []
    for page in _files("*.md", "**/*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []
