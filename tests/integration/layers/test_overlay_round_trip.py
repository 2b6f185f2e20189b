"""Layers against the real overlayfs: what a sandbox's tree shows is what comes back."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from runtime_image.layers import (
    Changes,
    ParentMismatch,
    changes,
    copy_tree,
    delta,
    dress_root,
    index,
    pack,
    remove_tree,
    squash,
    unpack,
)
from runtime_image.layers.entries import Kind

pytestmark = pytest.mark.root

_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2


@contextlib.contextmanager
def overlay(lowers: Sequence[Path], work: Path, upper: Path | None = None) -> Iterator[Path]:
    """Mounts layers (bottom first) as a sandbox has them and gives the merged directory."""
    work.mkdir()
    for name in ("work", "merged", "upper"):
        (work / name).mkdir()
    if upper is None:
        upper = work / "upper"
        dress_root(upper, lowers[-1])
    lower = ":".join(str(path) for path in reversed(lowers))
    options = (
        f"lowerdir={lower},upperdir={upper},workdir={work / 'work'},redirect_dir=off,metacopy=off,index=off"
    )
    merged = work / "merged"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        yield merged
    finally:
        _libc.umount2(str(merged).encode(), _MNT_DETACH)


def picture(root: Path, *, sockets: bool = False) -> dict[str, tuple[object, ...]]:
    """All that a program inside can tell about a tree, by path; hard links by their first name."""
    found: dict[str, tuple[object, ...]] = {}
    first_names: dict[int, str] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        full = os.path.join(root, path)
        meta = os.lstat(full)
        kind = stat.S_IFMT(meta.st_mode)
        if stat.S_ISSOCK(meta.st_mode) and not sockets:
            continue  # a layer has no sockets
        content: object = None
        if stat.S_ISDIR(meta.st_mode):
            for name in sorted(os.listdir(full), reverse=True):
                pending.append(f"{path}/{name}" if path else name)
        elif stat.S_ISLNK(meta.st_mode):
            content = os.readlink(full)
        elif stat.S_ISREG(meta.st_mode):
            with open(full, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        xattrs = {
            key: os.getxattr(full, key, follow_symlinks=False)
            for key in os.listxattr(full, follow_symlinks=False)
            if key.startswith(("user.", "system.posix_acl_")) or key == "security.capability"
        }
        links = None
        if not stat.S_ISDIR(meta.st_mode) and meta.st_nlink > 1:
            links = first_names.setdefault(meta.st_ino, path)
        found[path] = (
            kind,
            stat.S_IMODE(meta.st_mode),
            meta.st_uid,
            meta.st_gid,
            meta.st_mtime_ns,
            meta.st_size if stat.S_ISREG(meta.st_mode) else None,
            content,
            tuple(sorted(xattrs.items())),
            links,
        )
    # A link to what only lies outside the tree is none.
    shared = [line[-1] for line in found.values() if line[-1] is not None]
    return {
        path: (*line[:-1], line[-1] if shared.count(line[-1]) > 1 else None) for path, line in found.items()
    }


NAMES = ["a", "b", "c d", "\udcff\n", ".wh.x", "long" * 40]
names = st.sampled_from(NAMES)
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
contents = st.sampled_from([b"", b"one", b"two\0\xff", b"x" * 5000])
modes = st.sampled_from([0o644, 0o600, 0o4755, 0o2750, 0o1777, 0o000])

operations = st.one_of(
    st.tuples(st.just("write"), paths, contents),
    st.tuples(st.just("write"), paths, contents),
    st.tuples(st.just("append"), paths, contents),
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("remove"), paths),
    st.tuples(st.just("remove"), paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("link"), paths, paths),
    st.tuples(st.just("symlink"), paths, st.sampled_from(["/etc/passwd", "../../..", "a"])),
    st.tuples(st.just("mkfifo"), paths),
    st.tuples(st.just("socket"), paths),
    st.tuples(st.just("chmod"), paths, modes),
    st.tuples(st.just("chown"), paths, st.sampled_from([0, 1000, 65534])),
    st.tuples(st.just("setxattr"), paths, st.sampled_from(["user.one", "user.a=b%3D"]), contents),
    st.tuples(st.just("removexattr"), paths, st.just("user.one")),
    st.tuples(st.just("capability"), paths),
    st.tuples(st.just("acl"), paths, st.sampled_from(["access", "default"])),
    st.tuples(st.just("utime"), paths, st.sampled_from([0, -1_500_000_000, 1_700_000_000_123_456_789])),
    st.tuples(st.just("sparse"), paths, st.sampled_from([1 << 20, (1 << 20) + 77])),
)
histories = st.lists(operations, max_size=12)

# VFS_CAP_REVISION_2 with cap_net_raw, permitted and effective.
_CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
# linux/posix_acl_xattr.h: version 2, then (tag, permissions, id) of owner, user 1000, group, mask, others.
_ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *line)
    for line in [
        (0x01, 7, 0xFFFFFFFF),
        (0x02, 5, 1000),
        (0x04, 5, 0xFFFFFFFF),
        (0x10, 5, 0xFFFFFFFF),
        (0x20, 0, 0xFFFFFFFF),
    ]
)


def perform(root: Path, operation: tuple[object, ...]) -> None:
    """Does one operation as a program inside would; impossible ones do nothing."""
    name, path, *rest = operation
    full = os.path.join(root, str(path))
    with contextlib.suppress(OSError):
        if name in ("write", "append"):
            if os.path.lexists(full) and not stat.S_ISREG(os.lstat(full).st_mode):
                return  # neither through symlinks nor into FIFOs
            with open(full, "wb" if name == "write" else "ab") as file:
                file.write(rest[0])  # type: ignore[arg-type]
        elif name == "mkdir":
            os.mkdir(full)
        elif name == "remove":
            subprocess.run(["rm", "-rf", "--", full], check=False, stderr=subprocess.DEVNULL)
        elif name == "rename":
            # mv falls back to a copy where overlayfs refuses to move a directory.
            target = os.path.join(root, str(rest[0]))
            subprocess.run(["mv", "-T", "--", full, target], check=False, stderr=subprocess.DEVNULL)
        elif name == "link":
            os.link(full, os.path.join(root, str(rest[0])), follow_symlinks=False)
        elif name == "symlink":
            os.symlink(str(rest[0]), full)
        elif name == "mkfifo":
            os.mkfifo(full)
        elif name == "socket":
            with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(os.path.dirname(full)):
                made.bind(os.fsencode(os.path.basename(full)))
        elif os.path.islink(full):
            return  # the rest would follow it
        elif name == "chmod":
            os.chmod(full, int(str(rest[0])))
        elif name == "chown":
            os.chown(full, int(str(rest[0])), int(str(rest[0])))
        elif name == "setxattr":
            os.setxattr(full, str(rest[0]), rest[1])  # type: ignore[arg-type]
        elif name == "removexattr":
            os.removexattr(full, str(rest[0]))
        elif name == "capability" and os.path.isfile(full):
            os.setxattr(full, "security.capability", _CAPABILITY)
        elif name == "acl":
            os.setxattr(full, f"system.posix_acl_{rest[0]}", _ACL)
        elif name == "utime":
            os.utime(full, ns=(0, int(str(rest[0]))))
        elif name == "sparse" and not os.path.isdir(full):
            with open(full, "r+b") as file:
                file.truncate(int(str(rest[0])))


def through_blob(tree: Path, into: Path, *, base: bool = False) -> Path:
    """Packs and unpacks; a base, with nothing to hide below it, without sockets."""
    blob = io.BytesIO()
    packed = pack(tree, blob, keep=(lambda entry: entry.kind is not Kind.SOCKET) if base else None)
    blob.seek(0)
    unpack(blob, into, max_bytes=packed.uncompressed_bytes, expect_digest=packed.digest)
    return into


def shown(lowers: Sequence[Path], work: Path) -> dict[str, tuple[object, ...]]:
    """The picture of a fresh sandbox over these layers."""
    with overlay(lowers, work) as merged:
        return picture(merged)


def naive_changes(before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]) -> Changes:
    """The same answer from two whole pictures."""

    def essence(line: tuple[object, ...]) -> tuple[object, ...]:
        return (*line[:4], *line[5:8])  # without times and links

    gone = {path for path in before if path not in after}
    return Changes(
        added=tuple(sorted(path for path in after if path not in before)),
        changed=tuple(
            sorted(path for path in after if path in before and essence(after[path]) != essence(before[path]))
        ),
        removed=tuple(
            sorted(
                path
                for path in gone
                if os.path.dirname(path) not in gone
                # What was below a directory that is something else now went with it.
                and after[os.path.dirname(path)][0] == stat.S_IFDIR
            )
        ),
    )


@pytest.fixture(params=["cautious", "trusting"])
def fingerprints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Deltas with and without the allowance for coarse kernel clocks, which hides skipped entries."""
    if request.param == "trusting":
        if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 13):
            pytest.skip("this kernel's change times are too coarse")
        monkeypatch.setattr(sys.modules["runtime_image.layers.index"], "_RACY_NS", -(10**18))
    return str(request.param)


