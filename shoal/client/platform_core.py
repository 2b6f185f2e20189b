"""Operations on images, snapshots and pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.client import building
from shoal.client.client_core import ClientCore
from shoal.client.effects import Op, Send
from shoal.client.errors import from_detail
from shoal.client.places import put_at
from shoal.client.pushing import BuiltImage, Progress
from shoal.client.retry import call
from shoal.contract.images import (
    Image,
    ImageManifest,
    ImagePage,
    ImagePut,
    Layer,
    LayerAsked,
    LayersAsked,
    LayerUpload,
    LayerUploads,
)
from shoal.contract.pools import Pool, PoolPage, Prepare, Prepared, PreparedPage
from shoal.contract.snapshots import Snapshot, SnapshotPage
from shoal.contract.states import ImageState, SnapshotState


class ImagesCore:
    """`/v1/images`."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    def put(
        self,
        name: str,
        source: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        timeout_s: float | None,
        wait: bool,
        watch: Callable[[Image], None] | None,
    ) -> Op[Image]:
        """Registers `name:tag`; available when `wait`.

        Raises:
            ImageBuildFailed, ImagePullFailed: It failed; `details["log"]` may tell more.
        """
        values = building.given({**options, "source": dict(source)})
        for key in ("resources", "env"):
            if key in values:
                values[key] = building.plain(values[key])
        if "toolkits" in values:
            values["toolkits"] = list(values["toolkits"])
        context = self._core.context
        deadline = context.deadline(timeout_s)
        first_wait = min(1.0, context.wait_s(deadline)) if wait else 0.0
        send = Send(
            method="PUT",
            path=f"/v1/images/{building.quoted(name)}",
            content=building.body(building.model(ImagePut, {**values, "wait_s": first_wait})),
            headers=building.json_headers(),
            wait_s=first_wait,
        )
        image = building.parsed(Image, (yield from call(context, send, deadline=deadline)))
        if wait and image.state is ImageState.BUILDING:

            def read(wait_s: float) -> Op[Image]:
                now = yield from self.get(name, wait_s=min(wait_s, 2.0) if watch else wait_s)
                if watch is not None:
                    watch(now)
                return now

            image = yield from self._core.poll(
                read,
                lambda now: now.state is not ImageState.BUILDING,
                what=f"image {name}",
                timeout_s=timeout_s,
                deadline=deadline,
            )
        if wait and image.error is not None:
            raise from_detail(image.error)
        return image

    def layers(self, manifest: ImageManifest) -> Op[list[LayerUpload]]:
        """Which layers of an image are still to be sent, and where to."""
        unique = {layer.digest: layer.size_bytes for layer in manifest.layers}
        asked = LayersAsked(layers=[LayerAsked(digest=one, size_bytes=unique[one]) for one in unique])
        send = Send(
            method="POST",
            path="/v1/layers",
            content=building.body(asked),
            headers=building.json_headers(),
        )
        return building.parsed(LayerUploads, (yield from call(self._core.context, send))).layers

    def send_layer(
        self, image: BuiltImage, layer: Layer, upload: LayerUpload, progress: Progress | None
    ) -> Op[None]:
        """Sends one layer to where it goes."""
        if upload.put is not None:
            send = put_at(upload.put, image.chunks(layer, progress), layer.size_bytes)
            yield from call(self._core.context, send)

    def get(self, name: str, *, wait_s: float = 0.0) -> Op[Image]:
        """One image."""
        send = Send(
            method="GET",
            path=f"/v1/images/{building.quoted(name)}",
            params={"wait_s": f"{wait_s:g}"} if wait_s else {},
            wait_s=wait_s,
        )
        return building.parsed(Image, (yield from call(self._core.context, send)))

    def all(self) -> Op[list[Image]]:
        """All images, by name, then tag."""
        images: list[Image] = []
        cursor: str | None = None
        while True:
            page = building.parsed(ImagePage, (yield from self._core.get("/v1/images", {"cursor": cursor})))
            images.extend(page.images)
            cursor = page.cursor
            if cursor is None:
                return images

    def delete(self, name: str) -> Op[None]:
        """Removes a tag; sessions that run from it go on."""
        yield from self._core.delete(f"/v1/images/{building.quoted(name)}")


