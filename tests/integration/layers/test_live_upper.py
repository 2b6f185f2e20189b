"""Deltas and diffs of a sandbox's upper while the sandbox is there."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime_image.layers import Changes, LayerIndex, changes, delta, index, pack, unpack

pytestmark = pytest.mark.root

_libc = ctypes.CDLL(None, use_errno=True)


class Live:
    """An overlay mount on an ext4 image of its own, as a sandbox has it."""

    def __init__(self, room: Path) -> None:
        self.lower = room / "lower"
        self.disk = room / "disk"
        self.merged = room / "merged"
        for path in (self.lower, self.disk, self.merged):
            path.mkdir()
        image = room / "image"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, self.disk], check=True)
        self.upper = self.disk / "upper"
        self.upper.mkdir()
        (self.disk / "work").mkdir()

    def mount(self) -> None:
        options = (
            f"lowerdir={self.lower},upperdir={self.upper},workdir={self.disk / 'work'},"
            "redirect_dir=off,metacopy=off,index=off,xino=off,volatile"
        )
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.merged], check=True)

    def close(self) -> None:
        for path in (self.merged, self.disk):
            _libc.umount2(os.fsencode(path), 0)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    try:
        yield made
    finally:
        made.close()


def trusting(parent: LayerIndex) -> LayerIndex:
    """As if taken long after the last change: no allowance for coarse clocks, the kernel's stamps decide."""
    return replace(parent, taken_ns=parent.taken_ns + 10**10)


def test_a_store_through_an_old_mapping_is_in_the_next_delta(live: Live, tmp_path: Path) -> None:
    """A page that was dirtied before the index and again after it, by a mapping alone, is not missed."""
    live.mount()
    (live.merged / "mapped").write_bytes(b"\0" * 8192)
    with open(live.merged / "mapped", "r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
        mapped[0:5] = b"first"
        parent = trusting(index(live.upper))
        mapped[0:5] = b"later"
        made = delta(live.upper, parent, tmp_path / "delta")
    assert (tmp_path / "delta/mapped").read_bytes()[:5] == b"later"
    assert made.changed == 2


def test_a_delta_follows_the_change_not_the_tree(live: Live, tmp_path: Path) -> None:
    """Of a thousand files one was touched: two entries are written, and an idle upper writes one."""
    live.mount()
    for number in range(1000):
        (live.merged / f"f{number}").write_bytes(b"x" * 1000)
    parent = trusting(index(live.upper))
    blob = io.BytesIO()
    idle = delta(live.upper, parent, blob)
    assert (idle.changed, idle.removed) == (1, 0)
    with (live.merged / "f7").open("ab") as file:
        file.write(b"more")
    (live.merged / "f8").unlink()
    blob = io.BytesIO()
    made = delta(live.upper, parent, blob)
    assert (made.changed, made.removed) == (2, 1)
    blob.seek(0)
    layer = tmp_path / "layer"
    unpack(blob, layer, max_bytes=1 << 20)
    assert sorted(os.listdir(layer)) == ["f7", "f8"]
    assert (layer / "f8").is_char_device()


def test_a_diff_says_what_a_person_would(live: Live) -> None:
    """Paths as they are seen inside: no copy-ups without a change, no times, whole directories removed."""
    for name in ("kept", "edited", "touched", "moded", "removed", "dir/in", "replaced/old", "replaced/same"):
        (live.lower / name).parent.mkdir(exist_ok=True)
        (live.lower / name).write_text(name)
    os.symlink("kept", live.lower / "link")
    live.mount()
    merged = live.merged
    (merged / "edited").write_text("else")
    os.utime(merged / "touched")
    (merged / "kept").open("r+").close()
    (merged / "moded").chmod(0o700)
    (merged / "removed").unlink()
    subprocess.run(["rm", "-r", merged / "dir", merged / "replaced"], check=True)
    (merged / "replaced").mkdir()
    (merged / "replaced/same").write_text("replaced/same")
    (merged / "new").mkdir()
    (merged / "new/file").write_text("n")
    (merged / "link").unlink()
    (merged / "link").symlink_to("edited")
    assert changes(live.upper, [live.lower]) == Changes(
        added=("new", "new/file"),
        changed=("edited", "link", "moded"),
        removed=("dir", "removed", "replaced/old"),
    )


def test_a_diff_of_a_busy_upper_does_not_fail(live: Live) -> None:
    """Files come and go under the walk; what stays put is told all the same."""
    live.mount()
    (live.merged / "d").mkdir()
    (live.merged / "steady").write_text("here")
    stop = threading.Event()

    def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            path = live.merged / "d" / f"x{number % 50}"
            path.mkdir(exist_ok=True)
            (path / "f").write_text("x")
            (path / "f").unlink()
            path.rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            assert "steady" in changes(live.upper, [live.lower]).added
    finally:
        stop.set()
        thread.join()


def test_a_socket_in_a_files_place_does_not_bring_the_file_back(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer has no sockets, but it hides what the socket hid; in a new directory there is nothing to hide."""
    (live.lower / "run").write_text("a file below")
    live.mount()
    monkeypatch.chdir(live.merged)
    (live.merged / "run").unlink()
    (live.merged / "fresh").mkdir()
    for name in ("run", "fresh/sock"):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
    blob = io.BytesIO()
    pack(live.upper, blob)
    blob.seek(0)
    layer = tmp_path / "layer"
    unpack(blob, layer, max_bytes=1 << 20)
    assert (layer / "run").is_char_device()
    assert os.listdir(layer / "fresh") == []
    monkeypatch.undo()
