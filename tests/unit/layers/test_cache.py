"""The layers of a host: unpacked once, shared, evicted only when nobody stands on them."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime_image.layers import LayerCache, LayerRefused, pack

pytestmark = pytest.mark.root


class Blobs:
    """Blobs to fetch, and how often each was."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self.fetched: list[str] = []

    def make(self, text: str) -> str:
        tree = self._room / f"tree-{text}"
        tree.mkdir(mode=0o755)
        (tree / "text").write_text(text)
        blob = io.BytesIO()
        digest = pack(tree, blob).digest
        (self._room / digest).write_bytes(blob.getvalue())
        return digest

    def fetch(self, digest: str) -> Callable[[Path], None]:
        def fetch(path: Path) -> None:
            self.fetched.append(digest)
            shutil.copyfile(self._room / digest, path)

        return fetch


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> LayerCache:
    return LayerCache(tmp_path / "cache")


def test_a_layer_is_unpacked_once(cache: LayerCache, blobs: Blobs) -> None:
    """Asking again fetches nothing and gives the same directory."""
    digest = blobs.make("one")
    path = cache.ensure(digest, blobs.fetch(digest))
    assert (path / "text").read_text() == "one"
    assert cache.ensure(digest, blobs.fetch(digest)) == path
    assert blobs.fetched == [digest]
    assert cache.has(digest)
    assert os.listdir(cache.root / "incoming") == []


def test_many_threads_share_one_fetch(cache: LayerCache, blobs: Blobs) -> None:
    """Of callers at the same time one fetches; all get the layer."""
    digest = blobs.make("one")
    at_once = threading.Barrier(8)

    def ask(_: int) -> Path:
        at_once.wait()
        return cache.ensure(digest, blobs.fetch(digest))

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(ask, range(8)))
    assert len(paths) == 1
    assert blobs.fetched == [digest]


def _ask_in_process(root: Path, digest: str, blob: Path, log: Path) -> None:
    def fetch(path: Path) -> None:
        with log.open("a") as file:
            file.write("fetched\n")
        shutil.copyfile(blob, path)

    assert (LayerCache(root).ensure(digest, fetch) / "text").read_text() == "one"


def test_processes_share_one_fetch(cache: LayerCache, blobs: Blobs, tmp_path: Path) -> None:
    """The same holds between agents of one machine."""
    digest = blobs.make("one")
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_ask_in_process, args=(cache.root, digest, tmp_path / digest, log))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "fetched\n"


def test_a_failed_fetch_leaves_nothing(cache: LayerCache, blobs: Blobs) -> None:
    """The error comes out, nothing counts as there, and the next caller succeeds."""
    digest = blobs.make("one")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ConnectionError("cut off")

    with pytest.raises(ConnectionError):
        cache.ensure(digest, fail)
    with pytest.raises(LayerRefused):
        cache.ensure(digest, lambda path: path.write_bytes(b"garbage") and None)
    assert not cache.has(digest)
    assert os.listdir(cache.root / "incoming") == []
    assert os.listdir(cache.root / "layers") == []
    assert cache.ensure(digest, blobs.fetch(digest)).is_dir()


def test_what_a_crash_left_is_not_trusted(cache: LayerCache, blobs: Blobs) -> None:
    """A directory without its mark, and one from before a reboot, are unpacked again."""
    digest = blobs.make("one")
    (cache.path(digest) / "half").mkdir(parents=True)
    path = cache.ensure(digest, blobs.fetch(digest))
    assert os.listdir(path) == ["text"]
    marker = path.with_name(path.name + ".json")
    known = json.loads(marker.read_text())
    marker.write_text(json.dumps({**known, "boot_id": "an earlier one"}))
    (path / "text").write_text("lost in the crash")
    assert (cache.ensure(digest, blobs.fetch(digest)) / "text").read_text() == "one"
    marker.write_text("{")
    assert cache.ensure(digest, blobs.fetch(digest)).is_dir()
    assert blobs.fetched == [digest] * 3


