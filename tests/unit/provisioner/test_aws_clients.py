"""How clients of AWS are set up, as far as it shows without AWS: presigning asks nobody."""

from __future__ import annotations

import pytest

from provisioner.aws.clients import AwsClients

KEYS = {"aws_access_key_id": "AKIDEXAMPLE", "aws_secret_access_key": "example"}


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_USE_DUALSTACK_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


async def presigned(clients: AwsClients, bucket: str, method: str) -> str:
    client = await clients.get("s3")
    try:
        url = await client.generate_presigned_url(method, Params={"Bucket": bucket, "Key": "layers/x"})
    finally:
        await clients.close()
    return str(url)


@pytest.mark.parametrize("method", ["get_object", "put_object"])
@pytest.mark.parametrize("region", ["us-east-1", "eu-central-1", "ap-east-1"])
async def test_presigned_urls_name_the_host_of_the_buckets_region(region: str, method: str) -> None:
    """The global host would answer a new bucket's requests with a redirect to a host that was not signed."""
    url = await presigned(AwsClients(region=region, credentials=KEYS), "some-bucket", method)
    assert url.startswith(f"https://some-bucket.s3.{region}.amazonaws.com/layers/x?")
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in url
    assert f"%2F{region}%2Fs3%2Faws4_request" in url


async def test_elsewhere_a_bucket_is_part_of_the_path() -> None:
    """What stands in for S3 has one name, whatever the bucket's."""
    clients = AwsClients(region="eu-central-1", endpoint="http://127.0.0.1:4566", credentials=KEYS)
    url = await presigned(clients, "some-bucket", "get_object")
    assert url.startswith("http://127.0.0.1:4566/some-bucket/layers/x?")
