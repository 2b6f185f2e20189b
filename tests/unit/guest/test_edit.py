"""Edits: exact or not at all, and the diff is the edit."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_image.guest.edit import edit
from runtime_image.guest.workers import Sink, Source

NOTHING: Any = (Sink(-1), Source(-1))


def do(path: Path, old: str, new: str, **fields: object) -> dict[str, Any]:
    """One edit."""
    return edit({"path": str(path), "old": old, "new": new, **fields}, *NOTHING)


LINES = st.lists(st.sampled_from(["a\n", "b\n", "ab\n", "\n", "c d\n"]), max_size=12).map("".join)
TEXTS = st.tuples(LINES, st.sampled_from(["", "a", "no end"])).map("".join)


@settings(max_examples=150, deadline=None)
@given(
    TEXTS,
    st.sampled_from(["a", "b\n", "a\nb", "\n", "c d\n\n", "no end"]),
    st.sampled_from(["", "X", "X\nY", "Z\n"]),
)
def test_patch_makes_the_edit_from_the_diff(tmp_path_factory: Any, text: str, old: str, new: str) -> None:
    """The reported diff, applied by patch(1) to the old file, gives the new one, for any number of spots."""
    file = tmp_path_factory.mktemp("edit") / "file"
    file.write_text(text)
    result = do(file, old, new, occurrences=None)
    assert result["replacements"] == text.count(old)
    if not result["replacements"]:
        assert file.read_text() == text
        return
    assert file.read_text() == text.replace(old, new)
    before = file.with_name("before")
    before.write_text(text)
    patched = subprocess.run(
        ["patch", "-s", "-u", "--posix", str(before), "-o", "-"], input=result["diff"], capture_output=True
    )
    assert patched.returncode == 0, (result["diff"], patched)
    if patched.stdout or text.replace(old, new):
        assert patched.stdout.decode() == text.replace(old, new), result["diff"].decode()


def test_an_ambiguous_match_is_refused_with_its_places(tmp_path: Path) -> None:
    """Nothing is written; the count and the lines come back."""
    file = tmp_path / "f"
    file.write_text("x = 1\ny = 2\nx = 1\n")
    assert do(file, "x = 1", "x = 3") == {
        "replacements": 0,
        "matches": 2,
        "near": [{"line": 1, "text": b"x = 1"}, {"line": 3, "text": b"x = 1"}],
    }
    assert file.read_text() == "x = 1\ny = 2\nx = 1\n"
    assert do(file, "x = 1", "x = 3", occurrences=2)["replacements"] == 2


def test_no_match_shows_what_is_most_alike(tmp_path: Path) -> None:
    """Wrong indentation and small slips are shown as they really are in the file, as many lines as asked for."""
    file = tmp_path / "f"
    file.write_text("def f():\n    if a:\n        return value\n    return None\n")
    result = do(file, "if a:\n    return value\n", "")
    assert (result["replacements"], result["matches"]) == (0, 0)
    assert result["near"][0] == {"line": 2, "text": b"    if a:\n        return value"}
    assert do(file, "retrun valeu", "")["near"][0]["text"] == b"        return value"


def test_mode_owner_and_symlink_are_kept(tmp_path: Path) -> None:
    """An edit through a symlink writes its target, which stays what it was."""
    file = tmp_path / "f"
    file.write_text("old")
    file.chmod(0o4751)
    (tmp_path / "link").symlink_to("f")
    assert do(tmp_path / "link", "old", "new")["replacements"] == 1
    assert (tmp_path / "link").is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o4751)
    assert sorted(os.listdir(tmp_path)) == ["f", "link"]


def test_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    """Only what matches changes, whatever the rest is."""
    file = tmp_path / "f"
    file.write_bytes(b"\xff\x00 key=1 \r\n\xfe")
    do(file, "key=1", "key=2")
    assert file.read_bytes() == b"\xff\x00 key=2 \r\n\xfe"
