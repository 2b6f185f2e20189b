"""Layers baked into a machine image are there on its hosts, and only what is what its name says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from runtime_image.image.bake import bake, main
from runtime_image.layers import DigestMismatch, LayerCache, pack

pytestmark = pytest.mark.root


def blob_of(tmp_path: Path, text: str) -> Path:
    """A blob as the builder names it."""
    tree = tmp_path / f"tree-{text}"
    tree.mkdir(mode=0o755)
    (tree / "text").write_text(text)
    out = io.BytesIO()
    digest = pack(tree, out).digest
    path = tmp_path / f"{digest.removeprefix('sha256:')}.tar.zst"
    path.write_bytes(out.getvalue())
    return path


def test_baked_layers_need_no_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host in another boot has them, unpacked."""
    blob = blob_of(tmp_path, "one")
    (digest,) = bake([blob], tmp_path / "layers")
    assert bake([blob], tmp_path / "layers") == [digest], "baking again changes nothing"
    booted = tmp_path / "boot_id"
    booted.write_text("another boot\n")
    monkeypatch.setattr("runtime_image.layers.cache._BOOT_ID", booted)
    there = LayerCache(tmp_path / "layers")
    assert there.has(digest)
    assert (there.path(digest) / "text").read_text() == "one"


def test_a_blob_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is sealed then, and the command says which it was."""
    blob = blob_of(tmp_path, "one")
    other = blob.with_name("ab" * 32 + ".tar.zst")
    blob.rename(other)
    with pytest.raises(DigestMismatch):
        bake([other], tmp_path / "layers")
    assert main(["--layers-dir", str(tmp_path / "layers"), str(other)]) == 1
    assert "ab" * 8 in capsys.readouterr().err
