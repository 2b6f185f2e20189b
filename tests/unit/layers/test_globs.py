"""Which paths globs name."""

from __future__ import annotations

import fnmatch
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_image.layers import PathGlobs


@pytest.mark.parametrize(
    ("glob", "named", "others"),
    [
        ("tmp/*", ["tmp/a", "tmp/.hidden", "tmp/a/b"], ["", "tmp", "a/tmp/b", "tmpx/a"]),
        ("/tmp/", ["tmp", "tmp/a"], ["tmp2", "x/tmp"]),
        ("./a//b", ["a/b"], ["a", "b"]),
        ("*.o", ["x.o", ".o", "x.o/y"], ["a/x.o", "x.c"]),
        ("**/*.o", ["x.o", "a/x.o", "a/b/c/x.o"], ["a/x.c", "a"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "b"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z", "a/b/z/y"], ["a", "a/b", "z", "b/a/z"]),
        ("**", ["a", "a/b"], [""]),
        ("**/**/x", ["x", "a/x"], ["a"]),
        ("**/a/**/b/*", ["a/b/c", "x/a/y/b/c/d"], ["a/b", "b/a/c"]),
        ("a?[0-9]", ["ax1", "ax1/b"], ["ax", "a/1", "axx"]),
        ("a[!b]", ["ac"], ["ab"]),
        ("a**b", ["ab", "axb"], ["a/b", "a/x/b"]),
        ("a[b", ["a[b"], ["ab"]),
        ("x\ny/*", ["x\ny/z"], ["x"]),
        ("?", ["\udcff", "\n"], ["ab"]),
    ],
)
def test_what_a_glob_names(glob: str, named: list[str], others: list[str]) -> None:
    """`*` stays within a name, `**` goes across directories, a directory is named with what is in it."""
    globs = PathGlobs([glob])
    assert [path for path in named if not globs.match(path)] == []
    assert [path for path in others if globs.match(path)] == []


@pytest.mark.parametrize("glob", ["", "/", ".", "./", "..", "a/../b", "a\0"])
def test_what_can_name_nothing_is_refused(glob: str) -> None:
    """The root cannot be left out, and nothing is above it."""
    with pytest.raises(ValueError, match=r"path|names"):
        PathGlobs(["a", glob])


ODD = st.text("ab*?[]-!.\n\udcff", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
NAMES = st.sampled_from(["a", "b", "*", "a*", "?"]) | ODD
PATHS = st.lists(
    st.sampled_from(["a", "b", "ab"]) | st.sampled_from(["a", "b"]) | ODD, min_size=1, max_size=4
)


@settings(max_examples=400)
@given(st.lists(st.lists(st.just("**") | NAMES, min_size=1, max_size=4), max_size=3), PATHS)
def test_any_list_of_globs_means_what_is_written(patterns: list[list[str]], path: list[str]) -> None:
    """However they overlap, a path is named exactly where one of them by itself names it or a directory above it."""
    globs = PathGlobs(["/".join(names) for names in patterns])
    heads = [path[: length + 1] for length in range(len(path))]
    assert globs.match("/".join(path)) == any(_spells(names, head) for names in patterns for head in heads)


def _spells(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        rest = pattern[1:]
        if all(name == "**" for name in rest):
            return bool(path)
        return any(_spells(rest, path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _spells(pattern[1:], path[1:])


def test_no_pattern_takes_for_ever() -> None:
    """Patterns are anybody's: what makes other matchers try every combination is answered at once."""
    globs = PathGlobs(["*a" * 60 + "b", "/".join(["**", "a*"] * 61), *[f"**/*{n}*x" for n in range(300)]])
    began = time.process_time()
    assert not globs.match("/".join(["a" * 250] * 60))
    assert time.process_time() - began < 5