class SnapshotsCore:
    """`/v1/snapshots`."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    def get(self, snapshot_id: str, *, wait_s: float = 0.0) -> Op[Snapshot]:
        """One snapshot."""
        send = Send(
            method="GET",
            path=f"/v1/snapshots/{building.quoted(snapshot_id)}",
            params={"wait_s": f"{wait_s:g}"} if wait_s else {},
            wait_s=wait_s,
        )
        return building.parsed(Snapshot, (yield from call(self._core.context, send)))

    def until_durable(
        self, snapshot: Snapshot, *, timeout_s: float | None, deadline: float | None
    ) -> Op[Snapshot]:
        """Waits until it is available.

        Raises:
            SnapshotFailed: It failed and left nothing.
            WaitTimeout: `timeout_s` passed.
        """
        if snapshot.state is SnapshotState.CREATING:
            snapshot = yield from self._core.poll(
                lambda wait_s: self.get(snapshot.id, wait_s=wait_s),
                lambda now: now.state is not SnapshotState.CREATING,
                what=f"snapshot {snapshot.id}",
                timeout_s=timeout_s,
                deadline=deadline,
            )
        if snapshot.error is not None:
            raise from_detail(snapshot.error)
        return snapshot

    def all(self, params: Mapping[str, str | None]) -> Op[list[Snapshot]]:
        """Snapshots, newest first."""
        found: list[Snapshot] = []
        cursor: str | None = None
        while True:
            reply = yield from self._core.get("/v1/snapshots", {**params, "cursor": cursor})
            page = building.parsed(SnapshotPage, reply)
            found.extend(page.snapshots)
            cursor = page.cursor
            if cursor is None:
                return found

    def delete(self, snapshot_id: str) -> Op[None]:
        """Removes a snapshot; sessions that were started from it go on."""
        yield from self._core.delete(f"/v1/snapshots/{building.quoted(snapshot_id)}")


class PoolsCore:
    """`/v1/pools`."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    def all(self) -> Op[list[Pool]]:
        """All pools, by name."""
        pools: list[Pool] = []
        cursor: str | None = None
        while True:
            page = building.parsed(PoolPage, (yield from self._core.get("/v1/pools", {"cursor": cursor})))
            pools.extend(page.pools)
            cursor = page.cursor
            if cursor is None:
                return pools

    def get(self, pool: str) -> Op[Pool]:
        """One pool."""
        return building.parsed(Pool, (yield from self._core.get(f"/v1/pools/{building.quoted(pool)}")))

    def prepare(
        self,
        pool: str,
        values: Mapping[str, Any],
        *,
        wait: bool,
        timeout_s: float | None,
        watch: Callable[[Prepared], None] | None,
    ) -> Op[Prepared]:
        """Has sandboxes made ready; ready when `wait`."""
        values = building.given(values)
        if "resources" in values:
            values["resources"] = building.plain(values["resources"])
        if "snapshot" in values:
            values["snapshot"] = building.snapshot_id(values["snapshot"])
        context = self._core.context
        deadline = context.deadline(timeout_s)
        send = Send(
            method="POST",
            path=f"/v1/pools/{building.quoted(pool)}/prepare",
            content=building.body(building.model(Prepare, values)),
            headers=building.json_headers(building.idempotency_key()),
        )
        prepared = building.parsed(Prepared, (yield from call(context, send, deadline=deadline)))
        if watch is not None:
            watch(prepared)
        if not wait or prepared.done:
            return prepared

        def read(wait_s: float) -> Op[Prepared]:
            now = yield from self.prepared(pool, prepared.id, wait_s=min(wait_s, 1.0) if watch else wait_s)
            if watch is not None:
                watch(now)
            return now

        found: Prepared = yield from self._core.poll(
            read,
            lambda now: now.done,
            what=f"prepare {prepared.id}",
            timeout_s=timeout_s,
            deadline=deadline,
        )
        return found

    def prepared(self, pool: str, prepare_id: str, *, wait_s: float = 0.0) -> Op[Prepared]:
        """How far a prepare is."""
        send = Send(
            method="GET",
            path=f"/v1/pools/{building.quoted(pool)}/prepare/{building.quoted(prepare_id)}",
            params={"wait_s": f"{wait_s:g}"} if wait_s else {},
            wait_s=wait_s,
        )
        return building.parsed(Prepared, (yield from call(self._core.context, send)))

    def prepares(self, pool: str) -> Op[list[Prepared]]:
        """The pool's prepares that have not expired."""
        reply = yield from self._core.get(f"/v1/pools/{building.quoted(pool)}/prepare")
        return building.parsed(PreparedPage, reply).prepared

    def release(self, pool: str, prepare_id: str) -> Op[None]:
        """Gives back what a prepare holds."""
        yield from self._core.delete(
            f"/v1/pools/{building.quoted(pool)}/prepare/{building.quoted(prepare_id)}"
        )
