"""Trees to blobs and back, without a mount."""

from __future__ import annotations

import errno
import io
import os
import socket
import stat
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard

from runtime_image.layers import (
    LayerError,
    PackedLayer,
    TreeChanged,
    TreeUnsupported,
    copy_tree,
    pack,
    remove_tree,
    unpack,
)

pytestmark = pytest.mark.root


def packed_bytes(tree: Path, **options: object) -> tuple[PackedLayer, bytes]:
    out = io.BytesIO()
    return pack(tree, out, **options), out.getvalue()  # type: ignore[arg-type]


def restore(blob: bytes, into: Path) -> Path:
    unpack(io.BytesIO(blob), into, max_bytes=1 << 30)
    return into


def names_in(blob: bytes) -> list[str]:
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(blob)
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        return tar.getnames()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One of everything that a layer holds."""
    root = tmp_path / "tree"
    root.mkdir(mode=0o755)
    (root / "file").write_bytes(b"content")
    os.link(root / "file", root / "second name")
    os.setxattr(root / "file", "user.k=e%y", b"\0\xffvalue\n")
    os.chmod(root / "file", 0o6755)
    os.utime(root / "file", ns=(0, 1_700_000_000_123_456_789))
    os.symlink("/etc/passwd", root / "symlink")
    os.link(root / "symlink", root / "symlink too", follow_symlinks=False)
    os.mkfifo(root / "fifo", 0o600)
    (root / "empty").mkdir()
    os.mknod(root / "gone", stat.S_IFCHR, os.makedev(0, 0))
    (root / "opaque").mkdir()
    os.setxattr(root / "opaque", "trusted.overlay.opaque", b"y")
    (root / ".wh.literal").write_text("really called so")
    with open(os.fsencode(root) + b"/\xff\n\x01", "wb") as odd:
        odd.write(b"odd name")
    with open(root / "sparse", "wb") as sparse:
        sparse.seek(64 << 20)
        sparse.write(b"island")
        sparse.truncate(1 << 30)
    return root


def test_everything_survives(tree: Path, tmp_path: Path) -> None:
    """Packing what was unpacked gives the same bytes, so nothing that a blob says was lost."""
    packed, blob = packed_bytes(tree)
    layer = restore(blob, tmp_path / "layer")
    assert packed_bytes(layer) == (packed, blob)
    assert (layer / "file").stat().st_mtime_ns == 1_700_000_000_123_456_789
    assert (layer / "file").stat().st_mode & 0o7777 == 0o6755
    assert os.getxattr(layer / "file", "user.k=e%y") == b"\0\xffvalue\n"
    assert (layer / "file").stat().st_ino == (layer / "second name").stat().st_ino
    assert (layer / "symlink").lstat().st_ino == (layer / "symlink too").lstat().st_ino
    assert os.getxattr(layer / "opaque", "trusted.overlay.opaque") == b"y"
    assert (layer / "gone").lstat().st_rdev == 0
    assert stat.S_ISCHR((layer / "gone").lstat().st_mode)
    assert (layer / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (layer / ".wh.literal").read_text() == "really called so"
    assert os.listdir(os.fsencode(layer / "empty")) == []
    assert b"\xff\n\x01" in os.listdir(os.fsencode(layer))


def test_gnu_tar_reads_the_blob(tree: Path, tmp_path: Path) -> None:
    """The tar inside is a plain one: another program finds the same content, holes and links in it."""
    _, blob = packed_bytes(tree)
    (tmp_path / "blob.tar.zst").write_bytes(blob)
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(
        [
            "tar",
            "--zstd",
            "--xattrs",
            "--xattrs-include=user.*",
            "-xf",
            tmp_path / "blob.tar.zst",
            "-C",
            other,
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    assert (other / "file").read_bytes() == b"content"
    assert os.getxattr(other / "file", "user.k=e%y") == b"\0\xffvalue\n"
    assert (other / "file").stat().st_ino == (other / "second name").stat().st_ino
    assert (other / "sparse").stat().st_size == 1 << 30
    assert (other / ".wh.gone").exists()
    assert (other / "opaque/.wh..wh..opq").exists()


def test_reads_what_gnu_tar_writes(tmp_path: Path) -> None:
    """Sparse files in GNU tar's own formats, long and odd names come in whole."""
    made = tmp_path / "made"
    (made / ("d" * 150)).mkdir(parents=True)
    name = "d" * 150 + "/" + "é" * 100
    with open(made / name, "wb") as sparse:
        sparse.seek(5 << 20)
        sparse.write(b"island")
    for number, options in enumerate(
        (["--format=gnu"], ["--format=pax"], ["--format=pax", "--sparse-version=0.1"])
    ):
        blob = subprocess.run(
            ["tar", "--sparse", *options, "-C", made, "-c", "."], check=True, capture_output=True
        ).stdout
        layer = restore(blob, tmp_path / f"layer{number}")
        data = (layer / name).read_bytes()
        assert data == b"\0" * (5 << 20) + b"island"


