"""What is asked of DynamoDB to make the table, and what makes an existing one another."""

from __future__ import annotations

from typing import Any

import pytest

from provisioner.store.table import TableOptions, create_request, difference

MINE: dict[str, Any] = {
    "KeySchema": [{"AttributeName": "pk", "KeyType": "HASH"}, {"AttributeName": "sk", "KeyType": "RANGE"}],
    "AttributeDefinitions": [
        {"AttributeName": "pk", "AttributeType": "S"},
        {"AttributeName": "sk", "AttributeType": "S"},
    ],
    "StreamSpecification": {"StreamEnabled": True, "StreamViewType": "KEYS_ONLY"},
}


def test_every_option_is_asked_for() -> None:
    """Each option has its parameter; what is not chosen is not named."""
    plain = create_request("t", TableOptions(stream=False))
    assert set(plain) == {
        "TableName", "AttributeDefinitions", "KeySchema", "BillingMode", "DeletionProtectionEnabled",
    }  # fmt: skip
    assert "GlobalSecondaryIndexes" not in plain
    full = create_request(
        "t",
        TableOptions(deletion_protection=True, kms_key_id="k", warm_writes=9000, tags={"b": "2", "a": "1"}),
    )
    assert full["StreamSpecification"] == MINE["StreamSpecification"]
    assert full["DeletionProtectionEnabled"] is True
    assert full["SSESpecification"]["KMSMasterKeyId"] == "k"
    assert full["WarmThroughput"] == {"WriteUnitsPerSecond": 9000}
    assert full["Tags"] == [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"KeySchema": [{"AttributeName": "pk", "KeyType": "HASH"}]}, "another program's table"),
        ({"AttributeDefinitions": [{"AttributeName": "pk", "AttributeType": "N"}]}, "not text"),
        ({"StreamSpecification": None}, "no stream"),
    ],
)
def test_an_existing_table_is_looked_at(changes: dict[str, Any], said: str | None) -> None:
    """A table that will not do is told from one that will, in words."""
    found = difference({**MINE, **changes}, TableOptions())
    assert (said in " ".join(found)) if said else not found
