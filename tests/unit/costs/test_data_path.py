"""What the ways of an action cost: the sums are those of the prices, in the order that the page says."""

from __future__ import annotations

from decimal import Decimal

from costs.data_path import RATES, WAYS, capacity_units, ways
from costs.prices import prices


def test_a_day_at_a_thousand_a_second_is_what_the_page_reckons() -> None:
    """The same sums, written out by hand: 86.4 million actions."""
    function, link, balancer, direct = ways(prices(), 1000)
    assert function.parts["requests"] == Decimal("86.4")
    assert function.parts["calls"] == Decimal("17.28")
    assert function.parts["waiting"] == Decimal("86400000") * Decimal("1.01") * Decimal("0.0000133334")
    assert link.usd == Decimal("86.4") + 24 * Decimal("0.2016") / 4
    assert capacity_units(1000) == Decimal("21.6")
    assert balancer.parts["capacity units"] == Decimal("21.6") * 24 * Decimal("0.008")
    assert direct.usd == 0


def test_from_a_handful_of_actions_on_lambda_is_the_dearest_and_direct_is_free() -> None:
    """What the page advises holds at each rate that it shows."""
    for rate in RATES:
        costs = {way.name: way.usd for way in ways(prices(), rate)}
        assert max(costs, key=lambda name: costs[name]) == WAYS[0]
        assert costs[WAYS[3]] == 0
    assert ways(prices(), 20_000)[1].usd > 10 * ways(prices(), 20_000)[2].usd
