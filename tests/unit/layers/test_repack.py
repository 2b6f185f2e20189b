"""Layers anew, without some of their paths."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_image.builder import BuildError, BuildReason, blob_name, repack_layers
from runtime_image.layers import DigestMismatch, PackedLayer, PathGlobs, Without, pack, repack, unpack
from runtime_image.layers.entries import Kind
from runtime_image.layers.walk import walk

pytestmark = pytest.mark.root


def blob_of(tree: Path, at: Path) -> PackedLayer:
    with at.open("wb") as out:
        return pack(tree, out)


def without(blob: Path, *globs: str, scratch: Path, digest: str | None = None) -> tuple[PackedLayer, bytes]:
    out = io.BytesIO()
    packed = repack(
        blob,
        out,
        keep=Without(PathGlobs(globs)),
        scratch=scratch,
        max_bytes=1 << 28,
        expect_digest=digest,
    )
    return packed, out.getvalue()


def restored(blob: bytes, into: Path) -> Path:
    unpack(io.BytesIO(blob), into, max_bytes=1 << 28)
    return into


def seen(tree: Path) -> dict[str, Any]:
    """All that a layer says of each path; of hard links, the group's kept names."""
    said: dict[str, Any] = {}
    groups: dict[tuple[int, int], list[str]] = {}
    for found in walk(tree):
        entry = found.entry
        content = b""
        if entry.kind is Kind.FILE:
            content = (tree / entry.path).read_bytes()
        if entry.identity is not None:
            groups.setdefault(entry.identity, []).append(entry.path)
        about = (entry.kind, entry.mode, entry.uid, entry.gid, entry.link_target, entry.opaque, content)
        # A whiteout has no time of its own.
        mtime = None if entry.kind is Kind.WHITEOUT else entry.mtime_ns
        said[entry.path] = [*about, mtime, dict(entry.xattrs), None]
    for names in groups.values():
        for name in names:
            said[name][-1] = sorted(names)
    return said


def minus(said: dict[str, Any], globs: Sequence[str]) -> dict[str, Any]:
    """The same without what is named."""
    named = PathGlobs(globs)
    left = {path: list(about) for path, about in said.items() if not named.match(path)}
    for about in left.values():
        names = [name for name in about[-1] or () if name in left]
        about[-1] = names if len(names) > 1 else None
    return left


NAMES = st.sampled_from(["a", "b", "c.o", ".d", ".wh.e"])
KINDS = st.sampled_from(["file", "link", "symlink", "fifo", "whiteout"])
TREES = st.recursive(KINDS, lambda below: st.dictionaries(NAMES, below, max_size=4), max_leaves=12)
GLOBS = st.lists(
    st.sampled_from(["a", "b", "*", "**", "*.o", "c.o", ".*", "?", "[ab]"]), min_size=1, max_size=3
)


def make(tree: Path, inside: dict[str, Any], first: list[Path]) -> None:
    for number, (name, kind) in enumerate(inside.items()):
        path = tree / name
        if isinstance(kind, dict):
            path.mkdir(mode=0o750 + number)
            make(path, kind, first)
            if len(kind) == 2:
                os.setxattr(path, "trusted.overlay.opaque", b"y")
        elif kind == "link" and first:
            os.link(first[0], path)
        elif kind == "symlink":
            path.symlink_to("/etc/passwd")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "whiteout":
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        else:
            path.write_text(str(path))
            os.setxattr(path, "user.tag", name.encode())
            first.append(path)
        if kind != "whiteout":
            os.utime(path, ns=(0, 1_700_000_000_000_000_001 + number), follow_symlinks=False)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(NAMES, TREES, max_size=5), st.lists(GLOBS.map("/".join), max_size=3))
