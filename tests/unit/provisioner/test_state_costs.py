"""What the layout of the state promises: no hot partition, even shards, and the costs that docs/dynamodb.md tells."""

from __future__ import annotations

import re

import pytest

from provisioner import keys
from tests.unit.provisioner import state_costs as costs


async def test_no_partition_is_hot_at_full_load() -> None:
    """At 5,000 creates and ends a second of one tenant, run and pool no partition gets more than it takes."""
    found = await costs.measure()
    heats = costs.heats(found)
    assert {heat.family for heat in heats} == set(costs.SPREADS)
    for heat in heats:
        assert heat.worst < costs.WRITE_LIMIT, heat
    # The page tells what was measured, so the same run serves.
    page = costs.PAGE.read_text()
    assert costs.generated(page) == costs.tables(found), "python -m tests.unit.provisioner.state_costs"
    assert found.action_writes == 0
    families = set(found.session_writes) | set(found.session_reads) | set(found.snapshot_writes)
    for family in families | set(found.usage_writes) | set(found.group_writes):
        assert re.search(rf"`{family}\b", page), f"{family} is not on the page"


@pytest.mark.parametrize("kind", ["ses", "snp", "grp", "hst"])
@pytest.mark.parametrize("shards", [2, 16, 32, 256])
def test_ids_are_spread_evenly(kind: str, shards: int) -> None:
    """Of many ids every shard gets nearly its share, whatever number of shards there is."""
    count = 1_000 * shards
    assert costs.fullest(kind, count, shards) < 1.15 * 1_000


def test_a_shards_partition_is_no_other_familys() -> None:
    """Names of runs and pools with `#` in them do not lead into another's partition."""
    tricky = ["a", "a#00", "a#0", "a#00#00", "#", ""]
    found = [pk for run in tricky for pk in keys.partitions(keys.run_list("ten_x", run), 32)]  # type: ignore[arg-type]
    found += [pk for run in tricky for pk in keys.partitions(f"NAME#ten_x#{run}", keys.NAME_SHARDS)]
    assert len(set(found)) == len(found)
