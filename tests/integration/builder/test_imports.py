"""Images made by others, brought in by skopeo and as tarballs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_image.builder import (
    BuildError,
    BuildReason,
    ImageManifest,
    blob_name,
    import_oci,
    import_tar,
)
from runtime_image.builder.manifest import machine_architecture
from runtime_image.builder.oci import MAX_IMPORTED_LAYERS
from runtime_image.layers import squash, unpack

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed"),
]

Member = tuple[str, bytes | None] | tarfile.TarInfo


def tar_of(*members: Member) -> bytes:
    """A tar: (name, content) is a file, (name, None) a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for item in members:
            if isinstance(item, tarfile.TarInfo):
                tar.addfile(item)
                continue
            name, data = item
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.mode = 0o755
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


def link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.LNKTYPE, target
    return info


class Layout:
    """An OCI image layout, written by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)

    def blob(self, data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (self.path / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def write(self, layers: list[bytes], config: dict[str, object], architecture: str) -> None:
        kind = "application/vnd.oci.image"
        diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        said = {
            "architecture": architecture,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": self.blob(json.dumps(said).encode(), f"{kind}.config.v1+json"),
            "layers": [self.blob(gzip.compress(layer), f"{kind}.layer.v1.tar+gzip") for layer in layers],
        }
        entry = self.blob(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
        entry["annotations"] = {"org.opencontainers.image.ref.name": "image"}
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        (self.path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


LAYERS = [
    tar_of(
        ("bin", None),
        ("bin/sh", b"shell"),
        ("etc", None),
        ("etc/one", b"1"),
        ("etc/two", b"2"),
        ("data", None),
        ("data/old", b"old"),
        link("bin/ash", "bin/sh"),
    ),
    tar_of(("etc", None), ("etc/.wh.one", b""), ("etc/three", b"3")),
    tar_of(("data", None), ("data/.wh..wh..opq", b""), ("data/new", b"new")),
]
CONFIG: dict[str, object] = {
    "Env": ["PATH=/bin", "A=b=c"],
    "WorkingDir": "/data",
    "User": "1000:1000",
    "Entrypoint": ["/bin/sh"],
    "Cmd": ["-l"],
}


@pytest.fixture
def layout(tmp_path: Path) -> Callable[..., Path]:
    def make(
        layers: list[bytes] = LAYERS,
        config: dict[str, object] = CONFIG,
        architecture: str = machine_architecture(),
    ) -> Path:
        made = Layout(tmp_path / "layout")
        made.write(layers, config, architecture)
        return made.path

    return make


def shown(manifest: ImageManifest, blobs: Path, into: Path) -> dict[str, bytes]:
    """The files a sandbox of the image would show."""
    into.mkdir()
    trees = []
    for number, layer in enumerate(manifest.layers):
        tree = into / str(number)
        unpack(
            blobs / blob_name(layer.digest),
            tree,
            max_bytes=layer.uncompressed_bytes,
            expect_digest=layer.digest,
        )
        trees.append(tree)
    squash(trees, into / "root", bottom=True)
    root = into / "root"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


WANTED = {
    "bin/sh": b"shell",
    "bin/ash": b"shell",
    "etc/two": b"2",
    "etc/three": b"3",
    "data/new": b"new",
}


def test_an_image_comes_in_layer_by_layer(layout: Callable[..., Path], tmp_path: Path) -> None:
    """Whiteouts and opaque directories take effect; environment, directory and user are kept."""
    manifest = import_oci(f"oci:{layout()}:image", tmp_path / "out", name="own", tag="3")
    assert shown(manifest, tmp_path / "out", tmp_path / "shown") == WANTED
    assert len(manifest.layers) == 3
    assert manifest.config.env == {"PATH": "/bin", "A": "b=c"}
    assert (manifest.config.workdir, manifest.config.user) == ("/data", "1000:1000")
    assert manifest.config.entrypoint == ("/bin/sh", "-l")
    assert ImageManifest.load(tmp_path / "out") == manifest
    assert (manifest.name, manifest.tag) == ("own", "3")


def test_many_layers_are_squashed_at_the_bottom(layout: Callable[..., Path], tmp_path: Path) -> None:
    """Room stays for workspaces, toolkits and snapshots, and the tree is the same."""
    more = [tar_of(("many", None), (f"many/{number}", b"x")) for number in range(20)]
    manifest = import_oci(f"oci:{layout([*LAYERS, *more])}:image", tmp_path / "out", name="own", tag="3")
    assert len(manifest.layers) == MAX_IMPORTED_LAYERS
    wanted = {**WANTED, **{f"many/{number}": b"x" for number in range(20)}}
    assert shown(manifest, tmp_path / "out", tmp_path / "shown") == wanted


def test_a_docker_save_archive_is_recognised(layout: Callable[..., Path], tmp_path: Path) -> None:
    """`import-tar` takes it for the image it is, not for a root filesystem with odd files."""
    saved = tmp_path / "saved.tar"
    subprocess.run(
        ["skopeo", "copy", "-q", f"oci:{layout()}:image", f"docker-archive:{saved}:own:3"], check=True
    )
    manifest = import_tar(saved, tmp_path / "out", name="own", tag="3")
    assert shown(manifest, tmp_path / "out", tmp_path / "shown") == WANTED
    assert manifest.config.user == "1000:1000"
    assert manifest.provenance["file"] == "saved.tar"


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_root_filesystem_becomes_one_layer(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    """What `docker export` or `tar` writes, compressed or not; the host's resolver file stays out."""
    archive = tmp_path / "root.tar"
    archive.write_bytes(
        compress(
            tar_of(("./bin", None), ("./bin/sh", b"shell"), ("./etc", None), ("./etc/resolv.conf", b"x"))
        )
    )
    manifest = import_tar(archive, tmp_path / "out", name="own", tag="1")
    assert shown(manifest, tmp_path / "out", tmp_path / "shown") == {"bin/sh": b"shell"}
    assert len(manifest.layers) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (tar_of(("../outside", b"evil"), ("bin", None)), "climbs"),
        (tar_of(("readme", b"no root")), "no root filesystem"),
        (b"garbage" * 500, "not a layer tar"),
    ],
    ids=["hostile", "no root", "garbage"],
)
def test_a_bad_tarball_is_typed(tmp_path: Path, content: bytes, says: str) -> None:
    """The reason is `bad_archive`, the detail says what is wrong, and no image is left."""
    (tmp_path / "bad.tar").write_bytes(content)
    with pytest.raises(BuildError) as refused:
        import_tar(tmp_path / "bad.tar", tmp_path / "out", name="a", tag="1")
    assert refused.value.reason is BuildReason.BAD_ARCHIVE
    assert says in refused.value.detail
    assert not (tmp_path / "out/image.json").exists()
    assert not (tmp_path / "outside").exists()


