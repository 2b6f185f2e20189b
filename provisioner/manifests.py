"""Manifests: what a digest names, in the blob store, written once and never changed; and what sessions start from."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass

from pydantic import BaseModel, Field, ValidationError

from provisioner import keys
from provisioner.blobs import names
from provisioner.blobs.port import BlobError, BlobMissing, Blobs
from provisioner.model import Image, Snapshot, Source, load
from provisioner.store.steady import SteadyStore
from shoal.contract.base import Answer, SessionId, SnapshotId, TenantId
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.host import SandboxSource
from shoal.contract.images import IMAGE_FORMAT, ImageConfig, Layer
from shoal.contract.sessions import Resources, ResourcesAsked
from shoal.contract.states import ImageState, SnapshotState

_CACHE_SIZE = 1024


class SnapshotManifest(Answer):
    """What a snapshot's digest names. `seq` is the last action the disk holds whole; `open_actions` ran then."""

    format: int = IMAGE_FORMAT
    kind: str = "snapshot"
    image_digest: str
    layers: list[Layer]
    config: ImageConfig
    session: SessionId
    epoch: int
    seq: int
    open_actions: list[str] = Field(default_factory=list)
    parent: SnapshotId | None = None


class Stack(Answer):
    """What images' and snapshots' manifests have in common."""

    format: int
    layers: list[Layer]
    config: ImageConfig = Field(default_factory=ImageConfig)
    image_digest: str | None = None
    architecture: str | None = None


def canonical(model: BaseModel) -> bytes:
    """The one JSON of a model: sorted, without spaces; its SHA-256 is its digest."""
    plain = model.model_dump(mode="json")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_of(data: bytes) -> str:
    """`sha256:...` of some bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a request's image or snapshot is, now and for good, and the resources it asks for by itself."""

    source: Source
    resources: ResourcesAsked


def merge_resources(asked: ResourcesAsked, defaults: ResourcesAsked) -> Resources:
    """What was asked for, else the defaults, else those of `Resources`."""
    chosen = defaults.model_dump(exclude_none=True) | asked.model_dump(exclude_none=True)
    return Resources(**chosen)


def split_reference(reference: str) -> tuple[str, str]:
    """`name:tag` in its two parts.

    Raises:
        ShoalError: INVALID_REQUEST without a tag: a name alone would move.
    """
    name, colon, tag = reference.rpartition(":")
    if not colon or not name or "/" in tag:
        raise invalid("image", f"{reference!r} names no tag; write it as name:tag")
    return name, tag


class Sources:
    """Finds what sessions start from. Manifests never change, so they are remembered."""

    def __init__(self, store: SteadyStore, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs
        self._stacks: OrderedDict[str, Stack] = OrderedDict()

    async def resolve(self, tenant: TenantId, image: str | None, snapshot: SnapshotId | None) -> Resolved:
        """What `name:tag` or a snapshot's id stands for.

        Raises:
            ShoalError: IMAGE_NOT_FOUND, IMAGE_NOT_READY, IMAGE_BUILD_FAILED, SNAPSHOT_NOT_FOUND, SNAPSHOT_NOT_READY,
                CONFLICT for a snapshot that failed.
        """
        if image is not None:
            return await self._image(tenant, image)
        assert snapshot is not None
        return await self._snapshot(tenant, snapshot)

    async def sandbox(self, source: Source) -> SandboxSource:
        """The layers and defaults of a source.

        Raises:
            ShoalError: UNAVAILABLE when the blob store does not answer; INTERNAL when the manifest is gone or broken.
        """
        stack = await self.stack(source.digest)
        return SandboxSource(
            digest=source.digest,
            image_digest=source.image_digest,
            snapshot=source.snapshot,
            layers=stack.layers,
            config=stack.config,
        )

    async def stack(self, digest: str) -> Stack:
        """Layers and defaults by digest; errors as for `sandbox`."""
        found = self._stacks.get(digest)
        if found is not None:
            self._stacks.move_to_end(digest)
            return found
        try:
            data = await self._blobs.read(names.manifest(digest))
        except BlobMissing as error:
            raise ShoalError(ErrorCode.INTERNAL, f"The manifest {digest} is gone.") from error
        except BlobError as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, "The blob store does not answer; try again.", retry_after_s=1.0
            ) from error
        try:
            if digest_of(data) != digest:
                raise ValueError("its bytes hash to something else")
            found = Stack.model_validate_json(data)
            if found.format > IMAGE_FORMAT:
                raise ValueError(f"format {found.format}; this version knows {IMAGE_FORMAT}")
        except (ValueError, ValidationError) as error:
            raise ShoalError(ErrorCode.INTERNAL, f"The manifest {digest} cannot be used: {error}.") from error
        self._stacks[digest] = found
        while len(self._stacks) > _CACHE_SIZE:
            self._stacks.popitem(last=False)
        return found

    async def _image(self, tenant: TenantId, reference: str) -> Resolved:
        name, tag = split_reference(reference)
        stored = await self._store.get(keys.image(tenant, name, tag))
        if stored is None:
            raise ShoalError(ErrorCode.IMAGE_NOT_FOUND, f"No image {reference} is registered.")
        image = load(Image, stored.item)
        if image.state is ImageState.FAILED:
            reason = image.error.message if image.error else "the build failed"
            raise ShoalError(
                ErrorCode.IMAGE_BUILD_FAILED,
                f"Image {reference}: {reason}",
                details=image.error.details if image.error else {},
            )
        if image.state is not ImageState.AVAILABLE or image.digest is None:
            raise ShoalError(
                ErrorCode.IMAGE_NOT_READY, f"Image {reference} is {image.state.value}.", retry_after_s=2.0
            )
        return Resolved(
            source=Source(digest=image.digest, image_digest=image.digest, image=reference),
            resources=image.resources,
        )

    async def _snapshot(self, tenant: TenantId, id: SnapshotId) -> Resolved:
        stored = await self._store.get(keys.snapshot(id))
        snapshot = load(Snapshot, stored.item) if stored else None
        if snapshot is None or snapshot.tenant != tenant:
            raise ShoalError(ErrorCode.SNAPSHOT_NOT_FOUND, f"No snapshot {id}.")
        if snapshot.state is SnapshotState.FAILED:
            # Not `snapshot_failed`, which is for who takes one: to start from this one again and again is no use.
            raise ShoalError(
                ErrorCode.CONFLICT,
                f"Snapshot {id} failed and holds nothing: start from another one.",
                details={"snapshot": id, "state": snapshot.state.value},
            )
        if snapshot.state is not SnapshotState.AVAILABLE or snapshot.digest is None:
            raise ShoalError(
                ErrorCode.SNAPSHOT_NOT_READY, f"Snapshot {id} is not durable yet.", retry_after_s=1.0
            )
        return Resolved(
            source=snapshot_source(snapshot), resources=ResourcesAsked(**snapshot.resources.model_dump())
        )


def snapshot_source(snapshot: Snapshot) -> Source:
    """What a session starts from when it starts from this available snapshot."""
    assert snapshot.digest is not None
    return Source(
        digest=snapshot.digest,
        image_digest=snapshot.image_digest,
        image=snapshot.image,
        snapshot=snapshot.id,
    )
