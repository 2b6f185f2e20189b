"""Blobs that somebody hostile has written: refused or harmless, and nothing outside is touched."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_image.layers import DigestMismatch, LayerRefused, pack, remove_tree, unpack

pytestmark = pytest.mark.root

LIMIT = 10 * 1024 * 1024


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def archive(*members: tuple[tarfile.TarInfo, bytes] | tarfile.TarInfo) -> bytes:
    """A plain pax tar of these members, as they are."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for item in members:
            info, data = item if isinstance(item, tuple) else (item, b"")
            info.size = len(data) if data else info.size
            tar.addfile(info, io.BytesIO(data) if data else None)
    return out.getvalue()


def file(name: str, data: bytes = b"evil") -> tuple[tarfile.TarInfo, bytes]:
    return member(name), data


def refuse(blob: bytes, room: Path) -> LayerRefused:
    """Unpacks, expects a refusal, and that nothing is left but the untouched neighbour."""
    (room / "neighbour").write_text("untouched")
    with pytest.raises(LayerRefused) as refused:
        unpack(io.BytesIO(blob), room / "layer", max_bytes=LIMIT)
    assert sorted(os.listdir(room)) == ["neighbour"]
    assert (room / "neighbour").read_text() == "untouched"
    return refused.value


@pytest.mark.parametrize(
    "members",
    [
        pytest.param(lambda: [file("../neighbour")], id="climbs"),
        pytest.param(lambda: [file("a/../../neighbour")], id="climbs from within"),
        pytest.param(lambda: [file("/etc/evil")], id="absolute"),
        pytest.param(
            lambda: [member("way", tarfile.SYMTYPE, linkname=".."), file("way/neighbour")],
            id="through a relative symlink",
        ),
        pytest.param(
            lambda: [member("way", tarfile.SYMTYPE, linkname="/tmp"), file("way/evil")],
            id="through an absolute symlink",
        ),
        pytest.param(
            lambda: [
                member("a", tarfile.DIRTYPE, mode=0o755),
                member("a/way", tarfile.SYMTYPE, linkname="../.."),
                member("a/way/sub", tarfile.DIRTYPE, mode=0o777),
            ],
            id="a directory through a symlink",
        ),
        pytest.param(
            lambda: [member("l", tarfile.LNKTYPE, linkname="../neighbour")], id="hard link that climbs"
        ),
        pytest.param(lambda: [member("l", tarfile.LNKTYPE, linkname="/etc/passwd")], id="absolute hard link"),
        pytest.param(
            lambda: [
                member("way", tarfile.SYMTYPE, linkname=".."),
                member("l", tarfile.LNKTYPE, linkname="way/neighbour"),
            ],
            id="hard link through a symlink",
        ),
        pytest.param(lambda: [member("l", tarfile.LNKTYPE, linkname="nothing")], id="hard link to nothing"),
        pytest.param(
            lambda: [member(".wh.x"), member("l", tarfile.LNKTYPE, linkname="x")],
            id="hard link to a whiteout",
        ),
        pytest.param(
            lambda: [member("d", tarfile.DIRTYPE), member("l", tarfile.LNKTYPE, linkname="d")],
            id="hard link to a directory",
        ),
        pytest.param(
            lambda: [member("way", tarfile.SYMTYPE, linkname=".."), member("way/.wh.neighbour")],
            id="whiteout through a symlink",
        ),
        pytest.param(
            lambda: [member("way", tarfile.SYMTYPE, linkname=".."), member("way/.wh..wh..opq")],
            id="opaque mark through a symlink",
        ),
        pytest.param(lambda: [member(".wh.")], id="whiteout of nothing"),
        pytest.param(lambda: [member(".wh...")], id="whiteout of the parent"),
        pytest.param(lambda: [file("x" * 256)], id="a name no filesystem takes"),
        pytest.param(lambda: [member("f", uid=0xFFFFFFFF)], id="an owner that means 'as it is'"),
        pytest.param(lambda: [member("s", tarfile.SYMTYPE, linkname="")], id="a symlink to nothing"),
        pytest.param(
            lambda: [member("f", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})],
            id="a sparse file without a map",
        ),
        pytest.param(
            lambda: [file(".", b"the root is no file")],
            id="a file for a root",
        ),
    ],
)
def test_what_would_leave_or_cannot_be_is_refused(
    tmp_path: Path, members: Callable[[], list[tarfile.TarInfo]]
) -> None:
    """A member that leads out, or that no tree can hold, refuses the whole blob and leaves nothing."""
    refuse(archive(*members()), tmp_path)