def test_a_sealed_layer_counts_after_any_boot(
    tmp_path: Path, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was made with layers on it serves hosts that never fetched them; what came later does not count."""
    digest, later = blobs.make("one"), blobs.make("two")
    made = LayerCache(tmp_path / "cache")
    made.ensure(digest, blobs.fetch(digest))
    assert made.seal() == [digest]
    made.ensure(later, blobs.fetch(later))
    booted = tmp_path / "boot_id"
    booted.write_text("another boot\n")
    monkeypatch.setattr("runtime_image.layers.cache._BOOT_ID", booted)
    there = LayerCache(tmp_path / "cache")
    assert there.has(digest)
    assert not there.has(later)
    there.ensure(digest, blobs.fetch(digest))
    assert blobs.fetched == [digest, later]
    assert there.evict(0) == [digest]


def test_sweeping_takes_what_was_left_half_done(cache: LayerCache, blobs: Blobs) -> None:
    """Partial trees and blobs of a killed process go; whole layers stay."""
    digest = blobs.make("one")
    cache.ensure(digest, blobs.fetch(digest))
    other = "ab" * 32
    (cache.root / "layers" / f".{other}.12345678.partial" / "x").mkdir(parents=True)
    (cache.root / "incoming" / f"{other}.12345678").write_bytes(b"half")
    cache.sweep()
    assert sorted(os.listdir(cache.root / "layers")) == sorted([digest[7:], f"{digest[7:]}.json"])
    assert os.listdir(cache.root / "incoming") == []


def test_the_least_recently_used_goes_first(cache: LayerCache, blobs: Blobs) -> None:
    """Eviction removes old layers until the rest fits, and no more than that."""
    digests = [blobs.make(name) for name in ("one", "two", "three")]
    for age, digest in enumerate(digests):
        path = cache.ensure(digest, blobs.fetch(digest))
        os.utime(path.with_name(path.name + ".json"), (age, age))
    cache.ensure(digests[0], blobs.fetch(digests[0]))
    size = cache.contents()[0].bytes
    assert cache.evict(size * 2) == [digests[1]]
    assert [layer.digest for layer in cache.contents()] == [digests[2], digests[0]]
    assert not cache.path(digests[1]).exists()
    assert cache.evict(0, pinned=[digests[0]]) == [digests[2]]


def test_a_pinned_layer_stays(cache: LayerCache, blobs: Blobs) -> None:
    """As many unpins as pins are needed, and another process's cache respects them too."""
    digest = blobs.make("one")
    cache.ensure(digest, blobs.fetch(digest))
    other = LayerCache(cache.root)
    cache.pin(digest)
    with cache.pinned([digest]):
        assert cache.pin_counts() == {digest: 2}
    assert other.evict(0) == []
    assert cache.evict(0) == []
    cache.unpin(digest)
    assert cache.pin_counts() == {}
    with pytest.raises(KeyError):
        cache.unpin(digest)
    assert other.evict(0) == [digest]
    assert not cache.has(digest)


def test_a_local_snapshot_is_adopted(cache: LayerCache, blobs: Blobs, tmp_path: Path) -> None:
    """A tree made on this host becomes the layer without a fetch; a second one is dropped."""
    digest = blobs.make("one")
    path = cache.adopt(digest, tmp_path / "tree-one")
    assert (path / "text").read_text() == "one"
    assert cache.ensure(digest, blobs.fetch(digest)) == path
    assert blobs.fetched == []
    again = tmp_path / "again"
    again.mkdir()
    assert cache.adopt(digest, again) == path
    assert not again.exists()
    assert not (tmp_path / "tree-one").exists()


def test_the_cache_is_closed_to_others(cache: LayerCache) -> None:
    """Setuid programs in layers are real, so no other user of the host may reach them."""
    assert cache.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("digest", ["sha256:../../etc", "sha256:" + "A" * 64, "", "md5:" + "0" * 64])
def test_a_digest_is_no_path(cache: LayerCache, digest: str) -> None:
    """What is not a digest is refused before it touches the disk."""
    with pytest.raises(ValueError, match="digest"):
        cache.path(digest)
