"""Files beside the entrance: whose they are, what they may be used for, how long; and links to single objects."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from provisioner.auth import Principal
from provisioner.blob_links import BlobLinks
from provisioner.blobs import names
from provisioner.blobs.local import LocalBlobs
from shoal.contract.base import SessionId, TenantId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.images import ImageManifest, ImagePut, Layer, LayerAsked, LayersAsked, LayersSource
from shoal.contract.states import ImageState
from shoal.contract.transfers import TRANSFER_LIFE_S, TransferCreate
from shoal.contract.urls import TransferGet, TransferPut, Url, UrlAsked, UrlsAsked
from tests.unit.provisioner.world import WHO, World

STRANGER: Principal = dataclasses.replace(WHO, tenant=TenantId("ten_other"))
ASKED = TransferCreate(size_bytes=5, sha256="1" * 64)


@pytest.fixture
async def world() -> World:
    return await World().open()


async def ask(world: World, session: SessionId, item: UrlAsked) -> Url:
    """What the session's host is answered."""
    host = (await world.services.sessions.get(WHO, session)).host
    assert host is not None
    return (await world.services.hosts.urls(world.agents.hosts[host].id, UrlsAsked(items=[item]))).urls[0]  # type: ignore[index]


async def code(call: object) -> ErrorCode:
    with pytest.raises(ShoalError) as raised:
        await call  # type: ignore[misc]
    return raised.value.code


async def test_an_announced_file_is_used_once_for_one_thing(world: World) -> None:
    """The host gets its URL with what was announced; the same use again too; another use, session, or direction not."""
    await world.host()
    one, two = await world.create(), await world.create()
    made = await world.services.transfers.announce(WHO, ASKED)
    assert names.transfer(made.id) in made.put.url
    get = TransferGet(transfer=made.id, session=one, use="path a")
    for _ in range(2):
        url = await ask(world, one, get)
        assert names.transfer(made.id) in url.url
        assert (url.size_bytes, url.sha256) == (5, "1" * 64)
    other = get.model_copy(update={"use": "path b"})
    assert await code(ask(world, one, other)) is ErrorCode.CONFLICT
    elsewhere = get.model_copy(update={"session": two})
    assert await code(ask(world, two, elsewhere)) is ErrorCode.CONFLICT
    out = TransferPut(transfer=made.id, session=one, size_bytes=5, sha256="1" * 64)
    assert await code(ask(world, one, out)) is ErrorCode.NOT_FOUND


async def test_of_another_tenant_or_host_there_is_nothing(world: World) -> None:
    """A transfer of another tenant, of none, and of a session that is not on the host: all the same answer."""
    host = await world.host()
    one = await world.create()
    foreign = await world.services.transfers.announce(STRANGER, ASKED)
    get = TransferGet(transfer=foreign.id, session=one, use="x")
    assert await code(ask(world, one, get)) is ErrorCode.NOT_FOUND
    for id in ("trf_none", "snp_1", "trf_" + "x" * 500):
        assert await code(ask(world, one, get.model_copy(update={"transfer": id}))) is ErrorCode.NOT_FOUND
    mine = await world.services.transfers.announce(WHO, ASKED)
    strange = TransferGet(transfer=mine.id, session=SessionId("ses_none"), use="x")
    call = world.services.hosts.urls(host.id, UrlsAsked(items=[strange]))
    assert await code(call) is ErrorCode.NOT_FOUND


async def test_a_file_out_is_its_sessions(world: World) -> None:
    """Only its session's host fills it, and only its tenant is led to it, for that session."""
    await world.host()
    one, two = await world.create(), await world.create()
    id = await world.services.transfers.send_out(WHO, one)
    put = TransferPut(transfer=id, session=one, size_bytes=5, sha256="1" * 64)
    assert names.transfer(id) in (await ask(world, one, put)).url
    assert await code(ask(world, two, put.model_copy(update={"session": two}))) is ErrorCode.NOT_FOUND
    transfers = world.services.transfers
    await transfers.check_out(WHO, one, id)
    assert await code(transfers.check_out(WHO, two, id)) is ErrorCode.NOT_FOUND
    assert await code(transfers.check_out(STRANGER, one, id)) is ErrorCode.NOT_FOUND
    assert await code(ask(world, one, TransferGet(transfer=id, session=one, use="x"))) is ErrorCode.NOT_FOUND


