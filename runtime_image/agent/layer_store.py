"""The layers of this host, fetched by presigned URL and kept unpacked: once each, whoever asks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime_image.agent.control import ControlPlane
from runtime_image.agent.transfer import Transfer, TransferError, local_path
from runtime_image.agent.unpacking import unpack
from runtime_image.layers import LayerCache, LayerError
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.images import Layer
from shoal.contract.urls import LayerGet, Url


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers on the disk, bottom first, pinned until `LayerStore.release`."""

    layers: tuple[Layer, ...]
    paths: tuple[Path, ...]


class LayerStore:
    """Brings layers onto the disk and keeps those that are in use from being evicted."""

    def __init__(self, cache: LayerCache, control: ControlPlane, transfer: Transfer, incoming: Path) -> None:
        self._cache = cache
        self._control = control
        self._transfer = transfer
        self._incoming = incoming
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._known: list[str] | None = None

    @property
    def cache(self) -> LayerCache:
        """What is on the disk."""
        return self._cache

    def digests(self) -> list[str]:
        """Digests of the layers on the disk, sorted; as of the last change that came through here."""
        if self._known is None:
            self._known = sorted(layer.digest for layer in self._cache.contents())
        return self._known

    def changed(self) -> None:
        """Layers came or went: look again."""
        self._known = None

    async def acquire(self, layers: Sequence[Layer]) -> Stack:
        """The layers' directories, fetched where they are not here. One URL call for all that are missing.

        Raises:
            ShoalError: `image_pull_failed`: a layer could not be fetched, or is not what its digest says.
        """
        pinned: list[str] = []
        try:
            for layer in layers:
                self._cache.pin(layer.digest)
                pinned.append(layer.digest)
            missing = [layer for layer in layers if not self._cache.has(layer.digest)]
            if missing:
                await asyncio.gather(*(self._fetched(layer) for layer in missing))
        except BaseException:
            for digest in pinned:
                self._cache.unpin(digest)
            raise
        paths = tuple(self._cache.path(layer.digest) for layer in layers)
        return Stack(layers=tuple(layers), paths=paths)

    def release(self, stack: Stack) -> None:
        """The layers may be evicted, as far as this user goes."""
        for layer in stack.layers:
            self._cache.unpin(layer.digest)

    async def _fetched(self, layer: Layer) -> None:
        task = self._fetching.get(layer.digest)
        if task is None:
            task = asyncio.create_task(self._fetch(layer))
            self._fetching[layer.digest] = task
            task.add_done_callback(lambda _: self._fetching.pop(layer.digest, None))
        await asyncio.shield(task)

    async def _fetch(self, layer: Layer) -> None:
        blob = self._incoming / f"{layer.digest.partition(':')[2]}.{secrets.token_hex(4)}"
        try:
            (url,) = await self._control.urls([LayerGet(digest=layer.digest)])
            source = await self._blob(url, blob)
            await unpack(self._cache, layer.digest, source, size_bytes=layer.size_bytes)
            self.changed()
        except ShoalError as error:
            if error.code is ErrorCode.IMAGE_PULL_FAILED:
                raise
            raise _pull_failed(layer, str(error)) from error
        except (TransferError, LayerError, OSError) as error:
            raise _pull_failed(layer, str(error)) from error
        finally:
            blob.unlink(missing_ok=True)

    async def _blob(self, url: Url, blob: Path) -> Path:
        """Where the blob can be read: in the store itself where we share its disk, else our copy of it."""
        shared = local_path(url.url)
        if shared is not None:
            return shared
        await self._transfer.get(url, blob)
        return blob


def _pull_failed(layer: Layer, detail: str) -> ShoalError:
    return ShoalError(
        ErrorCode.IMAGE_PULL_FAILED,
        f"A layer could not be fetched: {detail}",
        details={"digest": layer.digest, "phase": "fetching_image"},
    )