def test_the_same_tree_gives_the_same_bytes(tree: Path) -> None:
    """A digest depends on the tree alone: not on thread count, and not on when it was packed."""
    (tree / "big").write_bytes(os.urandom(1 << 20) * 3)
    assert packed_bytes(tree, threads=1) == packed_bytes(tree, threads=2)


def test_times_are_clamped_where_asked(tree: Path, tmp_path: Path) -> None:
    """Later times become the given one, earlier ones stay."""
    os.utime(tree / "empty", (5, 5))
    layer = restore(packed_bytes(tree, clamp_mtime_s=1000)[1], tmp_path / "layer")
    assert (layer / "file").stat().st_mtime == 1000
    assert (layer / "empty").stat().st_mtime == 5


def test_a_prefix_moves_the_tree(tmp_path: Path) -> None:
    """A workspace directory becomes a layer at /srv/job, hard links and all."""
    made = tmp_path / "made"
    made.mkdir(mode=0o750)
    (made / "a").write_text("a")
    os.link(made / "a", made / "b")
    layer = restore(packed_bytes(made, prefix="/srv/job/")[1], tmp_path / "layer")
    assert (layer / "srv/job/a").stat().st_ino == (layer / "srv/job/b").stat().st_ino
    assert (layer / "srv/job").stat().st_mode & 0o777 == 0o750
    assert (layer / "srv").stat().st_mode & 0o777 == 0o755


def test_what_is_not_kept_stays_out(tree: Path) -> None:
    """The filter leaves entries out, directories with all that is in them."""
    (tree / "empty/inner").write_text("x")
    _, blob = packed_bytes(tree, keep=lambda entry: entry.path not in ("empty", "fifo"))
    names = names_in(blob)
    assert "fifo" not in names
    assert not [name for name in names if name.startswith("empty")]
    assert "file" in names


