"""Looking into a stack of layers without mounting it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime_image.layers import has_directory

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="whiteouts and trusted attributes are root's to make"
)


def _layers(tmp_path: Path, *names: str) -> list[Path]:
    made = [tmp_path / name for name in names]
    for layer in made:
        layer.mkdir()
    return made


def test_a_directory_of_any_layer_is_found(tmp_path: Path) -> None:
    """Whole in one layer, under layers that have nothing of it or a part."""
    bottom, middle, top = _layers(tmp_path, "bottom", "middle", "top")
    (bottom / "srv/job/deep").mkdir(parents=True)
    (middle / "srv/job").mkdir(parents=True)
    assert has_directory([bottom, middle, top], "/srv/job/deep")
    assert has_directory([bottom, middle, top], "/")
    assert not has_directory([bottom, middle, top], "/srv/other")
    assert not has_directory([], "/srv")


def test_what_is_no_plain_directory_is_not_said_to_be_one(tmp_path: Path) -> None:
    """A file or a symlink on the way, in the layer that counts, and paths that are none."""
    bottom, top = _layers(tmp_path, "bottom", "top")
    (bottom / "srv/job").mkdir(parents=True)
    (top / "srv").mkdir()
    (top / "srv/job").symlink_to("/etc")
    assert not has_directory([bottom, top], "/srv/job")
    assert has_directory([bottom], "/srv/job")
    (bottom / "srv/file").write_text("")
    assert not has_directory([bottom], "/srv/file")
    assert not has_directory([bottom], "/srv/file/below")
    assert not has_directory([bottom], "srv/job")
    assert not has_directory([bottom], "/srv/../srv/job")


@needs_root
def test_what_an_upper_layer_hides_is_not_found(tmp_path: Path) -> None:
    """A whiteout, and an opaque directory without it, end the search."""
    bottom, top = _layers(tmp_path, "bottom", "top")
    (bottom / "srv/job/deep").mkdir(parents=True)
    (top / "srv").mkdir()
    os.mknod(top / "srv/job", 0o000 | 0o020000, os.makedev(0, 0))
    assert not has_directory([bottom, top], "/srv/job/deep")
    os.unlink(top / "srv/job")
    assert has_directory([bottom, top], "/srv/job/deep")
    os.setxattr(top / "srv", "trusted.overlay.opaque", b"y")
    assert not has_directory([bottom, top], "/srv/job")
    (top / "srv/job").mkdir()
    assert has_directory([bottom, top], "/srv/job")
    assert not has_directory([bottom, top], "/srv/job/deep")
