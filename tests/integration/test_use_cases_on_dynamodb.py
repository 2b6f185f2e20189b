"""The use cases over DynamoDB: the same tests as over the fake store, in virtual time, against MiniStack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.dynamo import InlineDynamoStore
from tests.unit.provisioner import test_images_and_pools, test_sessions, test_shift
from tests.unit.provisioner.world import World

pytestmark = pytest.mark.slow

CASES = (test_sessions, test_images_and_pools, test_shift)
#: What waits for the store to clean: DynamoDB does that by itself, some time after.
OF_THE_FAKE = frozenset({"test_a_tombstone_stays_seven_days"})

for cases in CASES:
    globals().update(
        {
            name: case
            for name, case in vars(cases).items()
            if name.startswith("test_") and name not in OF_THE_FAKE
        }
    )


@pytest.fixture
def dynamo(ministack: str) -> Iterator[InlineDynamoStore]:
    store = InlineDynamoStore(ministack)
    yield store
    store.end()


@pytest.fixture
async def world(dynamo: InlineDynamoStore) -> World:
    return await World(store=dynamo).open()


async def test_these_do_run_on_dynamodb(world: World, dynamo: InlineDynamoStore) -> None:
    """A create reaches the table, and nothing is left in the fake's memory."""
    await world.host()
    id = await world.create()
    assert any(str(id) in key.pk for key in dynamo.dump())
    assert dynamo._items == {}
    assert dynamo.counters.write_units > 0