def test_sockets_and_devices_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket at the top of an upper may hide something, so it becomes a whiteout; devices are named."""
    made = tmp_path / "made"
    (made / "new directory").mkdir(parents=True)
    monkeypatch.chdir(made)
    for where in ("sock", "new directory/sock"):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(where)
    os.mknod(made / "null", stat.S_IFCHR, os.makedev(1, 3))
    packed, blob = packed_bytes(made)
    assert sorted(names_in(blob)) == [".", ".wh.sock", "new directory"]
    assert packed.skipped == ("new directory/sock", "null", "sock")


def test_trees_that_a_layer_cannot_say_are_refused(tmp_path: Path) -> None:
    """An overlay redirect means nothing elsewhere, and endless paths would cost without end."""
    made = tmp_path / "made"
    (made / "d").mkdir(parents=True)
    os.setxattr(made / "d", "trusted.overlay.redirect", b"elsewhere")
    with pytest.raises(TreeUnsupported):
        packed_bytes(made)
    os.removexattr(made / "d", "trusted.overlay.redirect")
    deepen(made, "x" * 250, 200)
    with pytest.raises(TreeUnsupported):
        packed_bytes(made)
    remove_tree(made)
    assert not made.exists()


def deepen(root: Path, name: str, levels: int) -> None:
    """Makes a chain of directories that no single path could name."""
    fd = os.open(root, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, 0o640, dir_fd=fd))
    os.close(fd)


def test_deep_trees_survive(tmp_path: Path) -> None:
    """A chain deeper than the descriptor limit and longer than PATH_MAX comes back, and goes away."""
    made = tmp_path / "made"
    made.mkdir()
    deepen(made, "x" * 10, 2000)
    packed, blob = packed_bytes(made)
    layer = restore(blob, tmp_path / "layer")
    assert packed_bytes(layer)[0] == packed
    copy_tree(made, tmp_path / "copy")
    assert packed_bytes(tmp_path / "copy")[0] == packed
    for tree in (made, layer, tmp_path / "copy"):
        remove_tree(tree)
    assert os.listdir(tmp_path) == []


def test_a_copy_is_the_tree(tree: Path, tmp_path: Path) -> None:
    """`copy_tree` keeps all that a layer keeps, whiteouts and opaque marks included."""
    copy_tree(tree, tmp_path / "copy")
    assert packed_bytes(tmp_path / "copy") == packed_bytes(tree)


def test_a_symlink_swapped_in_is_never_followed(tmp_path: Path) -> None:
    """While a tree is walked somebody swaps files and directories for symlinks to a secret, again and
    again: what is packed never holds the secret."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "f").write_text("SECRET")
    made = tmp_path / "made"
    (made / "d").mkdir(parents=True)
    (made / "d/f").write_text("fine")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(made / "d", made / "aside")
            os.symlink(secret, made / "d")
            os.unlink(made / "d")
            os.rename(made / "aside", made / "d")
            os.unlink(made / "d/f")
            os.symlink(secret / "f", made / "d/f")
            os.unlink(made / "d/f")
            (made / "d/f").write_text("fine")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        whole = 0
        for _ in range(300):
            try:
                _, blob = packed_bytes(made)
            except LayerError:
                continue
            whole += 1
            plain = zstandard.ZstdDecompressor().decompressobj().decompress(blob)
            assert b"SECRET" not in plain
    finally:
        stop.set()
        thread.join()
    assert whole


@pytest.mark.parametrize("call", ["stat", "readlink", "listxattr"])
@pytest.mark.parametrize("code", [errno.ENOENT, errno.EINVAL, errno.ENODATA])
def test_a_name_that_changes_between_two_calls_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Whatever the kernel answers for a name that is no longer what it was: TreeChanged, never a bare OSError."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made/link").symlink_to("anywhere")
    real = getattr(os, call)

    def swapped(target: object, **options: object) -> object:
        if str(target).endswith("link"):
            raise OSError(code, os.strerror(code))
        return real(target, **options)

    monkeypatch.setattr(os, call, swapped)
    with pytest.raises(TreeChanged):
        packed_bytes(tmp_path / "made")


def test_unpacking_over_something_is_refused(tree: Path, tmp_path: Path) -> None:
    """An existing directory is left alone."""
    _, blob = packed_bytes(tree)
    with pytest.raises(FileExistsError):
        restore(blob, tree)


def test_removing_a_tree_stops_at_a_mount(tmp_path: Path) -> None:
    """What somebody mounted into a tree is not deleted with it."""
    made, other = tmp_path / "made", tmp_path / "made/point"
    other.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", other], check=True)
    try:
        (other / "precious").write_text("x")
        with pytest.raises(OSError, match="mount point"):
            remove_tree(made)
        assert (other / "precious").read_text() == "x"
    finally:
        subprocess.run(["umount", other], check=True)
    remove_tree(made)
    assert not made.exists()
