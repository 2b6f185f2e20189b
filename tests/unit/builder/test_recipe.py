"""Recipes: what is accepted, what is refused and by which words, what their digest depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[3] / "runtime_image/images").glob("*.toml"))
GOOD = 'name = "a"\ntag = "1"\npackages = ["busybox-static"]\n'


def written(room: Path, text: str) -> Path:
    path = room / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_good(path: Path) -> None:
    """Each recipe that ships loads and is named like its file."""
    recipe = load_recipe(path).recipe
    assert recipe.name == path.stem
    assert recipe.workdir == "/workspace"


def test_the_code_image_has_what_it_promises() -> None:
    """Python with numpy, pandas and pytest; C and C++ by gcc and clang; make, git, curl, ripgrep."""
    packages = set(load_recipe(next(path for path in RECIPES if path.stem == "code")).recipe.packages)
    assert packages >= {
        "python3", "python3-numpy", "python3-pandas", "python3-pytest",
        "gcc", "g++", "clang", "make", "git", "curl", "ripgrep", "bash",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("name = 1", "name"),
        (GOOD + 'colour = "red"', "colour"),
        (GOOD + 'variant = "huge"', "variant"),
        ('name = "a"\ntag = "1"\npackages = ["x; rm -rf /"]', "packages"),
        ('name = "a"\ntag = "1"\npackages = ["-o"]', "packages"),
        (GOOD + 'suite = "--help"', "suite"),
        (GOOD + 'directories = ["/a/../b"]', "directories"),
        (GOOD + '[files]\n"/../etc/passwd" = "x"', "files"),
        (GOOD + '[files]\n"etc/passwd" = "x"', "files"),
        (GOOD + '[files]\n"/a" = {mode = "0644"}', "files./a"),
        (GOOD + '[files]\n"/a" = {source = "missing"}', "files./a"),
        ("= nothing", "recipe.toml"),
    ],
)
def test_a_bad_recipe_names_its_fault(tmp_path: Path, text: str, names: str) -> None:
    """The reason is `bad_recipe`; the detail says which field, or which file."""
    with pytest.raises(BuildError) as refused:
        load_recipe(written(tmp_path, text))
    assert refused.value.reason is BuildReason.BAD_RECIPE
    assert names in refused.value.detail


def test_a_missing_recipe_is_a_bad_one(tmp_path: Path) -> None:
    """No traceback for a wrong path."""
    with pytest.raises(BuildError, match="bad_recipe"):
        load_recipe(tmp_path / "none.toml")


def test_files_come_with_bytes_and_modes(tmp_path: Path) -> None:
    """Text in place, or a file beside the recipe, with its mode."""
    (tmp_path / "tool").write_bytes(b"\x7fELF")
    loaded = load_recipe(
        written(tmp_path, GOOD + '[files]\n"/a" = "text"\n"/b" = {source = "tool", mode = "0755"}')
    )
    assert loaded.contents == {"/a": (b"text", 0o644), "/b": (b"\x7fELF", 0o755)}


def test_the_digest_follows_what_the_image_is_made_from(tmp_path: Path) -> None:
    """Another package or another byte of a file is another image; the layout of the file is not."""
    (tmp_path / "tool").write_bytes(b"one")
    with_file = GOOD + '[files]\n"/b" = {source = "tool"}\n'
    first = load_recipe(written(tmp_path, with_file)).digest
    assert load_recipe(written(tmp_path, "# said again\n" + with_file)).digest == first
    (tmp_path / "tool").write_bytes(b"two")
    second = load_recipe(written(tmp_path, with_file)).digest
    third = load_recipe(written(tmp_path, with_file.replace("busybox-static", "busybox"))).digest
    assert len({first, second, third}) == 3