def test_device_nodes_are_left_out_and_named(tmp_path: Path) -> None:
    """No device is made, not even one that looks like a whiteout; what is beside it comes along."""
    blob = archive(
        member("dev", tarfile.DIRTYPE, mode=0o755),
        member("dev/mem", tarfile.CHRTYPE, devmajor=1, devminor=1, mode=0o666),
        member("dev/sda", tarfile.BLKTYPE, devmajor=8, devminor=0, mode=0o666),
        member("etc", tarfile.CHRTYPE, devmajor=0, devminor=0),
        file("kept"),
    )
    layer = unpack(io.BytesIO(blob), tmp_path / "layer", max_bytes=LIMIT)
    assert layer.skipped == ("dev/mem", "dev/sda", "etc")
    assert sorted(os.listdir(tmp_path / "layer")) == ["dev", "kept"]
    assert os.listdir(tmp_path / "layer/dev") == []


def test_orders_to_overlayfs_are_stripped(tmp_path: Path) -> None:
    """Extended attributes that steer a mount, or the host's security modules, do not come in."""
    info = member("d", tarfile.DIRTYPE, mode=0o755)
    info.pax_headers = {
        "SCHILY.xattr.trusted.overlay.redirect": "/../../etc",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.selinux": "system_u:object_r:shadow_t:s0",
        "SCHILY.xattr.user.kept": "yes",
    }
    unpack(io.BytesIO(archive(info)), tmp_path / "layer", max_bytes=LIMIT)
    assert os.listxattr(tmp_path / "layer/d") == ["user.kept"]


def test_the_last_of_duplicate_entries_wins(tmp_path: Path) -> None:
    """A path that comes twice is replaced, never written through, whatever it was before."""
    (tmp_path / "neighbour").write_text("untouched")
    blob = archive(
        file("a", b"first"),
        member("a", tarfile.SYMTYPE, linkname=str(tmp_path / "neighbour")),
        file("a", b"second"),
        member("b", tarfile.SYMTYPE, linkname=".."),
        member("b", tarfile.DIRTYPE, mode=0o755),
        file("b/neighbour", b"inside"),
        member("c", tarfile.DIRTYPE, mode=0o755),
        file("c/gone"),
        file("c", b"file now"),
    )
    layer = tmp_path / "layer"
    unpack(io.BytesIO(blob), layer, max_bytes=LIMIT)
    assert (layer / "a").read_bytes() == b"second"
    assert not (layer / "a").is_symlink()
    assert (layer / "b/neighbour").read_bytes() == b"inside"
    assert (layer / "c").read_bytes() == b"file now"
    assert (tmp_path / "neighbour").read_text() == "untouched"


def test_a_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    """A blob that unpacks to more than was allowed is refused after about that much."""
    tar = archive(file("zeros", b"\0" * (LIMIT * 4)))
    bomb = zstandard.ZstdCompressor().compress(tar)
    assert len(bomb) < 100_000
    assert "unpacks to more than" in refuse(bomb, tmp_path).reason


def test_a_huge_claimed_size_is_refused(tmp_path: Path) -> None:
    """A header that claims a terabyte ends at the end of the stream, not in a full disk."""
    info = member("huge")
    info.size = 1 << 40
    refuse(info.tobuf(tarfile.GNU_FORMAT) + b"x" * 2048, tmp_path)


def test_a_huge_hole_takes_no_room(tmp_path: Path) -> None:
    """A sparse file may claim any size: it is a hole, and the disk hardly notices."""
    table = b"1\n0\n4\n".ljust(512, b"\0")
    info = member("sparse")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "sparse",
        "GNU.sparse.realsize": str(1 << 40),
    }
    unpack(io.BytesIO(archive((info, table + b"data"))), tmp_path / "layer", max_bytes=LIMIT)
    seen = (tmp_path / "layer/sparse").stat()
    assert (seen.st_size, seen.st_blocks * 512 <= 65536) == (1 << 40, True)


