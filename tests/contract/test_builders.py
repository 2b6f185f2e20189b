"""The builder port's promises about layers made anew, on every adapter."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.builders.fake import FakeBuilder, files_blob
from provisioner.builders.local import LocalBuilder
from provisioner.builders.port import Builder
from runtime_image.layers import pack, unpack
from runtime_image.layers.entries import Kind
from runtime_image.layers.walk import walk
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.images import Layer

Files = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A builder, its blobs, and how layers of files are made and read for it."""

    builder: Builder
    blobs: FakeBlobs
    write: Callable[[Files], tuple[bytes, str]]
    read: Callable[[bytes], Files]

    def layer(self, name: str, files: Files) -> Layer:
        data, diff_id = self.write(files)
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.blobs.objects[names.layer(digest)] = data
        return Layer(digest=digest, diff_id=diff_id, size_bytes=len(data), role="snapshot", name=name)

    def files(self, layer: Layer) -> Files:
        data = self.blobs.objects[names.layer(layer.digest)]
        assert len(data) == layer.size_bytes
        assert "sha256:" + hashlib.sha256(data).hexdigest() == layer.digest
        return self.read(data)


def _fake(directory: Path) -> Bench:
    def write(files: Files) -> tuple[bytes, str]:
        data = files_blob(files)
        return data, "sha256:" + hashlib.sha256(data).hexdigest()

    def read(data: bytes) -> Files:
        files: Files = json.loads(data)
        return files

    blobs = FakeBlobs()
    return Bench(builder=FakeBuilder(blobs), blobs=blobs, write=write, read=read)


def _local(directory: Path) -> Bench:
    count = itertools.count()

    def write(files: Files) -> tuple[bytes, str]:
        tree = directory / f"tree{next(count)}"
        tree.mkdir()
        for path, content in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(content)
        out = io.BytesIO()
        # Compressed as the builder does not: the digest of the same content is another.
        packed = pack(tree, out, level=9)
        return out.getvalue(), packed.diff_id

    def read(data: bytes) -> Files:
        tree = directory / f"tree{next(count)}"
        unpack(io.BytesIO(data), tree, max_bytes=1 << 20)
        return {
            found.entry.path: (tree / found.entry.path).read_text()
            for found in walk(tree)
            if found.entry.kind is Kind.FILE
        }

    blobs = FakeBlobs()
    command = [sys.executable, "-m", "runtime_image.builder"]
    builder = LocalBuilder(blobs, command, work=directory / "work")
    return Bench(builder=builder, blobs=blobs, write=write, read=read)


@pytest.fixture(params=["fake", pytest.param("local", marks=pytest.mark.root)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return {"fake": _fake, "local": _local}[request.param](tmp_path)


async def quiet(phase: str) -> None:
    return None


async def test_layers_come_back_without_what_is_named(bench: Bench, tmp_path: Path) -> None:
    """One for each, in order, of the same role and name, in the blob store; the old ones stay as they were."""
    old = [
        bench.layer("one", {"tmp/a": "1", "work/b.pyc": "2", "work/c": "3", "d.pyc": "4"}),
        bench.layer("two", {"work/c": "5", "work/deep/e.pyc": "6"}),
    ]
    phases: list[str] = []

    async def progress(phase: str) -> None:
        phases.append(phase)

    new = await bench.builder.repack(old, ["/tmp", "**/*.pyc"], progress)
    assert [(layer.role, layer.name) for layer in new] == [("snapshot", "one"), ("snapshot", "two")]
    assert [bench.files(layer) for layer in new] == [{"work/c": "3"}, {"work/c": "5"}]
    assert bench.files(old[0])["tmp/a"] == "1"
    assert phases
    again = await bench.builder.repack(old, ["/tmp", "**/*.pyc"], quiet)
    assert again == new
    assert not (tmp_path / "work").exists() or list((tmp_path / "work").iterdir()) == []


async def test_a_star_stays_in_a_directory(bench: Bench) -> None:
    """`*` within a name, `**` across directories."""
    layer = bench.layer("one", {"a/x": "1", "a/b/x": "2", "x": "3"})
    for glob, left in (("*/x", {"a/b/x", "x"}), ("a/**", {"x"}), ("**/x", set()), ("a/b", {"a/x", "x"})):
        (new,) = await bench.builder.repack([layer], [glob], quiet)
        assert set(bench.files(new)) == left, glob


async def test_a_layer_of_which_nothing_is_named_is_the_same(bench: Bench) -> None:
    """Hosts have it already: nothing is stored, the digest is the old one."""
    layers = [bench.layer("one", {"a": "1"}), bench.layer("two", {"b": "2"})]
    before = dict(bench.blobs.objects)
    assert await bench.builder.repack(layers, ["c", "d/**"], quiet) == layers
    assert bench.blobs.objects == before
    first, second = await bench.builder.repack(layers, ["b"], quiet)
    assert first == layers[0]
    assert second != layers[1]


async def test_a_layer_that_is_not_there_is_typed(bench: Bench, tmp_path: Path) -> None:
    """The build fails, and nothing of it stays on the disk."""
    there = bench.layer("one", {"a": "1"})
    missing = there.model_copy(update={"digest": "sha256:" + "9" * 64})
    with pytest.raises(ShoalError) as raised:
        await bench.builder.repack([there, missing], ["a"], quiet)
    assert raised.value.code is ErrorCode.IMAGE_BUILD_FAILED
    assert not (tmp_path / "work").exists() or list((tmp_path / "work").iterdir()) == []