@settings(
    max_examples=int(os.environ.get("SHOAL_OVERLAY_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(
    # Squashed, the second step's whiteout of a/b lies in a directory that hides the lowers itself.
    base=[],
    steps=[
        [("rename", "a", "b"), ("rename", "b", "a")],
        [("remove", "a"), ("mkdir", "a")],
    ],
)
@example(
    # A directory takes the place of a file that the base has.
    base=[("write", "c d", b"")],
    steps=[[("remove", "c d"), ("mkdir", "c d")]],
)
@given(base=histories, steps=st.lists(histories, min_size=1, max_size=3))
def test_any_history_comes_back_identical(
    fingerprints: str, base: list[tuple[object, ...]], steps: list[list[tuple[object, ...]]]
) -> None:
    """Whole snapshots, incremental chains, copies and squashed chains all show the tree the sandbox had."""
    with tempfile.TemporaryDirectory(prefix="shoal-layers-test-", ignore_cleanup_errors=True) as scratch:
        room = Path(scratch)
        lower, upper = room / "lower", room / "upper"
        lower.mkdir()
        upper.mkdir(mode=0o755)
        for operation in [("mkdir", "a"), ("mkdir", "a/b"), ("write", "a/b/c d", b"base"), *base]:
            perform(lower, operation)
        # The base is itself a layer, so sockets are gone from it.
        lower = through_blob(lower, room / "base", base=True)
        before = picture(lower)
        chain: list[Path] = []
        try:
            with overlay([lower], room / "live", upper) as merged:
                parent = None
                for number, step in enumerate(steps):
                    for operation in step:
                        perform(merged, operation)
                    wanted = picture(merged)
                    if parent is None:
                        parent = index(upper)
                        chain = [through_blob(upper, room / f"whole{number}")]
                    else:
                        try:
                            step_tree = room / f"step{number}"
                            made = delta(upper, parent, step_tree)
                        except ParentMismatch:
                            event("parent mismatch")
                            parent = index(upper)
                            chain = [through_blob(upper, room / f"whole{number}")]
                        else:
                            blob = io.BytesIO()
                            again = delta(upper, parent, blob)
                            assert again.packed is not None
                            tree_blob = io.BytesIO()
                            assert pack(step_tree, tree_blob).entries == again.packed.entries
                            parent = made.index
                            chain.append(through_blob(step_tree, room / f"delta{number}"))
                    assert shown([lower, *chain], room / f"seen{number}") == wanted
                copy_tree(upper, room / "copy")
                assert shown([lower, room / "copy"], room / "seen-copy") == wanted
                squash(chain, room / "squashed")
                assert shown([lower, room / "squashed"], room / "seen-squashed") == wanted
                squash([lower, *chain], room / "flat", bottom=True)
                assert picture(room / "flat") == wanted
                assert changes(upper, [lower]) == naive_changes(before, picture(merged, sockets=True))
                empty = room / "empty"
                empty.mkdir()
                assert changes(empty, [lower, *chain]) == Changes()
        finally:
            for left in room.iterdir():
                remove_tree(left)


def test_a_needless_whiteout_is_not_seen(tmp_path: Path) -> None:
    """A layer may hide what is not there, as those of other tools do: listings stay clean."""
    lower, tree, other = tmp_path / "lower", tmp_path / "tree", tmp_path / "other"
    for path in (lower, tree / "new/inner", other):
        path.mkdir(parents=True)
    for path in (tree / "gone", tree / "new/gone", tree / "new/inner/gone"):
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    layer = through_blob(tree, tmp_path / "layer")
    squash([layer, other], tmp_path / "squashed")
    for number, top in enumerate((layer, tmp_path / "squashed")):
        assert sorted(shown([lower, top], tmp_path / f"seen{number}")) == ["", "new", "new/inner"]
        # Removing such a directory works as well, which fails where hidden entries are left in it.
        with overlay([lower, top], tmp_path / f"again{number}") as merged:
            subprocess.run(["rm", "-r", merged / "new"], check=True)
            assert os.listdir(merged) == []
