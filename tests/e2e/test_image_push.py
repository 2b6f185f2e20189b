"""An image that was built elsewhere, pushed to a service and started there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from shoal.client import AsyncShoal, Shoal
from shoal.contract.errors import ErrorCode, Next, ShoalError
from tests.e2e.conftest import RECIPES, ROOT, Server

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the builder wrote."""
    out = tmp_path_factory.mktemp("base")
    _builder("build", "--recipe", str(RECIPES / "minimal.toml"), "--out", str(out))
    return out


@pytest.fixture
def built(base: Path, tmp_path: Path) -> tuple[Path, str]:
    """The same with a toolkit of its own over it, and the digest that the builder tells of it."""
    out, tool, layer = tmp_path / "built", tmp_path / "tool", tmp_path / "layer"
    shutil.copytree(base, out)
    tool.mkdir()
    (tool / "hello").write_text(f"#!/bin/sh\necho hello from the pushed image\n# {uuid.uuid4()}\n")
    (tool / "hello").chmod(0o755)
    role = ("--prefix", "/opt/tool", "--role", "toolkit")
    shutil.move(_builder("build-layer", "--dir", str(tool), *role, "--out", str(layer))["blob"], out)
    manifest = json.loads((out / "image.json").read_text())
    manifest["layers"] += json.loads((layer / "image.json").read_text())["layers"]
    (out / "image.json").write_text(json.dumps(manifest))
    assert _told(out) != _told(base)
    return out, _told(out)


def _builder(*arguments: str) -> dict[str, str]:
    command = [sys.executable, "-m", "runtime_image.builder", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    said: dict[str, str] = json.loads(done.stdout)
    return said


def _told(out: Path) -> str:
    """The digest as the builder tells it."""
    program = "import sys, pathlib; from runtime_image.builder import ImageManifest as M; "
    program += "print(M.load(pathlib.Path(sys.argv[1])).digest)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(out)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_pushed_image_starts(server: Server, shoal: Shoal, built: tuple[Path, str]) -> None:
    """The digest shown is the one that the builder told; layers that are there are not sent again; the tag stays."""
    directory, digest = built
    sent: dict[str, int] = {}

    def count(layer: str, more: int) -> None:
        sent[layer] = sent.get(layer, 0) + more

    image = shoal.images.push("pushed:1", directory, progress=count)
    assert image.digest == digest
    assert image.provenance
    sizes = {layer.digest: layer.size_bytes for layer in image.layers}
    assert sent == {layer: sizes[layer] for layer in sent}
    assert image.layers[-1].digest in sent
    with shoal.session("pushed:1") as box:
        assert box.exec("/opt/tool/hello").check().stdout == "hello from the pushed image\n"

    sent.clear()
    assert shoal.images.push("pushed:2", directory, progress=count).digest == digest
    assert sent == {}
    manifest = json.loads((directory / "image.json").read_text())
    manifest["provenance"] = {"built": "again, elsewhere"}
    (directory / "image.json").write_text(json.dumps(manifest))
    assert shoal.images.push("pushed:1", directory).digest == digest
    with pytest.raises(ShoalError) as refused:
        shoal.images.push("pushed:1", directory, env={"A": "1"})
    assert refused.value.code is ErrorCode.CONFLICT


async def test_the_command_line_and_the_async_twin_push_archives(
    server: Server, async_shoal: AsyncShoal, built: tuple[Path, str], tmp_path: Path
) -> None:
    """A tar of the directory does as well."""
    directory, digest = built
    archive = Path(shutil.make_archive(str(tmp_path / "image"), "tar", directory))
    environment = {**os.environ, "SHOAL_URL": server.url, "SHOAL_API_KEY": server.key}
    command = [sys.executable, "-m", "shoal", "image", "push", str(archive), "archived:1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["archived:1", "available", digest]
    assert (await async_shoal.images.push("archived:2", archive)).digest == digest
    archive.write_bytes(b"no tar")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "no tar of what the builder wrote" in done.stderr


def test_damaged_layers_do_not_count(shoal: Shoal, built: tuple[Path, str], tmp_path: Path) -> None:
    """Other bytes of the same size are refused where they are put; a layer that never was, where it is registered."""
    directory, _ = built
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    manifest = json.loads((copy / "image.json").read_text())
    manifest["layers"][-1]["digest"] = "sha256:" + "7" * 64
    (copy / "image.json").write_text(json.dumps(manifest))
    size = manifest["layers"][-1]["size_bytes"]
    (copy / ("7" * 64 + ".tar.zst")).write_bytes(bytes(size))
    with pytest.raises(ShoalError) as refused:
        shoal.images.push("damaged:1", copy)
    assert refused.value.next is Next.FIX
    with pytest.raises(ShoalError) as refused:
        shoal.images.put("damaged:1", {"manifest": manifest})
    assert refused.value.code is ErrorCode.IMAGE_BUILD_FAILED


def test_what_is_no_reference_is_the_callers_to_fix(shoal: Shoal) -> None:
    """No registry was asked, and asking again will not help."""
    with pytest.raises(ShoalError) as refused:
        shoal.images.add("wrong:1", "docker://UPPER/case:x")
    assert (refused.value.code, refused.value.next) == (ErrorCode.INVALID_REQUEST, Next.FIX)
    assert "source.ref" in refused.value.message