def test_a_hostile_layer_is_typed(layout: Callable[..., Path], tmp_path: Path) -> None:
    """One layer that climbs refuses the image."""
    path = layout([tar_of(("bin", None), ("bin/../../evil", b"x"))])
    with pytest.raises(BuildError) as refused:
        import_oci(f"oci:{path}:image", tmp_path / "out", name="a", tag="1")
    assert refused.value.reason is BuildReason.BAD_ARCHIVE
    assert "layer 1" in refused.value.detail


def test_a_layer_without_its_directories_changes_none(layout: Callable[..., Path], tmp_path: Path) -> None:
    """Some tools write `tmp/file` without an entry for `tmp`: it keeps the mode that the base gave it."""
    shared = tarfile.TarInfo("tmp")
    shared.type, shared.mode, shared.uid = tarfile.DIRTYPE, 0o1777, 7
    path = layout([tar_of(shared, ("bin", None)), tar_of(("tmp/new/file", b"x"))])
    manifest = import_oci(f"oci:{path}:image", tmp_path / "out", name="a", tag="1")
    assert shown(manifest, tmp_path / "out", tmp_path / "shown") == {"tmp/new/file": b"x"}
    seen = (tmp_path / "shown/root/tmp").stat()
    assert (seen.st_mode & 0o7777, seen.st_uid) == (0o1777, 7)
    assert (tmp_path / "shown/root/tmp/new").stat().st_mode & 0o7777 == 0o755


def test_a_layer_that_writes_through_a_lower_symlink_is_refused(
    layout: Callable[..., Path], tmp_path: Path
) -> None:
    """Its files would hide the symlink instead of landing behind it; the image would be quietly broken."""
    symlink = tarfile.TarInfo("lib")
    symlink.type, symlink.linkname = tarfile.SYMTYPE, "usr/lib"
    path = layout([tar_of(("usr", None), ("usr/lib", None), symlink), tar_of(("lib/new", b"x"))])
    with pytest.raises(BuildError) as refused:
        import_oci(f"oci:{path}:image", tmp_path / "out", name="a", tag="1")
    assert refused.value.reason is BuildReason.BAD_ARCHIVE
    assert "layer 2: 'lib'" in refused.value.detail


def test_another_architecture_is_refused(layout: Callable[..., Path], tmp_path: Path) -> None:
    """An image that cannot run here says so at once, not at its first command."""
    path = layout(architecture="s390x")
    with pytest.raises(BuildError) as refused:
        import_oci(f"oci:{path}:image", tmp_path / "out", name="a", tag="1")
    assert refused.value.reason in (BuildReason.BAD_ARCHIVE, BuildReason.PULL_FAILED)


def test_a_registry_that_does_not_answer_is_typed(tmp_path: Path) -> None:
    """A pull that fails has its own reason and skopeo's words."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(BuildError) as failed:
            import_oci(f"docker://127.0.0.1:{port}/no/image:1", tmp_path / "out", name="a", tag="1")
    assert failed.value.reason is BuildReason.PULL_FAILED
    assert str(port) in failed.value.detail


def test_nothing_is_left_of_an_import(layout: Callable[..., Path], tmp_path: Path) -> None:
    """Neither a good nor a failed import leaves its scratch directory."""
    before = {name for name in os.listdir("/tmp") if name.startswith("shoal-import-")}
    import_oci(f"oci:{layout()}:image", tmp_path / "out", name="own", tag="3")
    after = {name for name in os.listdir("/tmp") if name.startswith("shoal-import-")}
    assert after <= before
