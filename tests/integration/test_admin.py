"""`shoal admin` against a real API: from nothing to a key that the service knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from provisioner.auth import DEFAULT_TENANT, Auth
from provisioner.clock import SystemClock
from provisioner.store.dynamodb import DynamoStore
from provisioner.store.dynamodb_errors import StoreRefused
from provisioner.store.port import Key, Put
from provisioner.store.table import STREAM_VIEW_TYPE, TTL_ATTRIBUTE, TableOptions, create_table
from shoal.contract.states import Scope
from tests.emulators import ROOT, aws_clients, aws_environment, fresh_name


def admin(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it as an operator does, with these variables of AWS alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "SHOAL_"))}
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "admin"]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**kept, "AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


async def test_from_nothing_to_a_key(ministack: str) -> None:
    """Create, create again, bootstrap, bootstrap again, another key: each says what it did, and the keys work."""
    table = fresh_name()
    environment = {**aws_environment(ministack), "SHOAL_AWS_TABLE": table}
    made = admin("table", "create", "--recovery", "--tag", "team=rl", "--json", environment=environment)
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    assert told["created"] is True
    assert told["stream_arn"]
    again = admin("table", "create", environment=environment)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == table
    assert "there already" in again.stderr

    first = admin("bootstrap", environment=environment)
    assert first.returncode == 0, first.stderr
    secret = first.stdout.strip()
    assert secret.startswith("shl_")
    assert secret not in first.stderr
    second = admin("bootstrap", environment=environment)
    assert (second.returncode, second.stdout) == (0, "")
    assert "--another-key" in second.stderr
    third = admin("bootstrap", "--another-key", "--json", environment=environment)
    told = json.loads(third.stdout)
    assert told["created"] is False
    assert told["api_key"] != secret

    clients = aws_clients(ministack)
    try:
        async with DynamoStore(clients, table) as store:
            for each in (secret, told["api_key"]):
                who = await Auth(store, SystemClock()).authenticate(each)
                assert who.tenant == DEFAULT_TENANT
                assert who.may(Scope.ADMIN)
        client = await clients.get("dynamodb")
        backups = await client.describe_continuous_backups(TableName=table)
        recovery = backups["ContinuousBackupsDescription"]["PointInTimeRecoveryDescription"]
        assert recovery["PointInTimeRecoveryStatus"] == "ENABLED"
    finally:
        await clients.close()


async def test_the_table_is_what_its_definition_says(ministack: str) -> None:
    """Keys, billing, stream, clean-up and protection are there; asking for more adds it, never takes away."""
    clients = aws_clients(ministack)
    table = fresh_name()
    try:
        client = await clients.get("dynamodb")
        assert (await create_table(clients, table)).created
        about = (await client.describe_table(TableName=table))["Table"]
        assert about["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        assert about["StreamSpecification"] == {"StreamEnabled": True, "StreamViewType": STREAM_VIEW_TYPE}
        assert not about.get("GlobalSecondaryIndexes")
        ttl = (await client.describe_time_to_live(TableName=table))["TimeToLiveDescription"]
        assert ttl["AttributeName"] == TTL_ATTRIBUTE
        assert ttl["TimeToLiveStatus"] == "ENABLED"
        made = await create_table(clients, table, TableOptions(deletion_protection=True))
        assert not made.created
        await create_table(clients, table)
        about = (await client.describe_table(TableName=table))["Table"]
        assert about["DeletionProtectionEnabled"] is True
    finally:
        await clients.close()


async def test_another_programs_table_is_left_alone(ministack: str) -> None:
    """A table with other keys, and one without the stream that is asked for, are refused and not changed."""
    clients = aws_clients(ministack)
    try:
        client = await clients.get("dynamodb")
        table = fresh_name()
        await client.create_table(
            TableName=table,
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
        with pytest.raises(StoreRefused, match="another program"):
            await create_table(clients, table)
        silent = fresh_name()
        await create_table(clients, silent, TableOptions(stream=False))
        with pytest.raises(StoreRefused, match="no stream"):
            await create_table(clients, silent)
        assert not (await create_table(clients, silent, TableOptions(stream=False))).created
    finally:
        await clients.close()


@pytest.mark.parametrize("command", [("bootstrap",), ("table", "create")], ids=" ".join)
@pytest.mark.parametrize("missing", ["credentials", "region", "table"])
def test_what_is_missing_is_said_in_a_sentence(
    ministack: str, command: tuple[str, ...], missing: str
) -> None:
    """No credentials, no Region, no table: one sentence, no traceback, and 125."""
    environment = {**aws_environment(ministack), "SHOAL_AWS_TABLE": fresh_name()}
    match missing:
        case "credentials":
            del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
        case "region":
            del environment["AWS_REGION"], environment["AWS_DEFAULT_REGION"]
        case "table" if command != ("bootstrap",):
            del environment["SHOAL_AWS_TABLE"]
    done = admin(*command, environment=environment)
    assert done.returncode == 125, done.stderr
    assert "Traceback" not in done.stderr
    expected = {"credentials": "credentials", "region": "AWS_REGION", "table": "table"}[missing]
    assert expected in done.stderr


async def test_a_missing_table_is_no_outage(ministack: str) -> None:
    """The adapter says that the table is not there, and what makes it; it does not look like a store that is away."""
    clients = aws_clients(ministack)
    try:
        async with DynamoStore(clients, fresh_name()) as store:
            with pytest.raises(StoreRefused, match="shoal admin table create"):
                await store.get(Key(pk="a", sk="b"))
            with pytest.raises(StoreRefused, match="no such table"):
                await store.transact([Put(key=Key(pk="a", sk="b"), item={})])
    finally:
        await clients.close()