def test_what_is_left_is_the_tree_minus_what_is_named(inside: dict[str, Any], globs: list[str]) -> None:
    """For any layer and any globs: nothing that is named, everything else, and that as it was."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        tree, scratch = directory / "tree", directory / "scratch"
        tree.mkdir()
        scratch.mkdir()
        make(tree, inside, [])
        before = blob_of(tree, directory / "blob")
        packed, blob = without(directory / "blob", *globs, scratch=scratch, digest=before.digest)
        expected = minus(seen(tree), globs)
        assert seen(restored(blob, directory / "after")) == expected
        assert (packed.diff_id == before.diff_id) == (expected == seen(tree))
        assert list(scratch.iterdir()) == []


def test_a_link_outlives_its_first_name(tmp_path: Path) -> None:
    """The bytes of a file are there under the names that stay, still one file."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"content")
    for name in ("b", "c"):
        os.link(tree / "a", tree / name)
    blob_of(tree, tmp_path / "blob")
    after = restored(without(tmp_path / "blob", "a", scratch=tmp_path)[1], tmp_path / "after")
    assert sorted(os.listdir(after)) == ["b", "c"]
    assert (after / "c").read_bytes() == b"content"
    assert (after / "b").stat().st_ino == (after / "c").stat().st_ino


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    """Globs speak of names: what a symlink points to is neither left out nor taken in."""
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    (tree / "real").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("of the machine")
    (tree / "real" / "file").write_text("stays")
    (tree / "alias").symlink_to("real")
    (tree / "out").symlink_to(outside)
    blob_of(tree, tmp_path / "blob")
    globs = ("alias/*", "out/*", "alias/file")
    after = restored(without(tmp_path / "blob", *globs, scratch=tmp_path)[1], tmp_path / "after")
    assert (after / "real" / "file").read_text() == "stays"
    assert os.readlink(after / "out") == str(outside)
    assert (outside / "secret").exists()


def test_a_directory_that_only_a_path_implied_gets_no_entry(tmp_path: Path) -> None:
    """Another's blob may name a file and not its directory: an entry would hide whose that is below."""
    blob = tmp_path / "blob"
    with tarfile.open(blob, "w") as tar:
        for name in ("home/me/keep", "home/me/drop"):
            tar.addfile(tarfile.TarInfo(name))
    packed, data = without(blob, "**/drop", scratch=tmp_path)
    assert packed.entries == 2  # the root and the file
    unpacked = unpack(io.BytesIO(data), tmp_path / "after", max_bytes=1 << 20)
    assert unpacked.implied == ("home", "home/me")
    assert (tmp_path / "after/home/me/keep").exists()


def test_the_wrong_blob_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    """A blob is held to its digest."""
    (tmp_path / "tree").mkdir()
    blob_of(tmp_path / "tree", tmp_path / "blob")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(DigestMismatch):
        without(tmp_path / "blob", "a", scratch=scratch, digest="sha256:" + "0" * 64)
    assert list(scratch.iterdir()) == []


def test_the_command_writes_one_layer_for_each(tmp_path: Path) -> None:
    """In order, beside an `image.json`; a wrong glob, file or blob is typed, and no tree stays."""
    blobs = []
    for number in range(2):
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        (tree / f"keep{number}").write_text("x")
        (tree / "drop").write_text("x")
        blobs.append(tmp_path / f"blob{number}")
        blob_of(tree, blobs[-1])
    out = tmp_path / "out"
    manifest = repack_layers(blobs, ["drop"], out)
    for number, layer in enumerate(manifest.layers):
        after = restored((out / blob_name(layer.digest)).read_bytes(), tmp_path / f"after{number}")
        assert os.listdir(after) == [f"keep{number}"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["image.json", *(blob_name(layer.digest) for layer in manifest.layers)]
    )
    (tmp_path / blob_name("0" * 64)).write_bytes(blobs[0].read_bytes())
    for wrong, globs, reason in (
        (blobs[0], ["../x"], BuildReason.BAD_EXCLUDE),
        (tmp_path / "missing", ["x"], BuildReason.BAD_ARCHIVE),
        (tmp_path / blob_name("0" * 64), ["x"], BuildReason.BAD_ARCHIVE),
    ):
        failed = tmp_path / f"failed-{wrong.name}"
        with pytest.raises(BuildError) as raised:
            repack_layers([wrong], globs, failed)
        assert raised.value.reason is reason
        assert not failed.exists() or list(failed.iterdir()) == []
