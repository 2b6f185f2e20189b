"""Image manifests: what names an image, and layers as separate things."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_image.builder import ImageConfig, ImageLayer, ImageManifest, LayerRole, build_layer, compose

pytestmark = pytest.mark.root


def layer(number: int, role: LayerRole = LayerRole.BASE) -> ImageLayer:
    return ImageLayer(
        digest=f"sha256:{number:064x}",
        diff_id=f"sha256:{number:064x}",
        size_bytes=1,
        uncompressed_bytes=2,
        role=role,
    )


def image(*layers: ImageLayer) -> ImageManifest:
    return ImageManifest(name="a", tag="1", architecture="amd64", layers=layers)


def test_the_digest_names_layers_and_defaults_only() -> None:
    """Two builds of the same content are the same image, whatever they are called and wherever from."""
    one = image(layer(1))
    renamed = one.model_copy(update={"name": "b", "provenance": {"source": "elsewhere"}})
    assert renamed.digest == one.digest
    assert one.model_copy(update={"config": ImageConfig(user="x")}).digest != one.digest
    assert image(layer(2)).digest != one.digest
    assert image(layer(1), layer(2)).digest != image(layer(2), layer(1)).digest


def test_a_manifest_survives_its_file(tmp_path: Path) -> None:
    """Saved and loaded it is equal; a damaged one is refused."""
    made = image(layer(1), layer(2, LayerRole.TOOLKIT))
    made.save(tmp_path)
    assert ImageManifest.load(tmp_path) == made
    (tmp_path / "image.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format"):
        ImageManifest.load(tmp_path)


def test_toolkits_lie_over_workspaces_over_bases() -> None:
    """Whatever order they are named in; the base's own layers stay as they are."""
    tool, work = layer(3, LayerRole.TOOLKIT), layer(2, LayerRole.WORKSPACE)
    made = compose(image(layer(1)), (tool, work), name="both", tag="2")
    assert [entry.role.value for entry in made.layers] == ["base", "workspace", "toolkit"]
    assert (made.name, made.tag) == ("both", "2")


def test_a_bump_rebuilds_one_layer(tmp_path: Path) -> None:
    """A toolkit's new version is a new layer; the base's and the workspace's digests stay."""
    work, tool, out = tmp_path / "work", tmp_path / "tool", tmp_path / "out"
    for directory in (work, tool):
        directory.mkdir()
        (directory / "file").write_text("one")
    base = image(layer(1))
    workspace = build_layer(work, out, prefix="/workspace", role=LayerRole.WORKSPACE)
    toolkit = build_layer(tool, out, prefix="/opt/tool", role=LayerRole.TOOLKIT)
    first = compose(base, (workspace, toolkit), name="a", tag="1")
    (tool / "file").write_text("two")
    bumped = build_layer(tool, out, prefix="/opt/tool", role=LayerRole.TOOLKIT)
    second = compose(base, (workspace, bumped), name="a", tag="2")
    assert first.layers[:2] == second.layers[:2]
    assert first.layers[2].digest != second.layers[2].digest
    assert len(list(out.iterdir())) == 3
