"""Images never move, are built once, and say why not; pools and prepares tell how far they are."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from pydantic import ValidationError

from provisioner.blobs import names
from provisioner.builders.fake import files_blob
from provisioner.settings import ProvisionerSettings
from shoal.contract.base import SessionId, SnapshotId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import WarmReport
from shoal.contract.images import (
    Image,
    ImageManifest,
    ImagePut,
    ImageSource,
    Layer,
    LayersSource,
    RecipeSource,
    SnapshotSource,
)
from shoal.contract.pools import Prepare
from shoal.contract.sessions import ResourcesAsked, SessionCreate
from shoal.contract.snapshots import SnapshotCreate
from shoal.contract.states import ImageState, SessionState, SnapshotState
from tests.unit.provisioner.world import IMAGE, WHO, World, pool


@pytest.fixture
async def world() -> World:
    return await World().open()


RECIPE = ImagePut(source=RecipeSource(recipe="name = 'x'"), wait_s=5)


async def test_an_image_is_built_and_available(world: World) -> None:
    """A recipe is built once; putting the same again answers it without another build."""
    image = await world.finish(world.services.images.put(WHO, "x", "1", RECIPE))
    assert image.state is ImageState.AVAILABLE
    assert image.digest is not None
    again = await world.finish(world.services.images.put(WHO, "x", "1", RECIPE))
    assert again == image
    assert world.builder.built == ["x:1"]


async def test_tags_never_move(world: World) -> None:
    """Another request for a tag is a conflict, also while the first is being built."""
    world.builder.gate.clear()
    body = RECIPE.model_copy(update={"wait_s": 0.0})
    assert (await world.services.images.put(WHO, "x", "1", body)).state is ImageState.BUILDING
    other = ImagePut(source=RecipeSource(recipe="name = 'y'"), wait_s=0)
    with pytest.raises(ShoalError) as raised:
        await world.services.images.put(WHO, "x", "1", other)
    assert raised.value.code is ErrorCode.CONFLICT
    with pytest.raises(ShoalError) as raised:
        await world.services.images.delete(WHO, "x", "1")
    assert raised.value.code is ErrorCode.CONFLICT
    with pytest.raises(ShoalError) as raised:
        await world.services.sessions.create(WHO, SessionCreate(image="x:1"))
    assert raised.value.code is ErrorCode.IMAGE_NOT_READY
    world.builder.gate.set()
    await world.run(1)
    assert (await world.services.images.get(WHO, "x", "1")).state is ImageState.AVAILABLE
    with pytest.raises(ShoalError):
        await world.services.images.put(WHO, "x", "1", other)


async def test_a_failed_build_says_why_and_can_be_tried_again(world: World) -> None:
    """The end of the log is in the error; the same request, or a better one, tries again."""
    world.builder.error = ShoalError(
        ErrorCode.IMAGE_BUILD_FAILED, "no such package", details={"log": "E: nope"}
    )
    image = await world.finish(world.services.images.put(WHO, "x", "1", RECIPE))
    assert image.state is ImageState.FAILED
    assert image.error is not None
    assert image.error.details["log"] == "E: nope"
    with pytest.raises(ShoalError) as raised:
        await world.services.sessions.create(WHO, SessionCreate(image="x:1"))
    assert raised.value.code is ErrorCode.IMAGE_BUILD_FAILED
    image = await world.finish(world.services.images.put(WHO, "x", "1", RECIPE))
    assert image.state is ImageState.AVAILABLE


async def test_a_build_whose_replica_died_is_failed_by_another(world: World) -> None:
    """An image does not stay `building` for ever."""
    world.builder.gate.clear()
    await world.services.images.put(WHO, "x", "1", RECIPE.model_copy(update={"wait_s": 0.0}))
    await world.services.context.background.close(grace_s=0.01)
    other = world.replica("two")
    await other.images.recover()
    assert (await other.images.get(WHO, "x", "1")).state is ImageState.BUILDING
    await world.clock.advance(61)
    await other.images.recover()
    assert (await other.images.get(WHO, "x", "1")).state is ImageState.FAILED


async def test_layers_of_others_go_over_the_base(world: World) -> None:
    """A workspace and toolkits bring their own layers, in order; defaults are merged."""

    def layer(name: str, role: str) -> Layer:
        data = name.encode()
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        world.blobs.objects[names.layer(digest)] = data
        return Layer(digest=digest, diff_id=digest, size_bytes=len(data), role=role)  # type: ignore[arg-type]

    def source(*layers: Layer) -> LayersSource:
        return LayersSource(manifest=ImageManifest(architecture="amd64", layers=list(layers)))

    base, work, tool = layer("base", "base"), layer("work", "workspace"), layer("tool", "toolkit")
    for name, put in (
        ("base", ImagePut(source=source(base), env={"A": "1", "B": "1"}, workdir="/w")),
        ("work", ImagePut(source=source(base, work))),
        ("tool", ImagePut(source=source(tool))),
        (
            "all",
            ImagePut(
                source=ImageSource(image="base:1"), workspace="work:1", toolkits=["tool:1"], env={"B": "2"}
            ),
        ),
    ):
        image = await world.finish(world.services.images.put(WHO, name, "1", put))
        assert image.state is ImageState.AVAILABLE, image
    assert [each.digest for each in image.layers] == [base.digest, work.digest, tool.digest]
    assert image.config.env == {"A": "1", "B": "2"}
    assert image.config.workdir == "/w"
    missing = Layer(digest="sha256:" + "9" * 64, diff_id="sha256:" + "9" * 64, size_bytes=3)
    broken = await world.finish(
        world.services.images.put(WHO, "broken", "1", ImagePut(source=source(missing)))
    )
    assert broken.state is ImageState.FAILED
    world.blobs.objects[names.layer(base.digest)] = b"not!"
    damaged = await world.finish(world.services.images.put(WHO, "bad", "1", ImagePut(source=source(base))))
    assert damaged.error is not None
    assert "damaged" in damaged.error.message


async def test_a_snapshot_packs_into_an_image(world: World) -> None:
    """What a session made becomes an image that others start from."""
    await world.host()
    id = await world.create()
    snapshot = await world.services.snapshots.create(WHO, id, SnapshotCreate(wait_s=0))
    digest = "sha256:" + snapshot.id.encode().hex().ljust(64, "0")[:64]
    world.blobs.objects[names.layer(digest)] = b"0123456789"
    await world.run(1)
    image = await world.finish(
        world.services.images.put(WHO, "packed", "1", ImagePut(source=SnapshotSource(snapshot=snapshot.id)))
    )
    assert image.state is ImageState.AVAILABLE
    assert len(image.layers) == 2
    created = await world.finish(world.services.sessions.create(WHO, SessionCreate(image="packed:1")))
    assert created.session.state is SessionState.RUNNING


async def snapshot_of(world: World, session: SessionId, files: dict[str, str]) -> SnapshotId:
    """A snapshot whose own layer is these files; ten bytes, as the fake host says."""
    snapshot = await world.services.snapshots.create(WHO, session, SnapshotCreate(wait_s=0))
    digest = "sha256:" + snapshot.id.encode().hex().ljust(64, "0")[:64]
    world.blobs.objects[names.layer(digest)] = files_blob(files)
    await world.run(1)
    assert (await world.services.snapshots.get(WHO, snapshot.id)).state is SnapshotState.AVAILABLE
    return snapshot.id


async def packed(world: World, tag: str, snapshot: SnapshotId, *exclude: str) -> Image:
    body = ImagePut(source=SnapshotSource(snapshot=snapshot, exclude=list(exclude)))
    return await world.finish(world.services.images.put(WHO, "packed", tag, body))


async def test_packing_leaves_paths_out_of_what_sessions_made(world: World) -> None:
    """Only layers over the session's image are written anew, those of an image that was packed itself not among them;
    the rest of the manifest is the same, and so is all of it where nothing was named."""
    await world.host()
    first = await packed(world, "1", await snapshot_of(world, await world.create(), {"a": "x"}))
    created = await world.finish(world.services.sessions.create(WHO, SessionCreate(image="packed:1")))
    snapshot = await snapshot_of(world, created.session.id, {"b": "y"})
    whole = await packed(world, "2", snapshot)
    assert [layer.role for layer in whole.layers] == ["base", "snapshot", "snapshot"]
    without = await packed(world, "3", snapshot, "a", "b")
    assert without.state is ImageState.AVAILABLE
    assert without.layers[:2] == whole.layers[:2] == first.layers
    assert world.blobs.objects[names.layer(without.layers[2].digest)] == files_blob({})
    assert without.layers[2].role == "snapshot"
    assert without.config == whole.config
    assert (await packed(world, "4", snapshot, "c/**")).digest == whole.digest
    assert world.builder.built == ["repack", "repack"]


async def test_layers_of_which_the_same_is_left_are_one(world: World) -> None:
    """No stack has a layer twice: no kernel mounts it."""
    await world.host()
    under = await snapshot_of(world, await world.create(), {"a": "x"})
    created = await world.finish(world.services.sessions.create(WHO, SessionCreate(snapshot=under)))
    over = await snapshot_of(world, created.session.id, {"b": "y"})
    assert len((await packed(world, "1", over)).layers) == 3
    image = await packed(world, "2", over, "**")
    assert [layer.role for layer in image.layers] == ["base", "snapshot"]
    created = await world.finish(world.services.sessions.create(WHO, SessionCreate(image="packed:2")))
    assert created.session.state is SessionState.RUNNING


async def test_packing_that_fails_says_why(world: World) -> None:
    """As a build: the image is failed with the reason, and the same again tries again."""
    await world.host()
    snapshot = await snapshot_of(world, await world.create(), {"a": "x"})
    world.builder.error = ShoalError(ErrorCode.IMAGE_BUILD_FAILED, "no such layer")
    image = await packed(world, "1", snapshot, "a")
    assert image.state is ImageState.FAILED
    assert image.error is not None
    assert image.error.code == ErrorCode.IMAGE_BUILD_FAILED
    assert (await packed(world, "1", snapshot, "a")).state is ImageState.AVAILABLE


@pytest.mark.parametrize("glob", ["", "/", ".", "a/../b", "..", "a\0b", "x" * 5000])
def test_a_glob_that_can_name_nothing_is_no_request(glob: str) -> None:
    """Refused where it is asked, not when the image is built."""
    with pytest.raises(ValidationError):
        SnapshotSource(snapshot=SnapshotId("snp_1"), exclude=["tmp", glob])


async def test_images_are_listed_and_deleted(world: World) -> None:
    """By name and tag, by pages; a deleted one is gone and its sessions go on."""
    await world.host()
    id = await world.create()
    for tag in ("2", "3"):
        await world.add_image(tag)
    first = await world.services.images.list(WHO, limit=2)
    rest = await world.services.images.list(WHO, limit=2, cursor=first.cursor)
    assert [image.tag for image in [*first.images, *rest.images]] == ["1", "2", "3"]
    await world.services.images.delete(WHO, "code", "1")
    await world.services.images.delete(WHO, "code", "1")
    with pytest.raises(ShoalError) as raised:
        await world.services.images.get(WHO, "code", "1")
    assert raised.value.code is ErrorCode.IMAGE_NOT_FOUND
    assert (await world.services.sessions.get(WHO, id)).state is SessionState.RUNNING


@pytest.mark.parametrize(
    ("name", "tag"), [("X", "1"), ("a b", "1"), ("", "1"), ("x", ""), ("x", "a/b"), ("../x", "1")]
)
async def test_names_of_images_are_plain(world: World, name: str, tag: str) -> None:
    """What is no plain name is refused."""
    with pytest.raises(ShoalError) as raised:
        await world.services.images.put(WHO, name, tag, RECIPE)
    assert raised.value.code is ErrorCode.INVALID_REQUEST


async def test_images_resources_are_the_default(world: World) -> None:
    """A session asks for what it says, else for what its image says."""
    await world.host()
    await world.add_image("small", memory_mib=128)
    body = SessionCreate(image="code:small", resources=ResourcesAsked(pids=99))
    created = await world.finish(world.services.sessions.create(WHO, body))
    assert created.session.resources.memory_mib == 128
    assert created.session.resources.pids == 99
    assert created.session.resources.cpu_millis == 1000


async def test_images_belong_to_their_tenant(world: World) -> None:
    """Another tenant has its own names."""
    other = replace(WHO, tenant="ten_other")  # type: ignore[arg-type]
    with pytest.raises(ShoalError) as raised:
        await world.services.images.get(other, "code", "1")
    assert raised.value.code is ErrorCode.IMAGE_NOT_FOUND


# -- pools --


async def test_a_prepare_warms_and_counts_what_is_claimed(world: World) -> None:
    """A prepare starts a host, orders warm ones, tells what it waits for, counts claimed ones, and ends."""
    body = Prepare(sandboxes=3, image=IMAGE)
    prepared = await world.services.pools.prepare(WHO, "default", body, idempotency_key="k")
    assert not prepared.done
    assert prepared.waiting_for == "hosts to come up"
    again = await world.services.pools.prepare(WHO, "default", body, idempotency_key="k")
    assert again.id == prepared.id
    with pytest.raises(ShoalError) as raised:
        await world.services.pools.prepare(
            WHO, "default", Prepare(sandboxes=4, image=IMAGE), idempotency_key="k"
        )
    assert raised.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    await world.tick()
    await world.tick()
    await world.run(1)
    (host,) = world.agents.hosts.values()
    assert [order.count for order in host.orders] == [3]
    done = await world.services.pools.prepared(WHO, "default", prepared.id)
    assert done.done
    assert done.ready == 3
    await world.run(1)
    await world.create()
    await world.run(1)
    await world.tick()
    await world.run(1)
    assert [order.count for order in host.orders] == [2]
    still = await world.services.pools.prepared(WHO, "default", prepared.id)
    assert still.ready == 3
    page = await world.services.pools.prepares(WHO, "default")
    assert [each.id for each in page.prepared] == [prepared.id]
    await world.services.pools.release(WHO, "default", prepared.id)
    await world.services.pools.release(WHO, "default", prepared.id)
    with pytest.raises(ShoalError):
        await world.services.pools.prepared(WHO, "default", prepared.id)
    await world.tick()
    await world.run(1)
    assert host.orders == []


async def test_a_prepare_ends_by_its_time(world: World) -> None:
    """After its time to live a prepare is gone, its record too."""
    await world.services.pools.prepare(WHO, "default", Prepare(sandboxes=1, image=IMAGE, ttl_s=10))
    await world.clock.advance(11)
    assert (await world.services.pools.prepares(WHO, "default")).prepared == []
    await world.services.reconciler.tick()
    assert (await world.store.query("PREPARE#default")).items == ()


async def test_a_pool_says_what_it_has_and_why_it_does_not_scale() -> None:
    """Hosts by state, busy, warm, pending, and the reason when nobody comes although somebody waits."""
    world = await World(settings=ProvisionerSettings(pools=(pool(max_hosts=1),))).open()
    for _ in range(9):
        await world.create(wait_s=0)
    await world.tick()
    await world.services.pump.drain()
    await world.run(1)
    await world.tick()
    told = await world.services.pools.get(WHO, "default")
    assert told.hosts == {"ready": 1}
    assert told.busy == 8
    assert told.pending == 1
    assert "limit of 1" in (told.not_scaling or "")
    counts = await world.services.counts()
    assert counts.queue == 1
    assert counts.sessions == {"running": 8, "pending": 1}
    assert counts.queue_age_s > 0
    with pytest.raises(ShoalError):
        await world.services.pools.get(WHO, "none")


async def test_recent_demand_keeps_warm_ones() -> None:
    """What was asked for lately is kept warm; placement then prefers the host that has it."""
    world = await World(settings=ProvisionerSettings(pools=(pool(warm_default=2, warm_max=4),))).open()
    await world.host()
    await world.create()
    await world.tick()
    await world.run(1)
    (host,) = world.agents.hosts.values()
    (order,) = host.orders
    assert order.count == 2
    assert order.key.disk_mib == 1024
    assert isinstance(host.heartbeat(world.clock.now()).warm[0], WarmReport)
    await world.clock.advance(1000)
    await world.beat()
    await world.tick()
    await world.run(1)
    assert host.orders == []


@pytest.mark.parametrize("again", ["moved", "gone"])
async def test_a_run_is_pinned_to_what_it_first_resolved(world: World, again: str) -> None:
    """An image that is taken away, or put anew with other content, stays what it was for a run that has used it: on
    every replica, one by one, in groups and in prepares. Another run gets what it is now."""
    await world.host()
    sessions, images = world.services.sessions, world.services.images
    first = await sessions.get(WHO, await world.create(run="r"))
    await images.delete(WHO, "code", "1")
    if again == "moved":
        await world.add_image("2")
        moved = ImagePut(source=ImageSource(image="code:2"), resources=ResourcesAsked(memory_mib=512))
        await world.finish(images.put(WHO, "code", "1", moved))
    other = world.replica("two")
    await other.signer.refresh()
    for replica in (world.services, other):
        body = SessionCreate(image=IMAGE, run="r", wait_s=0)
        one = (await replica.sessions.create(WHO, body)).session
        many = await replica.sessions.create_many(WHO, body.model_copy(update={"count": 2}))
        for session in (one, *(item.session for item in many.sessions)):
            assert session is not None
            assert (session.image_digest, session.resources) == (first.image_digest, first.resources)
        await replica.pools.prepare(WHO, "default", Prepare(sandboxes=1, image=IMAGE, run="r", wait_s=0))
    if again == "moved":
        now = (await sessions.create(WHO, SessionCreate(image=IMAGE, run="s", wait_s=0))).session
        assert now.image_digest != first.image_digest
    else:
        with pytest.raises(ShoalError) as raised:
            await sessions.create(WHO, SessionCreate(image=IMAGE, run="s", wait_s=0))
        assert raised.value.code is ErrorCode.IMAGE_NOT_FOUND
    await world.services.context.background.idle()