@pytest.mark.parametrize(
    "numbers",
    ["1\n-5\n4\n", "1\n0\n999\n", "2\n4\n4\n0\n4\n", "1\n0\n", "x\n"],
    ids=["negative", "past the end", "backwards", "cut off", "no number"],
)
def test_a_lying_sparse_map_is_refused(tmp_path: Path, numbers: str) -> None:
    """Maps that go backwards, below zero or beyond the file are refused."""
    info = member("sparse")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "sparse",
        "GNU.sparse.realsize": "100",
    }
    refuse(archive((info, numbers.encode().ljust(512, b"\0") + b"data")), tmp_path)


def test_an_absurd_pax_header_is_refused(tmp_path: Path) -> None:
    """A pax header is read whole by the tar reader, so its size is bounded before."""
    header = member("././@PaxHeader", tarfile.XHDTYPE)
    header.size = 1 << 30
    assert "absurd" in refuse(header.tobuf(tarfile.USTAR_FORMAT) + b"x" * 4096, tmp_path).reason


def test_damage_is_told_from_the_end(tmp_path: Path) -> None:
    """A broken header, a cut archive and garbage are refused, where tarfile would see the end."""
    good = archive(file("a"), file("b"))
    refuse(good[:1024] + b"\xff" * 512 + good[1536:], tmp_path)
    refuse(good[:1024], tmp_path)
    refuse(good[:1200], tmp_path)
    refuse(b"no tar at all" * 100, tmp_path)
    refuse(b"", tmp_path)
    refuse(zstandard.ZstdCompressor().compress(good)[:-20], tmp_path)


def test_a_blob_with_another_digest_is_refused(tmp_path: Path) -> None:
    """Bytes that are not those asked for leave nothing, though they would unpack."""
    tree = tmp_path / "tree"
    tree.mkdir()
    blob = io.BytesIO()
    packed = pack(tree, blob)
    with pytest.raises(DigestMismatch) as mismatch:
        unpack(
            io.BytesIO(blob.getvalue()),
            tmp_path / "layer",
            max_bytes=LIMIT,
            expect_digest="sha256:" + "0" * 64,
        )
    assert mismatch.value.actual == packed.digest
    assert os.listdir(tmp_path) == ["tree"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(
        st.tuples(
            st.lists(
                st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=4
            ).map("/".join),
            st.sampled_from(
                [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
            ),
            st.sampled_from(["a", "..", "../..", "/etc", "a/b", "../neighbour"]),
        ),
        max_size=8,
    ),
    damage=st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 255)), max_size=3),
)
def test_no_archive_reaches_outside(
    tmp_path: Path, names: list[tuple[str, bytes, str]], damage: list[tuple[int, int]]
) -> None:
    """Whatever members and damaged bytes an archive has, it unpacks below its directory or not at all."""
    blob = bytearray(archive(*[member(name, kind, linkname=link) for name, kind, link in names]))
    for at, value in damage:
        blob[at % len(blob)] = value
    room = tmp_path / "room"
    room.mkdir(exist_ok=True)
    (room / "neighbour").write_text("untouched")
    before = (room / "neighbour").stat()
    try:
        unpack(io.BytesIO(bytes(blob)), room / "layer", max_bytes=LIMIT)
    except LayerRefused:
        assert os.listdir(room) == ["neighbour"]
    else:
        for directory, _, files in os.walk(room / "layer"):
            for name in files:
                mode = os.lstat(os.path.join(directory, name)).st_mode
                assert not stat.S_ISBLK(mode)
                assert not stat.S_ISCHR(mode) or os.lstat(os.path.join(directory, name)).st_rdev == 0
        remove_tree(room / "layer")
    after = (room / "neighbour").stat()
    assert (room / "neighbour").read_text() == "untouched"
    assert (after.st_nlink, after.st_mode, after.st_uid) == (1, before.st_mode, before.st_uid)
