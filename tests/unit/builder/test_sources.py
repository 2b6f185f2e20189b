"""Which of the machine's apt sources an image is built from."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.sources import choose_suite, machine_sources

DEB822 = """\
# a mirror
Types: deb deb-src
URIs: https://packages.example.org/debian
Suites: bookworm bookworm-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/one.gpg

Types: deb
URIs: https://packages.example.org/debian-security
Suites: bookworm-security
Components: main
Enabled: no

Types: deb
URIs: https://packages.example.org/other
Suites: trixie
Components: main
"""
ONE_LINE = """\
deb [arch=amd64 signed-by=/k.gpg] https://packages.example.org/debian bookworm main # the mirror
# deb https://packages.example.org/commented bookworm main
deb-src https://packages.example.org/sources bookworm main
deb https://packages.example.org/tool stable tool
"""


def lines(apt: Path, suite: str = "bookworm") -> list[str]:
    return [source.line().replace("[signed-by=", "[") for source in machine_sources(suite, apt)]


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_both_formats_are_read(apt: Path) -> None:
    """Stanzas and lines; only the wanted release and its pockets, only what is enabled."""
    (apt / "sources.list").write_text(ONE_LINE)
    (apt / "sources.list.d/debian.sources").write_text(DEB822)
    assert lines(apt) == [
        "deb [/k.gpg] https://packages.example.org/debian bookworm main",
        "deb [/usr/share/keyrings/one.gpg] https://packages.example.org/debian bookworm main contrib",
        "deb [/usr/share/keyrings/one.gpg] https://packages.example.org/debian bookworm-updates main contrib",
    ]


def test_a_source_named_twice_is_used_once(apt: Path) -> None:
    """Lists often overlap."""
    (apt / "sources.list").write_text(ONE_LINE)
    (apt / "sources.list.d/again.list").write_text(ONE_LINE)
    assert len(lines(apt)) == 1


def test_a_release_without_a_source_is_told(apt: Path) -> None:
    """A machine of another distribution gets a typed error that says what to add, no guessed mirror."""
    (apt / "sources.list").write_text("deb https://packages.example.org/ubuntu noble main\n")
    with pytest.raises(BuildError) as refused:
        machine_sources("bookworm", apt)
    assert refused.value.reason is BuildReason.NO_MIRROR
    assert "bookworm" in refused.value.detail


def test_a_machine_of_another_release_builds_from_its_own(apt: Path) -> None:
    """Where the recipe's release has no source the machine's own release is taken, if that has one."""
    release = apt / "os-release"
    release.write_text("ID=ubuntu\nVERSION_CODENAME=noble\n")
    (apt / "sources.list").write_text("deb https://packages.example.org/ubuntu noble main universe\n")
    assert choose_suite("bookworm", apt, release) == "noble"
    assert lines(apt, "noble") == ["deb https://packages.example.org/ubuntu noble main universe"]
    (apt / "sources.list").write_text(ONE_LINE)
    assert choose_suite("bookworm", apt, release) == "bookworm"
    (apt / "sources.list").write_text("")
    with pytest.raises(BuildError, match="no_mirror"):
        choose_suite("bookworm", apt, release)
