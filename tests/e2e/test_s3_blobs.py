"""The service with its blobs in S3 (MiniStack): real hosts that reach them by signed URLs alone, a real entrance with a
limit, and what becomes of images, snapshots, journals and large files on that way."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx
import pytest

from shoal.client import Shoal
from shoal.contract.images import ImageManifest
from tests.e2e.conftest import Server, a_server, register
from tests.emulators import CREDENTIALS, REGION, aws_environment, fresh_name

pytestmark = pytest.mark.root

PROGRAM = str(Path(__file__).with_name("up_on_s3.py"))
LIMIT = 1_000_000


@pytest.fixture(scope="module")
def bucket(ministack: str) -> str:
    name = fresh_name("blobs")
    boto3.client("s3", endpoint_url=ministack, region_name=REGION, **CREDENTIALS).create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="module")
def on_s3(ministack: str, bucket: str) -> Iterator[Server]:
    """The service, with `minimal:1` built and stored in the bucket."""
    environment = {
        **aws_environment(ministack),
        "SHOAL_TEST_BUCKET": bucket,
        "SHOAL_API_ANSWER_LIMIT_BYTES": str(LIMIT),
    }
    with a_server(program=(PROGRAM,), **environment) as started:
        register(started, "minimal")
        yield started


@pytest.fixture
def shoal(on_s3: Server) -> Iterator[Shoal]:
    with on_s3.shoal() as opened:
        yield opened


def keys(ministack: str, bucket: str, prefix: str) -> list[str]:
    s3 = boto3.client("s3", endpoint_url=ministack, region_name=REGION, **CREDENTIALS)
    return [found["Key"] for found in s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])]


def test_a_session_lives_and_is_kept_by_signed_urls(ministack: str, bucket: str, shoal: Shoal) -> None:
    """Layers come from the bucket; a snapshot's layer and manifest and the journal go there; another session starts
    from the snapshot, and an ended one still tells its steps."""
    with shoal.session("minimal:1") as box:
        box.exec("mkdir -p /w && echo kept > /w/file").check()
        snapshot = box.snapshot()
        id = box.id
    with shoal.session(snapshot=snapshot) as box:
        assert box.exec("cat /w/file").stdout == "kept\n"
    assert [record.seq for record in shoal.session(id=id, wait=False).trajectory()] == [1]
    assert len(keys(ministack, bucket, "layers/")) >= 2
    assert any(snapshot.id in key for key in keys(ministack, bucket, "snapshots/"))
    assert any(id in key for key in keys(ministack, bucket, "journals/"))


def test_large_files_go_straight_to_the_bucket_and_back(
    ministack: str, bucket: str, on_s3: Server, shoal: Shoal, tmp_path: Path
) -> None:
    """By URLs of the bucket, which the key is not sent to; files, and directories as tars."""
    data = os.urandom(20_000_000)
    source = tmp_path / "in"
    source.mkdir()
    (source / "blob").write_bytes(os.urandom(3_000_000))
    (source / "link").symlink_to("blob")
    with shoal.session("minimal:1") as box:
        box.upload(data, "/file")
        assert box.exec("sha256sum /file").stdout.split()[0] == hashlib.sha256(data).hexdigest()
        assert box.read_bytes("/file") == data
        box.upload(source, "/job")
        box.download("/job", tmp_path / "out")
        assert (tmp_path / "out" / "link").read_bytes() == (source / "blob").read_bytes()
        with on_s3.client(follow_redirects=False) as http:
            files = f"/v1/sessions/{box.id}/files"
            location = http.get(files, params={"path": "/file"}).headers["location"]
            while not location.startswith("http"):
                location = http.get(f"/v1/sessions/{box.id}/{location}").headers["location"]
        assert location.startswith(f"{ministack}/{bucket}/transfers/")
        assert httpx.get(location).content == data
        assert httpx.get(location[:-4]).status_code == 403
    assert keys(ministack, bucket, "transfers/")


def test_an_image_is_pushed_to_the_bucket(ministack: str, bucket: str, shoal: Shoal, tmp_path: Path) -> None:
    """Layers by URLs that take these bytes alone; registered by the sum that S3 keeps, and started."""
    base = shoal.images.get("minimal:1")
    (layer,) = base.layers
    s3 = boto3.client("s3", endpoint_url=ministack, region_name=REGION, **CREDENTIALS)
    (key,) = [key for key in keys(ministack, bucket, "layers/") if layer.digest[7:] in key]
    s3.download_file(bucket, key, str(tmp_path / f"{layer.digest[7:]}.tar.zst"))
    manifest = ImageManifest(architecture="amd64", layers=[layer], config=base.config)
    (tmp_path / "image.json").write_text(manifest.model_dump_json())
    s3.delete_object(Bucket=bucket, Key=key)
    assert shoal.images.push("pushed:1", tmp_path).digest == base.digest == manifest.digest
    found = s3.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    assert base64.b64decode(found["ChecksumSHA256"]).hex() == layer.digest[7:]
    with shoal.session("pushed:1") as box:
        assert box.exec("echo started").check().stdout == "started\n"
