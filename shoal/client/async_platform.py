"""Images, snapshots and pools, for asyncio. The twin is shoal.client.sync_platform; a test holds them alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shoal.client.client_core import ClientCore
from shoal.client.effects import Op
from shoal.client.options import ResourcesLike
from shoal.client.platform_core import ImagesCore, PoolsCore, SnapshotsCore
from shoal.client.pushing import AT_ONCE, Progress, built_image
from shoal.contract.images import Image, Layer, LayerUpload
from shoal.contract.pools import Pool, Prepared
from shoal.contract.snapshots import Snapshot

T = TypeVar("T")


class _Run(Protocol):
    def __call__(self, op: Op[T]) -> Awaitable[T]:
        """Runs an operation."""


class AsyncImages:
    """Images: `name:tag` for an immutable stack of layers. Tags never move."""

    def __init__(self, run: _Run, core: ClientCore) -> None:
        self._run = run
        self._core = ImagesCore(core)

    async def build(
        self,
        name: str,
        recipe: str | os.PathLike[str],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Image:
        """Builds `name:tag` from a recipe: a path of a TOML file.

        Args:
            options: `workspace`, `toolkits`, `env`, `workdir`, `user`, `resources`, as the contract's ImagePut.

        Raises:
            ImageBuildFailed: `details["log"]` has the end of the log.
        """
        source = {"recipe": await asyncio.to_thread(Path(recipe).read_text, "utf-8")}
        return await self.put(name, source, wait=wait, timeout_s=timeout_s, **options)

    async def add(
        self, name: str, ref: str, *, wait: bool = True, timeout_s: float | None = None, **options: Any
    ) -> Image:
        """Takes an OCI image by reference (`docker://...`, `oci:DIR`), or a tarball or a directory that the builder
        wrote (an absolute path on the service's machine)."""
        source = {"archive": ref} if ref.startswith("/") else {"ref": ref}
        return await self.put(name, source, wait=wait, timeout_s=timeout_s, **options)

    async def pack(
        self,
        name: str,
        snapshot: str | Snapshot,
        *,
        exclude: Sequence[str] = (),
        wait: bool = True,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Image:
        """Makes an image of what a session made; `exclude` are globs of paths left out, relative to /."""
        source = {
            "snapshot": snapshot.id if isinstance(snapshot, Snapshot) else snapshot,
            "exclude": list(exclude),
        }
        return await self.put(name, source, wait=wait, timeout_s=timeout_s, **options)

    async def push(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Image:
        """Sends an image that the builder wrote (its directory, or a tar of it) to the service, and registers it.

        Layers that are there already are not sent; the others go in parallel, straight to the blob store where the
        service has one of its own. The service sees that each is what its digest says before the image counts.

        Args:
            progress: Called with a layer's digest and how many more of its bytes were sent; negative when a layer
                begins anew.
            options: As `build`.

        Raises:
            OSError, ValueError: What is at `path` cannot be read, or is no such image.
        """
        making = built_image(path)
        image = await asyncio.to_thread(making.__enter__)
        try:
            missing = image.missing(await self._run(self._core.layers(image.manifest)))
            turns = asyncio.Semaphore(AT_ONCE)

            async def send(layer: Layer, upload: LayerUpload) -> None:
                async with turns:
                    await self._run(self._core.send_layer(image, layer, upload, progress))

            sending = [asyncio.ensure_future(send(layer, upload)) for layer, upload in missing]
            try:
                await asyncio.gather(*sending)
            finally:
                for task in sending:
                    task.cancel()
                await asyncio.gather(*sending, return_exceptions=True)
            source = {"manifest": image.manifest.model_dump(mode="json")}
            return await self.put(name, source, wait=wait, timeout_s=timeout_s, **options)
        finally:
            await asyncio.to_thread(making.__exit__, None, None, None)

    async def put(
        self,
        name: str,
        source: Mapping[str, Any],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        watch: Callable[[Image], None] | None = None,
        **options: Any,
    ) -> Image:
        """Registers `name:tag` from any of the contract's sources."""
        return await self._run(
            self._core.put(name, source, options, timeout_s=timeout_s, wait=wait, watch=watch)
        )

    async def get(self, name: str) -> Image:
        """One image."""
        return await self._run(self._core.get(name))

    async def delete(self, name: str) -> None:
        """Removes a tag; sessions that run from it go on."""
        await self._run(self._core.delete(name))

    async def list(self) -> list[Image]:
        """All images, by name, then tag."""
        return await self._run(self._core.all())


class AsyncSnapshots:
    """Snapshots: durable copies of sessions' disks."""

    def __init__(self, run: _Run, core: ClientCore) -> None:
        self._run = run
        self._core = SnapshotsCore(core)

    async def get(self, snapshot_id: str) -> Snapshot:
        """One snapshot."""
        return await self._run(self._core.get(snapshot_id))

    async def delete(self, snapshot_id: str) -> None:
        """Removes one; sessions that were started from it go on."""
        await self._run(self._core.delete(snapshot_id))

    async def list(self, *, session: str | None = None, run: str | None = None) -> list[Snapshot]:
        """Snapshots, newest first."""
        return await self._run(self._core.all({"session": session, "run": run}))


class AsyncPools:
    """Pools: hosts of one shape, and capacity made ready before a run starts."""

    def __init__(self, run: _Run, core: ClientCore) -> None:
        self._run = run
        self._core = PoolsCore(core)

    async def get(self, pool: str = "default") -> Pool:
        """One pool."""
        return await self._run(self._core.get(pool))

    async def prepare(
        self,
        pool: str = "default",
        *,
        sandboxes: int,
        image: str | None = None,
        snapshot: str | Snapshot | None = None,
        resources: ResourcesLike | None = None,
        substrate: str | None = None,
        run: str | None = None,
        by: datetime | None = None,
        ttl_s: int | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
        watch: Callable[[Prepared], None] | None = None,
    ) -> Prepared:
        """Has sandboxes made ready; returns when they are, unless `wait` is False.

        Args:
            by: When they are needed; None is now.
            ttl_s: Seconds that they are kept for it when nobody claims them.
            watch: Called with how far it is.
        """
        values = {
            "sandboxes": sandboxes,
            "image": image,
            "snapshot": snapshot,
            "resources": resources,
            "substrate": substrate,
            "run": run,
            "by": by,
            "ttl_s": ttl_s,
        }
        return await self._run(self._core.prepare(pool, values, wait=wait, timeout_s=timeout_s, watch=watch))

    async def prepares(self, pool: str = "default") -> list[Prepared]:
        """A pool's prepares that have not expired."""
        return await self._run(self._core.prepares(pool))

    async def release(self, prepare_id: str, pool: str = "default") -> None:
        """Gives back what a prepare holds."""
        await self._run(self._core.release(pool, prepare_id))

    async def list(self) -> list[Pool]:
        """All pools, by name."""
        return await self._run(self._core.all())
