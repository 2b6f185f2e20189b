"""The cost at rest: nothing is free by being forgotten, and what is assumed of the reconciler is what it does."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from costs.at_rest import FREE, Resource, Rest, UnpricedResource, at_rest, table, total
from costs.prices import HOURS_A_MONTH, UnknownInstance, prices
from provisioner.store.fake import FakeStore
from provisioner.store.units import Consumed, MeteredStore
from tests.unit.provisioner.test_shift import reconciler, work
from tests.unit.provisioner.world import World


def resource(type: str, **values: Any) -> Resource:
    return Resource(address=f"{type}.this", type=type, values=values)


def test_an_unknown_type_is_refused() -> None:
    """A type that is neither priced nor listed as free has no price of zero: it raises, and says which."""
    with pytest.raises(UnpricedResource, match=r"aws_eks_cluster\.this"):
        at_rest([resource("aws_eks_cluster")], prices())


def test_free_types_have_reasons() -> None:
    """Why something costs nothing is said."""
    assert all(len(reason) > 8 for reason in FREE.values())


def test_hourly_things_cost_their_month() -> None:
    """A NAT gateway, a load balancer with its addresses, an interface endpoint in two zones."""
    lines = at_rest(
        [
            resource("aws_nat_gateway"),
            resource("aws_lb", subnets=["a", "b", "c"]),
            resource("aws_vpc_endpoint", vpc_endpoint_type="Interface", subnet_ids=["a", "b"]),
            resource("aws_vpc_endpoint", vpc_endpoint_type="Gateway"),
        ],
        prices(),
    )
    assert [line.usd for line in lines] == [
        Decimal("0.045") * HOURS_A_MONTH,
        Decimal("0.0225") * HOURS_A_MONTH,
        Decimal("0.005") * 3 * HOURS_A_MONTH,
        Decimal("0.01") * 2 * HOURS_A_MONTH,
    ]


def pool_of(min_hosts: int, type: str = "m7i.xlarge", **group: Any) -> list[Resource]:
    """A group, its launch template, and the function that is told how many hosts stay."""
    told = f'[{{"name": "default", "min_hosts": {min_hosts}, "max_hosts": 4}}]'
    policy = {"launch_template": [{"override": [{"instance_type": type}]}]}
    return [
        resource("aws_lambda_function", environment=[{"variables": {"SHOAL_PROVISIONER_POOLS": told}}]),
        resource(
            "aws_launch_template",
            tags={"shoal:pool": "default"},
            block_device_mappings=[{"ebs": [{"volume_size": 30}]}, {"ebs": [{"volume_size": 100}]}],
        ),
        resource(
            "aws_autoscaling_group",
            min_size=0,
            tag=[{"key": "shoal:pool", "value": "default"}],
            mixed_instances_policy=[policy],
            **group,
        ),
    ]


def test_a_pool_that_goes_to_zero_costs_nothing() -> None:
    """No host stays, no disk."""
    assert at_rest(pool_of(0), prices()) == []


def test_hosts_that_stay_are_paid_for() -> None:
    """Two hosts on demand, their addresses and their disks, all month."""
    lines = at_rest(pool_of(2), prices())
    assert [line.usd for line in lines] == [
        2 * HOURS_A_MONTH * Decimal("0.2016"),
        2 * HOURS_A_MONTH * Decimal("0.005"),
        2 * 130 * Decimal("0.08"),
    ]


def test_hosts_of_an_unknown_type_are_refused() -> None:
    """A host whose price is not in the table is not free."""
    with pytest.raises(UnknownInstance):
        at_rest(pool_of(1, "z9.large"), prices())


def test_stopped_instances_keep_their_disks() -> None:
    """A warm pool's disks are paid for, its stopped instances not."""
    (line,) = at_rest(pool_of(0, warm_pool=[{"min_size": 3}]), prices())
    assert line.usd == 3 * 130 * Decimal("0.08")


def test_cores_that_batch_keeps_are_refused() -> None:
    """A compute environment that does not go down to zero has a price that is not known here."""
    with pytest.raises(UnpricedResource, match="16 cores"):
        at_rest([resource("aws_batch_compute_environment", compute_resources=[{"min_vcpus": 16}])], prices())


def test_a_schedule_makes_the_reconciler_look() -> None:
    """Every minute, with its memory and its processor's price; every five minutes, a fifth."""
    function = resource(
        "aws_lambda_function",
        handler="provisioner.handlers.reconcile",
        memory_size=512,
        architectures=["arm64"],
    )
    often, seldom = (
        at_rest([function, resource("aws_cloudwatch_event_rule", schedule_expression=rate)], prices())
        for rate in ("rate(1 minute)", "rate(5 minutes)")
    )
    by_what = {line.what: line for line in often}
    assert by_what["reconciler: looks"].units == 43_800
    assert by_what["reconciler: time"].usd == 43_800 * Rest().look_s / 2 * Decimal("0.0000133334")
    kept = by_what["logs kept"].usd
    assert abs((total(often) - kept) - 5 * (total(seldom) - kept)) < Decimal("1e-9")


def test_the_table_adds_up() -> None:
    """Alike lines are one row, and the last row is the sum of what was not rounded."""
    alarms = [resource("aws_cloudwatch_metric_alarm")] * 3
    text = table(at_rest(alarms, prices()))
    assert "| alarm | 3 | `cloudwatch.alarm` | 0.300 |" in text
    assert text.endswith("| **together** | | | **0.30** |")


async def test_a_quiet_look_takes_no_more_than_is_assumed() -> None:
    """Request units of a shift with nothing to do, counted at the store, chores included."""
    store = MeteredStore(FakeStore())
    world = await World(store=store).open()
    one = reconciler(world, "one")
    await work(world, one, marked=False)
    store.consumed = Consumed()
    looks = 30
    for _ in range(looks):
        await world.run(60, beats=False)
        await work(world, one, marked=False)
    assert store.consumed.read / looks <= Rest().look_reads
    assert store.consumed.write / looks <= Rest().look_writes
    # And not by far, or the assumption says nothing.
    assert store.consumed.read / looks > Rest().look_reads / 2, store.consumed
