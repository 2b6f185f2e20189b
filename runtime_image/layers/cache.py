"""The layers of one host: each unpacked once, shared by every sandbox, removed when nobody needs it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime_image.layers.copy import copy_tree
from runtime_image.layers.dirs import remove_tree
from runtime_image.layers.pack import unpack
from runtime_image.layers.walk import walk

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
#: In place of a boot id: the layer is whole after any boot.
_ANY_BOOT = "any"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class CachedLayer:
    """One layer on the disk.

    Attributes:
        bytes: What its files take on the disk.
        used_at_ns: Last time it was asked for, by the wall clock.
    """

    digest: str
    path: Path
    bytes: int
    used_at_ns: int


class LayerCache:
    """A directory of unpacked layers, safe to share between threads and processes.

        root/layers/<hex>/        the tree, as overlayfs takes it
        root/layers/<hex>.json    written last: the layer is complete
        root/locks/<hex>.fill     held while one process unpacks it
        root/locks/<hex>.pin      held, shared, while somebody's sandboxes stand on it
        root/incoming/            blobs on their way

    Layers are not flushed to the disk: after a crash of the machine (told by its boot id) they are
    unpacked again, unless they were sealed (`seal`), as in a machine image that is made with layers
    on its disk. Pins last as long as the process: one that takes over sandboxes pins their layers
    before anybody evicts.
    """

    def __init__(self, root: Path) -> None:
        """Opens or makes the cache. The root is closed to other users: setuid files below are real."""
        self.root = root
        self._layers = root / "layers"
        self._locks = root / "locks"
        self._incoming = root / "incoming"
        for directory in (root, self._layers, self._locks, self._incoming):
            directory.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)
        self._boot_id = _BOOT_ID.read_text().strip()
        self._mutex = threading.Lock()
        self._pins: dict[str, tuple[int, int]] = {}  # digest -> (count, locked descriptor)

    def path(self, digest: str) -> Path:
        """Where that layer is, or would be."""
        return self._layers / _hex(digest)

    def has(self, digest: str) -> bool:
        """Whether the layer is here and whole."""
        return self._marker(digest) is not None

    def ensure(self, digest: str, fetch: Callable[[Path], None], *, max_bytes: int = 64 * 1024**3) -> Path:
        """Gives the layer's directory, fetching and unpacking it when it is not here.

        Of several callers, in any process, one does the work and the others wait for it.

        Args:
            fetch: Writes the blob to the path it is given. What it raises comes out of here, and the
                next caller tries again.
            max_bytes: Of the uncompressed tar, at most.

        Raises:
            LayerRefused: The blob is not that layer, or not one to use.
        """
        target = self.path(digest)
        if self._touch(digest):
            return target
        with self._locked(digest, "fill"):
            if self._touch(digest):
                return target
            remove_tree(target)
            blob = self._incoming / f"{_hex(digest)}.{secrets.token_hex(4)}"
            try:
                fetch(blob)
                layer = unpack(blob, target, max_bytes=max_bytes, expect_digest=digest)
            finally:
                blob.unlink(missing_ok=True)
            self._mark(digest, layer.uncompressed_bytes)
        return target

    def adopt(self, digest: str, tree: Path) -> Path:
        """Takes over a tree that this host has already: a snapshot made here. The tree is moved.

        Nothing is verified: the caller packed this very tree to that digest. A layer that is here
        already stays, and the tree is removed.
        """
        target = self.path(digest)
        with self._locked(digest, "fill"):
            if self._touch(digest):
                remove_tree(tree)
                return target
            remove_tree(target)
            try:
                tree.rename(target)
            except OSError:  # another filesystem
                aside = self._layers / f".{target.name}.{secrets.token_hex(4)}.partial"
                try:
                    copy_tree(tree, aside)
                    aside.rename(target)
                except BaseException:
                    remove_tree(aside)
                    raise
                remove_tree(tree)
            self._mark(digest, _allocated_bytes(target))
        return target

    def pin(self, digest: str) -> None:
        """Keeps a layer from being evicted, by any process, until as many `unpin` calls."""
        with self._mutex:
            count, fd = self._pins.get(digest, (0, -1))
            if count == 0:
                fd = self._open_lock(digest, "pin")
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH)
                except BaseException:
                    os.close(fd)
                    raise
            self._pins[digest] = (count + 1, fd)

    def unpin(self, digest: str) -> None:
        """Takes one pin back.

        Raises:
            KeyError: There is none.
        """
        with self._mutex:
            count, fd = self._pins[digest]
            if count > 1:
                self._pins[digest] = (count - 1, fd)
            else:
                del self._pins[digest]
                os.close(fd)

    @contextlib.contextmanager
    def pinned(self, digests: Collection[str]) -> Iterator[None]:
        """Pins several for the length of a block."""
        done: list[str] = []
        try:
            for digest in digests:
                self.pin(digest)
                done.append(digest)
            yield
        finally:
            for digest in done:
                self.unpin(digest)

    def pin_counts(self) -> dict[str, int]:
        """This process's pins."""
        with self._mutex:
            return {digest: count for digest, (count, _) in self._pins.items()}

    def contents(self) -> list[CachedLayer]:
        """The whole layers, least recently used first."""
        found = []
        for marker in self._layers.glob("*.json"):
            digest = "sha256:" + marker.stem
            known = self._marker(digest)
            if known is not None:
                found.append(
                    CachedLayer(digest=digest, path=self.path(digest), bytes=known[0], used_at_ns=known[1])
                )
        return sorted(found, key=lambda layer: layer.used_at_ns)

    def evict(self, max_bytes: int, pinned: Collection[str] = ()) -> list[str]:
        """Removes the least recently used layers until the rest takes at most `max_bytes`.

        Args:
            pinned: Digests to keep besides those that are pinned.

        Returns:
            The digests that went. What is pinned stays, even when it is too much.
        """
        layers = self.contents()
        total = sum(layer.bytes for layer in layers)
        gone = []
        for layer in layers:
            if total <= max_bytes:
                break
            if layer.digest not in pinned and self._remove(layer.digest):
                total -= layer.bytes
                gone.append(layer.digest)
        return gone

    def seal(self) -> list[str]:
        """Flushes what is here to the disk and lets it count after any boot; the digests.

        For a disk that becomes part of a machine image. Nobody else may use the cache meanwhile.
        """
        layers = self.contents()
        os.sync()
        for layer in layers:
            self._mark(layer.digest, layer.bytes, boot_id=_ANY_BOOT)
        os.sync()
        return [layer.digest for layer in layers]

    def sweep(self) -> None:
        """Removes what a killed process left half done. Safe while others work."""
        for partial in [*self._layers.glob(".*.partial"), *self._incoming.iterdir()]:
            name = partial.name.lstrip(".").split(".")[0]
            if re.fullmatch(r"[0-9a-f]{64}", name) is None:
                continue
            with contextlib.suppress(BlockingIOError), self._locked("sha256:" + name, "fill", wait=False):
                remove_tree(partial)

    def _remove(self, digest: str) -> bool:
        with contextlib.ExitStack() as locks:
            try:
                locks.enter_context(self._locked(digest, "pin", wait=False))
                locks.enter_context(self._locked(digest, "fill", wait=False))
            except BlockingIOError:
                return False
            self._marker_path(digest).unlink(missing_ok=True)
            remove_tree(self.path(digest))
            return True

    def _marker_path(self, digest: str) -> Path:
        return self._layers / f"{_hex(digest)}.json"

    def _marker(self, digest: str) -> tuple[int, int] | None:
        path = self._marker_path(digest)
        try:
            with path.open("rb") as file:
                known = json.load(file)
                used_at_ns = os.fstat(file.fileno()).st_mtime_ns
            if known["boot_id"] not in (self._boot_id, _ANY_BOOT):
                return None
            return int(known["bytes"]), used_at_ns
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):  # cut short by a crash
            return None

    def _touch(self, digest: str) -> bool:
        if self._marker(digest) is None:
            return False
        try:
            os.utime(self._marker_path(digest))
        except FileNotFoundError:  # evicted just now
            return False
        return True

    def _mark(self, digest: str, size: int, *, boot_id: str | None = None) -> None:
        path = self._marker_path(digest)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        aside.write_text(json.dumps({"bytes": size, "boot_id": boot_id or self._boot_id}))
        aside.rename(path)

    def _open_lock(self, digest: str, purpose: str) -> int:
        return os.open(
            self._locks / f"{_hex(digest)}.{purpose}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    @contextlib.contextmanager
    def _locked(self, digest: str, purpose: str, *, wait: bool = True) -> Iterator[None]:
        fd = self._open_lock(digest, purpose)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(fd)


def _hex(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"not a sha256 digest: {digest[:100]!r}")
    return digest.removeprefix("sha256:")


def _allocated_bytes(tree: Path) -> int:
    return sum(found.stat.st_blocks * 512 for found in walk(tree, xattrs=False))
