"""The builder as a subprocess: its layers reach the blob store, its words reach the caller, nothing of it stays."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path

import pytest

from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.builders.local import LocalBuilder
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.images import ArchiveSource, RecipeSource, RegistrySource

DATA = b"a layer"
HEX = hashlib.sha256(DATA).hexdigest()
PROGRAM = f"""
import json, sys
from pathlib import Path
arguments = sys.argv[1:]
out = Path(arguments[arguments.index("--out") + 1])
out.mkdir()
print(json.dumps({{"phase": "packing", "argv": arguments}}), file=sys.stderr)
print("plain words", file=sys.stderr)
if "fail" in sys.argv[-1] or (arguments[0] == "build" and "fail" in Path(arguments[2]).read_text()):
    print(json.dumps({{"phase": "failed", "reason": "bad_recipe", "detail": "no such field"}}), file=sys.stderr)
    sys.exit(1)
if "hang" in sys.argv[-1]:
    import time
    time.sleep(600)
(out / "{HEX}.tar.zst").write_bytes({DATA!r})
layer = {{"digest": "sha256:{HEX}", "diff_id": "sha256:{HEX}", "size_bytes": {len(DATA)}, "uncompressed_bytes": 9,
         "role": "base", "name": None}}
(out / "image.json").write_text(json.dumps({{"format": 1, "name": "n", "tag": "t", "architecture": "amd64",
    "layers": [layer], "config": {{"env": {{"A": "1"}}, "workdir": None, "user": None, "entrypoint": []}},
    "recipe_digest": None, "provenance": {{"suite": "x"}}}}))
"""


@pytest.fixture
def blobs() -> FakeBlobs:
    return FakeBlobs()


@pytest.fixture
def builder(blobs: FakeBlobs, tmp_path: Path) -> LocalBuilder:
    return LocalBuilder(blobs, [sys.executable, "-c", PROGRAM], work=tmp_path / "work")


async def quiet(phase: str) -> None:
    return None


async def test_a_build_stores_its_layers(builder: LocalBuilder, blobs: FakeBlobs, tmp_path: Path) -> None:
    """The manifest comes back, the layers are in the blob store, phases are told, the working directory is empty."""
    phases: list[str] = []

    async def progress(phase: str) -> None:
        phases.append(phase)

    manifest = await builder.build("a/b", "1", RecipeSource(recipe="x = 1"), progress)
    assert manifest.config.env == {"A": "1"}
    assert manifest.layers[0].digest == f"sha256:{HEX}"
    assert blobs.objects[names.layer(f"sha256:{HEX}")] == DATA
    assert phases == ["packing", "storing"]
    assert list((tmp_path / "work").iterdir()) == []
    await builder.build("a", "1", RegistrySource(ref="oci:x"), quiet)
    await builder.build("a", "1", ArchiveSource(archive="/nonexistent.tar"), quiet)


async def test_a_failure_is_typed_with_its_log(builder: LocalBuilder, tmp_path: Path) -> None:
    """The builder's reason and the end of its log are in the error; nothing stays."""
    with pytest.raises(ShoalError) as raised:
        await builder.build("a", "1", RecipeSource(recipe="fail"), quiet)
    assert raised.value.code is ErrorCode.IMAGE_BUILD_FAILED
    assert "no such field" in raised.value.message
    assert "plain words" in raised.value.details["log"]
    assert list((tmp_path / "work").iterdir()) == []


async def test_a_cancelled_build_leaves_no_process(builder: LocalBuilder, tmp_path: Path) -> None:
    """Stopping the control plane ends what it builds."""
    began = asyncio.Event()

    async def progress(phase: str) -> None:
        began.set()

    task = asyncio.create_task(builder.build("a", "1", RegistrySource(ref="hang"), progress))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "work").iterdir()) == []


async def test_a_built_directory_is_taken_as_it_is(
    builder: LocalBuilder, blobs: FakeBlobs, tmp_path: Path
) -> None:
    """A directory that the builder wrote needs no build; one with a broken layer, or none, is refused."""
    directory = tmp_path / "image"
    directory.mkdir()
    layer = {"digest": f"sha256:{HEX}", "diff_id": f"sha256:{HEX}", "size_bytes": len(DATA), "role": "base"}
    (directory / "image.json").write_text(json.dumps({"architecture": "amd64", "layers": [layer]}))
    with pytest.raises(ShoalError):
        await builder.build("a", "1", ArchiveSource(archive=str(directory)), quiet)
    path = directory / f"{HEX}.tar.zst"
    path.write_bytes(b"other bytes")
    with pytest.raises(ShoalError):
        await builder.build("a", "1", ArchiveSource(archive=str(directory)), quiet)
    assert blobs.objects == {}
    path.write_bytes(DATA)
    manifest = await builder.build("a", "1", ArchiveSource(archive=str(directory)), quiet)
    assert manifest.architecture == "amd64"
    (directory / "image.json").unlink()
    with pytest.raises(ShoalError):
        await builder.build("a", "1", ArchiveSource(archive=str(directory)), quiet)


async def test_a_missing_program_is_typed(blobs: FakeBlobs, tmp_path: Path) -> None:
    """A builder that is not installed is UNAVAILABLE, not a broken recipe."""
    builder = LocalBuilder(blobs, ["/nonexistent"], work=tmp_path / "work")
    with pytest.raises(ShoalError) as raised:
        await builder.build("a", "1", RecipeSource(recipe="x"), quiet)
    assert raised.value.code is ErrorCode.UNAVAILABLE
