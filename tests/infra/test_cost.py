"""What the examples cost while nobody runs anything, from what they plan and the price table."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from costs.at_rest import FREE, Rest, at_rest, table, total
from costs.prices import prices
from scripts.infra_check import Resource
from tests.infra.conftest import States

PAGE = Path(__file__).resolve().parents[2] / "docs/infra.md"
#: Billed by the hour while they exist; `minimal` promises to have none.
HOURLY = {"aws_nat_gateway", "aws_lb", "aws_eip", "aws_instance", "aws_vpc_endpoint_service"}


def test_minimal_costs_less_than_a_dollar_a_month(minimal: list[Resource]) -> None:
    """Everything that it makes is priced or known to be free, and the sum stays under 1 USD."""
    lines = at_rest(minimal, prices())
    assert total(lines) < Decimal(1)
    assert total(lines) > Decimal("0.3"), "something is not counted any more"


def test_minimal_has_nothing_that_is_billed_by_the_hour(minimal: list[Resource]) -> None:
    """No NAT gateway, load balancer, address, instance or interface endpoint, and no key of its own."""
    assert {resource.type for resource in minimal} & (HOURLY | {"aws_kms_key"}) == set()
    kinds = {
        resource.values["vpc_endpoint_type"] for resource in minimal if resource.type == "aws_vpc_endpoint"
    }
    assert kinds == {"Gateway"}


def test_minimal_stays_below_a_dollar_with_a_slow_reconciler(minimal: list[Resource]) -> None:
    """A look that takes half as long again and reads half as much again does not break the promise."""
    slow = Rest(look_s=Rest().look_s * 3 / 2, look_reads=Rest().look_reads * 3 // 2)
    assert total(at_rest(minimal, prices(), slow)) < Decimal("1.10")


def test_production_has_a_price_for_everything(states: States) -> None:
    """Whatever the data plane; the load balancer is the difference."""
    known = states("production")
    routers = total(at_rest(known["whole"], prices()))
    balanced = total(at_rest(known["load_balancer"], prices()))
    assert routers < Decimal(15)
    assert balanced - routers > prices()["alb.hour"].of(730) - 1


def test_hosts_cost_nothing_at_rest(production: list[Resource]) -> None:
    """No pool keeps a host, a core or a stopped disk."""
    spent = {line.address for line in at_rest(production, prices())}
    assert not [address for address in spent if "autoscaling" in address or "batch" in address]


def test_the_page_has_the_table(minimal: list[Resource]) -> None:
    """docs/infra.md shows the lines that are computed here; the failure says what to put there."""
    wanted = table(at_rest(minimal, prices()))
    assert wanted in PAGE.read_text(), f"docs/infra.md should have:\n{wanted}"


def test_no_type_is_free_twice(production: list[Resource], minimal: list[Resource]) -> None:
    """What is listed as free is used by an example, so that the list does not grow by itself."""
    used = {resource.type for resource in [*production, *minimal]}
    rare = {
        # With a load balancer, Session Manager or AWS Batch alone.
        "aws_lb_listener", "aws_lb_listener_rule", "aws_lb_target_group", "aws_lb_target_group_attachment",
        "aws_iam_role_policy_attachment",
        # With Object Lock alone.
        "aws_s3_bucket_versioning",
    }  # fmt: skip
    assert set(FREE) - used <= rare
