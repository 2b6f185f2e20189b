"""The table, in one place: what `shoal admin table create` makes, and what Terraform makes alike (a test compares)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from provisioner.aws.clients import AwsClients
from provisioner.clock import Clock, SystemClock
from provisioner.store.dynamodb_errors import StoreRefused, sdk_errors, typed

PARTITION_KEY = "pk"
SORT_KEY = "sk"
TTL_ATTRIBUTE = "expires"
BILLING_MODE = "PAY_PER_REQUEST"
#: The reconciler is woken by keys alone.
STREAM_VIEW_TYPE = "KEYS_ONLY"
#: Until a table that is being made is given up, and between two looks at it, in seconds.
_ACTIVE_S = 300.0
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What is chosen of a table.

    Attributes:
        stream: Whether changes wake the reconciler (Lambda); not needed where it runs all the time.
        point_in_time_recovery: Whether the last 35 days can be restored; billed by size.
        deletion_protection: Whether deleting the table is refused until this is taken off.
        kms_key_id: A key of one's own that encrypts it; None uses DynamoDB's, at no cost.
        warm_writes, warm_reads: Request units per second that it takes from the start (a new on-demand table takes
            4,000 and 12,000, read 2026-11); None leaves it there. Billed once.
        tags: Cost allocation and the like.
    """

    stream: bool = True
    point_in_time_recovery: bool = False
    deletion_protection: bool = False
    kms_key_id: str | None = None
    warm_writes: int | None = None
    warm_reads: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TableMade:
    """What `create_table` left.

    Attributes:
        created: False when the table was there.
        stream_arn: Where its changes can be read; None without a stream.
    """

    name: str
    created: bool
    stream_arn: str | None


def create_request(name: str, options: TableOptions) -> dict[str, Any]:
    """The parameters of `CreateTable`. Pure."""
    request: dict[str, Any] = {
        "TableName": name,
        "AttributeDefinitions": [
            {"AttributeName": PARTITION_KEY, "AttributeType": "S"},
            {"AttributeName": SORT_KEY, "AttributeType": "S"},
        ],
        "KeySchema": [
            {"AttributeName": PARTITION_KEY, "KeyType": "HASH"},
            {"AttributeName": SORT_KEY, "KeyType": "RANGE"},
        ],
        "BillingMode": BILLING_MODE,
        "DeletionProtectionEnabled": options.deletion_protection,
    }
    if options.stream:
        request["StreamSpecification"] = {"StreamEnabled": True, "StreamViewType": STREAM_VIEW_TYPE}
    if options.kms_key_id is not None:
        request["SSESpecification"] = {
            "Enabled": True,
            "SSEType": "KMS",
            "KMSMasterKeyId": options.kms_key_id,
        }
    warm = {"WriteUnitsPerSecond": options.warm_writes, "ReadUnitsPerSecond": options.warm_reads}
    if any(warm.values()):
        request["WarmThroughput"] = {unit: value for unit, value in warm.items() if value is not None}
    if options.tags:
        request["Tags"] = [{"Key": key, "Value": value} for key, value in sorted(options.tags.items())]
    return request


def difference(description: Mapping[str, Any], options: TableOptions) -> list[str]:
    """What an existing table (of `DescribeTable`) has otherwise than asked, in words; empty when it will do. Pure."""
    found: list[str] = []
    keys = {each["KeyType"]: each["AttributeName"] for each in description.get("KeySchema", [])}
    if keys != {"HASH": PARTITION_KEY, "RANGE": SORT_KEY}:
        found.append(f"its key is {keys}, not {PARTITION_KEY} and {SORT_KEY}: it is another program's table")
    types = {
        each["AttributeName"]: each["AttributeType"] for each in description.get("AttributeDefinitions", [])
    }
    if not found and {types.get(PARTITION_KEY), types.get(SORT_KEY)} != {"S"}:
        found.append("its key is not text: it is another program's table")
    stream = description.get("StreamSpecification") or {}
    if options.stream and not stream.get("StreamEnabled"):
        found.append("it has no stream: the reconciler would only run on its schedule")
    return found


async def create_table(
    clients: AwsClients, name: str, options: TableOptions | None = None, *, clock: Clock | None = None
) -> TableMade:
    """Make the table, or complete the one that is there; return when it is active. Repeatable.

    Clean-up by `expires`, recovery and deletion protection are switched on where they are not; nothing is ever switched
    off, and no table is replaced.

    Raises:
        StoreRefused: No credentials, Region or permission; or the table that is there is another.
        StoreError: DynamoDB did not answer.
    """
    options = options or TableOptions()
    clock = clock or SystemClock()
    try:
        client = await clients.get("dynamodb")
        created = await _create(client, name, options)
        description = await _active(client, name, clock)
        other = difference(description, options)
        if other:
            raise StoreRefused(f"there is a table {name}, but {'; '.join(other)}")
        if options.deletion_protection and not description.get("DeletionProtectionEnabled"):
            await client.update_table(TableName=name, DeletionProtectionEnabled=True)
            await _active(client, name, clock)
        await _complete(client, name, options)
    except sdk_errors() as error:
        raise typed(error) from error
    return TableMade(name=name, created=created, stream_arn=description.get("LatestStreamArn"))


async def _create(client: Any, name: str, options: TableOptions) -> bool:
    try:
        await client.create_table(**create_request(name, options))
    except client.exceptions.ResourceInUseException:
        return False
    return True


async def _active(client: Any, name: str, clock: Clock) -> Mapping[str, Any]:
    deadline = clock.monotonic() + _ACTIVE_S
    while True:
        try:
            description: Mapping[str, Any] = (await client.describe_table(TableName=name))["Table"]
        except client.exceptions.ResourceNotFoundException:
            # Just made, and not yet known everywhere.
            description = {}
        if description.get("TableStatus") == "ACTIVE":
            return description
        if clock.monotonic() >= deadline:
            raise StoreRefused(
                f"the table {name} is {description.get('TableStatus')} after {_ACTIVE_S:.0f} s"
            )
        await clock.sleep(_LOOK_S)


async def _complete(client: Any, name: str, options: TableOptions) -> None:
    ttl = (await client.describe_time_to_live(TableName=name))["TimeToLiveDescription"]
    if ttl.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        await client.update_time_to_live(
            TableName=name, TimeToLiveSpecification={"Enabled": True, "AttributeName": TTL_ATTRIBUTE}
        )
    elif ttl.get("AttributeName") != TTL_ATTRIBUTE:
        raise StoreRefused(f"the table {name} cleans by {ttl.get('AttributeName')}, not by {TTL_ATTRIBUTE}")
    if options.point_in_time_recovery:
        await client.update_continuous_backups(
            TableName=name, PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True}
        )
