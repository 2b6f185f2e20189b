"""The emulators answer, and end with the block that started them."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from tests.emulators import aws_clients, emulator, fresh_name, is_installed


async def test_ministack_keeps_objects_and_items(ministack: str) -> None:
    """MiniStack serves S3 and DynamoDB to the clients that adapters get."""
    clients = aws_clients(ministack)
    try:
        s3 = await clients.get("s3")
        bucket = fresh_name("b")
        await s3.create_bucket(Bucket=bucket)
        await s3.put_object(Bucket=bucket, Key="k", Body=b"x")
        answer = await s3.get_object(Bucket=bucket, Key="k")
        async with answer["Body"] as body:
            assert await body.read() == b"x"
        dynamodb = await clients.get("dynamodb")
        assert "TableNames" in await dynamodb.list_tables()
    finally:
        await clients.close()


async def test_moto_has_auto_scaling_groups(moto: str) -> None:
    """moto serves Auto Scaling."""
    clients = aws_clients(moto)
    try:
        autoscaling = await clients.get("autoscaling")
        assert (await autoscaling.describe_auto_scaling_groups())["AutoScalingGroups"] == []
    finally:
        await clients.close()


def test_an_emulator_ends_with_its_block() -> None:
    """Nothing listens after the block."""
    if not is_installed("moto"):
        pytest.skip("moto is not installed: run scripts/emulators")
    with emulator("moto") as url:
        pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