async def test_they_end_and_are_swept(world: World) -> None:
    """After an hour a transfer is not there any more, and its file goes; those that are under way stay."""
    await world.host()
    one = await world.create()
    old = await world.services.transfers.announce(WHO, ASKED)
    world.blobs.objects[names.transfer(old.id)] = b"12345"
    await world.clock.advance(TRANSFER_LIFE_S)
    young = await world.services.transfers.announce(WHO, ASKED)
    world.blobs.objects[names.transfer(young.id)] = b"12345"
    get = TransferGet(transfer=old.id, session=one, use="x")
    call = world.services.transfers.bind(WHO.tenant, one, get.transfer, get.use)
    assert await code(call) is ErrorCode.NOT_FOUND
    for _ in range(400):  # each looks at a sixteenth
        await world.services.transfers.sweep()
        world.clock.tick(600)
        if names.transfer(old.id) not in world.blobs.objects:
            break
        young = await world.services.transfers.announce(WHO, ASKED)
        world.blobs.objects[names.transfer(young.id)] = b"12345"
    assert names.transfer(old.id) not in world.blobs.objects
    assert names.transfer(young.id) in world.blobs.objects


async def test_layers_that_are_there_are_not_asked_for(world: World) -> None:
    """By digest and size; one of another size is sent again."""
    digest, data = next((name, data) for name, data in world.blobs.objects.items() if "layers/" in name)
    there = LayerAsked(digest="sha256:" + digest.split("/")[-1].split(".")[0], size_bytes=len(data))
    wrong = there.model_copy(update={"size_bytes": len(data) + 1})
    absent = LayerAsked(digest="sha256:" + "5" * 64, size_bytes=9)
    told = (await world.services.images.layers(WHO, LayersAsked(layers=[there, wrong, absent]))).layers
    assert [upload.exists for upload in told] == [True, False, False]
    assert told[0].put is None
    assert told[2].put is not None
    assert names.layer(absent.digest) in told[2].put.url
    huge = absent.model_copy(update={"size_bytes": 6 << 30})
    call = world.services.images.layers(WHO, LayersAsked(layers=[huge]))
    assert await code(call) is ErrorCode.PAYLOAD_TOO_LARGE


async def test_links_where_blobs_are_a_directory(world: World, tmp_path: Path) -> None:
    """They lead to this service, are for one method and object, end, cannot be made by others, and any replica takes
    them; agents do not take them for route tokens."""
    blobs = LocalBlobs(tmp_path)
    links = BlobLinks(blobs, world.services.signer, world.clock)
    link = await links.link("put", "a/b", expires_s=60, sha256="2" * 64, size_bytes=3)
    token = link.url.removeprefix("/v1/blobs/")
    assert "/" not in token
    claims = links.check(token, "put")
    assert (claims.name, claims.sha256, claims.size_bytes) == ("a/b", "2" * 64, 3)
    other = world.replica("two")
    await other.signer.refresh()
    assert BlobLinks(blobs, other.signer, world.clock).check(token, "put") == claims
    host = await world.host()
    head, body, signature = token.split(".")
    route = world.services.signer.control(host.id, host.address)
    for wrong in (f"{head}.{body[:-2]}AA.{signature}", f"{head}.{body}.", "x", route):
        with pytest.raises(ShoalError) as raised:
            links.check(wrong, "put")
        assert raised.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(ShoalError):
        links.check(token, "get")
    world.clock.tick(61)
    with pytest.raises(ShoalError):
        links.check(token, "put")


async def test_a_service_without_a_builder_takes_pushed_layers(world: World) -> None:
    """As on AWS: layers that are in the blob store make an image; whoever built it, and where, says the same digest."""
    services = world.replica("two", builder=None)
    data = b"pushed"
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    layer = Layer(digest=digest, diff_id=digest, size_bytes=len(data))
    manifest = ImageManifest(architecture="amd64", layers=[layer], provenance={"built": "here"})
    body = ImagePut(source=LayersSource(manifest=manifest))
    missing = await world.finish(services.images.put(WHO, "pushed", "1", body))
    assert missing.state is ImageState.FAILED
    world.blobs.objects[names.layer(digest)] = data
    image = await world.finish(services.images.put(WHO, "pushed", "1", body))
    assert (image.state, image.digest) == (ImageState.AVAILABLE, manifest.digest)
    assert image.provenance == {"built": "here"}
    elsewhere = manifest.model_copy(update={"provenance": {"built": "there"}})
    again = ImagePut(source=LayersSource(manifest=elsewhere))
    assert (await world.finish(services.images.put(WHO, "pushed", "1", again))).digest == image.digest
    other = manifest.model_copy(update={"architecture": "arm64"})
    call = services.images.put(WHO, "pushed", "1", ImagePut(source=LayersSource(manifest=other)))
    assert await code(call) is ErrorCode.CONFLICT
