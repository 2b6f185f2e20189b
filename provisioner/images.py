"""Images: registered once, built by a builder, never moved."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import re
from collections.abc import Callable, Sequence
from datetime import timedelta

from provisioner import keys
from provisioner.auth import Principal
from provisioner.blobs import names
from provisioner.blobs.port import BlobError, BlobExists
from provisioner.builders.port import Builder, needs_builder, no_builder
from provisioner.context import Context, log
from provisioner.lifecycle import IMAGE, move
from provisioner.manifests import split_reference
from provisioner.model import Image, dump, load, replace
from provisioner.pushed_layers import PushedLayers
from provisioner.sessions.queries import decode_cursor, encode_cursor, page_size
from provisioner.store.port import Absent, ConditionFailed, Delete, Key, Op, Put, VersionIs
from shoal.contract import images as wire
from shoal.contract.base import TenantId
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.states import ImageState

#: Seconds for which a builder's claim on an image holds without being renewed.
_LEASE_S = 60.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9._/-]{0,198}[a-z0-9])?")
Change = Callable[[Image], Image]
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Images:
    """What routes call. `recover` sees to what a replica that died was building."""

    def __init__(self, context: Context, builder: Builder | None, pushed: PushedLayers) -> None:
        self._context = context
        self._builder = builder
        self._pushed = pushed

    async def put(self, who: Principal, name: str, tag: str, body: wire.ImagePut) -> wire.Image:
        """Register an image and wait up to `body.wait_s` for it to be available. The same again answers it as it is, or
        tries again where it had failed.

        Raises:
            ShoalError: CONFLICT when the tag stands for something else; INVALID_REQUEST; NOT_IMPLEMENTED.
        """
        if not _NAME.fullmatch(name) or not _TAG.fullmatch(tag):
            raise invalid("path.name", f"{name}:{tag} is no image's name and tag")
        if self._builder is None and needs_builder(body.source):
            raise no_builder()
        request = body.model_copy(update={"wait_s": 0.0}).model_dump_json()
        hashed = hashlib.sha256(_named_by(body).model_dump_json().encode()).hexdigest()
        image = await self._claim(who.tenant, name, tag, request, hashed)
        if image is not None:
            # Put together from what is there it takes a moment; built, it may take minutes.
            self._context.background.start(
                self._make(image), f"make image {name}:{tag}", long=needs_builder(body.source)
            )
        return await self.get(who, name, tag, wait_s=body.wait_s)

    async def get(self, who: Principal, name: str, tag: str, *, wait_s: float = 0.0) -> wire.Image:
        """An image; `wait_s` waits while it is being built.

        Raises:
            ShoalError: IMAGE_NOT_FOUND.
        """
        image = await self._context.waiters.until(
            _waiter(who.tenant, name, tag),
            lambda: self._read(who.tenant, name, tag),
            lambda now: now.state is not ImageState.BUILDING,
            wait_s,
        )
        return _tell(image)

    async def list(self, who: Principal, *, cursor: str | None = None, limit: int = 100) -> wire.ImagePage:
        """Images by name and tag.

        Raises:
            ShoalError: INVALID_REQUEST.
        """
        page = await self._context.store.query(
            f"IMAGES#{who.tenant}", after=decode_cursor(cursor), limit=page_size(self._context, limit)
        )
        images = [_tell(load(Image, stored.item)) for stored in page.items]
        return wire.ImagePage(images=images, cursor=encode_cursor(page.after))

    async def layers(self, who: Principal, body: wire.LayersAsked) -> wire.LayerUploads:
        """Which layers of an image that is to be pushed are still to be sent, and where to.

        Raises:
            ShoalError: PAYLOAD_TOO_LARGE, UNAVAILABLE.
        """
        return await self._pushed.ask(who, body)

    async def delete(self, who: Principal, name: str, tag: str) -> None:
        """Take the name away; repeatable. Sessions that started from it go on, and so do their snapshots: layers stay.

        Raises:
            ShoalError: CONFLICT while it is being built.
        """
        stored = await self._context.store.get(keys.image(who.tenant, name, tag))
        if stored is None:
            return
        if load(Image, stored.item).state is ImageState.BUILDING:
            raise ShoalError(ErrorCode.CONFLICT, f"Image {name}:{tag} is being built; wait for it.")
        try:
            await self._context.store.transact(
                [Delete(key=stored.key, conditions=(VersionIs(version=stored.version),))]
            )
        except ConditionFailed:
            await self.delete(who, name, tag)

    async def recover(self) -> None:
        """Fail images whose builder is gone; putting them again tries again."""
        now = self._context.clock.now()
        for entry in await self._context.store.query_all(keys.IMAGES_OPEN):
            place = Key(pk=entry.item["pk"], sk=entry.item["sk"])
            stored = await self._context.store.get(place)
            image = load(Image, stored.item) if stored else None
            if image is None or image.state is not ImageState.BUILDING:
                await self._context.store.transact([Delete(key=entry.key)])
            elif image.builder_until is None or image.builder_until < now:
                error = ShoalError(ErrorCode.UNAVAILABLE, "The build was interrupted; put the image again.")
                await self._finish(image, error)

    async def _read(self, tenant: TenantId, name: str, tag: str) -> Image:
        stored = await self._context.store.get(keys.image(tenant, name, tag))
        if stored is None:
            raise ShoalError(ErrorCode.IMAGE_NOT_FOUND, f"No image {name}:{tag} is registered.")
        return load(Image, stored.item)

    async def _claim(self, tenant: TenantId, name: str, tag: str, request: str, hashed: str) -> Image | None:
        """Write the image down as being built by this replica; None when there is nothing to build."""
        context = self._context
        for _ in range(5):
            now = context.clock.now()
            lease = now + timedelta(seconds=_LEASE_S)
            stored = await context.store.get(keys.image(tenant, name, tag))
            image = load(Image, stored.item) if stored else None
            if image is not None and image.request_hash != hashed and image.state is not ImageState.FAILED:
                raise ShoalError(
                    ErrorCode.CONFLICT,
                    f"{name}:{tag} stands for something else, and tags never move; use another.",
                )
            if image is not None and image.state is not ImageState.FAILED:
                return None
            if image is not None:
                move(IMAGE, image.state, ImageState.BUILDING)
            new = Image(
                tenant=tenant,
                name=name,
                tag=tag,
                state=ImageState.BUILDING,
                request=request,
                request_hash=hashed,
                created_at=now,
                builder=context.replica,
                builder_until=lease,
            )
            condition = VersionIs(version=stored.version) if stored else Absent()
            try:
                await context.store.transact(
                    [
                        Put(key=keys.image(tenant, name, tag), item=dump(new), conditions=(condition,)),
                        _open(new),
                    ]
                )
            except ConditionFailed:
                continue
            return new
        raise ShoalError(ErrorCode.UNAVAILABLE, "The image keeps changing; try again.", retry_after_s=0.5)

    async def _make(self, image: Image) -> None:
        keeper = asyncio.create_task(self._keep_lease(image))
        try:
            manifest = await self._manifest(image)
            if len(manifest.layers) > wire.MAX_LAYERS:
                raise ShoalError(
                    ErrorCode.IMAGE_BUILD_FAILED,
                    f"It has {len(manifest.layers)} layers, over {wire.MAX_LAYERS}.",
                )
            await self._finish(image, manifest)
        except ShoalError as error:
            await self._finish(image, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._finish(image, ShoalError(ErrorCode.INTERNAL, "The image could not be made."))
            raise error
        finally:
            keeper.cancel()

    async def _manifest(self, image: Image) -> wire.ImageManifest:
        body = wire.ImagePut.model_validate_json(image.request)
        base = await self._base(image, body.source)
        layers = [*base.layers]
        for reference in [*([body.workspace] if body.workspace else []), *body.toolkits]:
            over = await self._of(image.tenant, reference)
            # An image's own layers are those that it put over its base; a bare one is nothing but its own.
            layers += [layer for layer in over.layers if layer.role != "base"] or over.layers
        config = wire.ImageConfig(
            env={**base.config.env, **body.env},
            workdir=body.workdir or base.config.workdir,
            user=body.user or base.config.user,
        )
        return base.model_copy(update={"layers": layers, "config": config})

    async def _base(self, image: Image, source: wire.Source) -> wire.ImageManifest:
        match source:
            case wire.LayersSource(manifest=manifest):
                for layer in manifest.layers:
                    await self._pushed.verify(layer)
                return manifest
            case wire.ImageSource(image=reference):
                return await self._of(image.tenant, reference)
            case wire.SnapshotSource(snapshot=snapshot, exclude=exclude):
                resolved = await self._context.sources.resolve(image.tenant, None, snapshot)
                stack = await self._context.sources.stack(resolved.source.digest)
                below = await self._context.sources.stack(resolved.source.image_digest)
                return wire.ImageManifest(
                    architecture=below.architecture or _architecture(),
                    layers=[*await self._without(image, stack.layers, below.layers, exclude)],
                    config=stack.config,
                    provenance={"snapshot": snapshot},
                )
            case _:
                return await self._build().build(
                    image.name, image.tag, source, lambda phase: self._phase(image, phase)
                )

    async def _without(
        self,
        image: Image,
        layers: Sequence[wire.Layer],
        below: Sequence[wire.Layer],
        exclude: Sequence[str],
    ) -> Sequence[wire.Layer]:
        """A snapshot's layers without the excluded paths: only what sessions put over their image is written anew."""
        base = {layer.digest for layer in below}
        own = [layer for layer in layers if layer.role == "snapshot" and layer.digest not in base]
        if not exclude or not own:
            return layers
        repacked = await self._build().repack(own, exclude, lambda phase: self._phase(image, phase))
        anew = {old.digest: new for old, new in zip(own, repacked, strict=True)}
        stack = [anew.get(layer.digest, layer) for layer in layers]
        # What is left of several may be the same, and no stack mounts a layer twice. The upper one says it all.
        digests = [layer.digest for layer in stack]
        return [layer for at, layer in enumerate(stack) if layer.digest not in digests[at + 1 :]]

    def _build(self) -> Builder:
        if self._builder is None:
            raise no_builder()
        return self._builder

    async def _of(self, tenant: TenantId, reference: str) -> wire.ImageManifest:
        split_reference(reference)
        resolved = await self._context.sources.resolve(tenant, reference, None)
        stack = await self._context.sources.stack(resolved.source.digest)
        return wire.ImageManifest(
            architecture=stack.architecture or _architecture(),
            layers=stack.layers,
            config=stack.config,
            provenance={"image": reference},
        )

    async def _keep_lease(self, image: Image) -> None:
        while True:
            await self._context.clock.sleep(_LEASE_S / 3)
            await self._change(image, lambda now: now)

    async def _phase(self, image: Image, phase: str) -> None:
        await self._change(image, lambda now: replace(now, phase=phase))
        self._context.waiters.notify(_waiter(image.tenant, image.name, image.tag))

    async def _change(self, image: Image, change: Change) -> None:
        """Change the image while it is this replica that builds it, and renew the lease on the way."""
        for _ in range(5):
            stored = await self._context.store.get(keys.image(image.tenant, image.name, image.tag))
            now = load(Image, stored.item) if stored else None
            if (
                stored is None
                or now is None
                or now.builder != image.builder
                or now.state is not ImageState.BUILDING
            ):
                return
            until = self._context.clock.now() + timedelta(seconds=_LEASE_S)
            new = replace(change(now), builder_until=until)
            try:
                await self._context.store.transact(
                    [Put(key=stored.key, item=dump(new), conditions=(VersionIs(version=stored.version),))]
                )
            except ConditionFailed:
                continue
            return

    async def _finish(self, image: Image, outcome: wire.ImageManifest | ShoalError) -> None:
        context = self._context
        changes: dict[str, object]
        if isinstance(outcome, ShoalError):
            state = ImageState.FAILED
            changes = {"error": outcome.body().error}
        else:
            state = ImageState.AVAILABLE
            data, digest = outcome.canonical(), outcome.digest
            try:
                await context.blobs.put_if_absent(names.manifest(digest), data)
            except BlobExists:
                pass
            except BlobError as error:
                raise ShoalError(ErrorCode.UNAVAILABLE, "The manifest cannot be stored.") from error
            body = wire.ImagePut.model_validate_json(image.request)
            changes = {
                "digest": digest,
                "layers": tuple(outcome.layers),
                "config": outcome.config,
                "provenance": outcome.provenance,
                "resources": body.resources,
                "size_bytes": sum(layer.size_bytes for layer in outcome.layers),
                "available_at": context.clock.now(),
            }
        for _ in range(5):
            stored = await context.store.get(keys.image(image.tenant, image.name, image.tag))
            now = load(Image, stored.item) if stored else None
            if (
                stored is None
                or now is None
                or now.state is not ImageState.BUILDING
                or now.builder != image.builder
            ):
                return
            new = replace(
                now,
                state=move(IMAGE, now.state, state),
                phase=None,
                builder=None,
                builder_until=None,
                **changes,  # type: ignore[arg-type]
            )
            ops: list[Op] = [
                Put(key=stored.key, item=dump(new), conditions=(VersionIs(version=stored.version),)),
                Delete(key=_open(image).key),
            ]
            try:
                await context.store.transact(ops)
            except ConditionFailed:
                continue
            log.info("image.finished", image=f"{image.name}:{image.tag}", state=state.value)
            context.waiters.notify(_waiter(image.tenant, image.name, image.tag))
            return


def _named_by(body: wire.ImagePut) -> wire.ImagePut:
    """What of a request says which image it is: not how long it waits, nor where a pushed one was built."""
    source = body.source
    if isinstance(source, wire.LayersSource):
        source = wire.LayersSource(manifest=source.manifest.model_copy(update={"provenance": {}}))
    return body.model_copy(update={"wait_s": 0.0, "source": source})


def _open(image: Image) -> Put:
    place = keys.image(image.tenant, image.name, image.tag)
    return Put(
        key=Key(pk=keys.IMAGES_OPEN, sk=f"{place.pk}#{place.sk}"), item={"pk": place.pk, "sk": place.sk}
    )


def _waiter(tenant: TenantId, name: str, tag: str) -> str:
    return f"image {tenant} {name}:{tag}"


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _tell(image: Image) -> wire.Image:
    return wire.Image(
        name=image.name,
        tag=image.tag,
        state=image.state,
        phase=image.phase,
        digest=image.digest,
        layers=[*image.layers],
        config=image.config,
        resources=image.resources,
        provenance=image.provenance,
        size_bytes=image.size_bytes,
        created_at=image.created_at,
        available_at=image.available_at,
        error=image.error,
    )
