"""What the ways to an action cost: the table of docs/data-path.md, from the price table and stated assumptions. Pure.

An action is one request that is held open until its command ends. Data to trainers outside AWS costs the same on every
way, and so do the hosts; neither is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from costs.prices import Prices

DAY_S = Decimal(86_400)
#: How long an action is held open, and its size on the wire in both directions.
ACTION_S = Decimal(1)
ACTION_BYTES = Decimal(6_000)
#: Memory of the API's function, and what of its time is not waiting for the agent.
FUNCTION_GB = Decimal(1)
OVERHEAD_S = Decimal("0.01")
#: CPU of a router per action, as measured on 2 cores under other load, and how much of a core is used.
ROUTER_CPU_S = Decimal("0.0005")
ROUTER_BUSY = Decimal("0.5")
#: The instance type whose cores routers take, on demand.
ROUTER_TYPE = "m7i.4xlarge"
#: One capacity unit of an ALB: active connections, and GB an hour.
#: https://aws.amazon.com/elasticloadbalancing/pricing/ (read 2026-11)
LCU_CONNECTIONS = Decimal(3_000)
LCU_GB_H = Decimal(1)
RATES = (1, 1_000, 20_000)
WAYS = ("HTTP API -> Lambda", "HTTP API -> VPC link -> router", "ALB -> router", "direct to the agent")


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a way costs at a rate, USD a day, by what it is paid for."""

    name: str
    parts: dict[str, Decimal]

    @property
    def usd(self) -> Decimal:
        """The sum."""
        return sum(self.parts.values(), Decimal(0))


def ways(prices: Prices, actions_per_s: int) -> list[Way]:
    """All four, at so many actions a second, day and night."""
    a_day = actions_per_s * DAY_S
    gateway = prices["http_api.request"].of(a_day)
    function = prices["lambda.request"].of(a_day)
    waiting = prices["lambda.arm64"].of(a_day * (ACTION_S + OVERHEAD_S) * FUNCTION_GB)
    routers = router_cores(actions_per_s) * core_usd_h(prices) * 24
    balancer = prices["alb.hour"].of(24)
    units = prices["alb.capacity_unit"].of(capacity_units(actions_per_s) * 24)
    return [
        Way(name=WAYS[0], parts={"requests": gateway, "calls": function, "waiting": waiting}),
        Way(name=WAYS[1], parts={"requests": gateway, "router": routers}),
        Way(name=WAYS[2], parts={"hours": balancer, "capacity units": units, "router": routers}),
        Way(name=WAYS[3], parts={}),
    ]


def router_cores(actions_per_s: int) -> Decimal:
    """Cores that routers need; they are taken from the pool's hosts, and none is running when there is none."""
    return actions_per_s * ROUTER_CPU_S / ROUTER_BUSY


def core_usd_h(prices: Prices) -> Decimal:
    """What a core costs for an hour."""
    instance = prices.instance(ROUTER_TYPE)
    return instance.on_demand_usd_h / instance.vcpus


def capacity_units(actions_per_s: int) -> Decimal:
    """An ALB's capacity units: of its dimensions the largest counts. Connections are kept, so new ones are few."""
    active = actions_per_s * ACTION_S / LCU_CONNECTIONS
    gb_h = actions_per_s * ACTION_BYTES * 3600 / Decimal(10**9) / LCU_GB_H
    return max(active, gb_h)


def table(prices: Prices) -> str:
    """The table in Markdown."""
    lines = [
        "| way | " + " | ".join(f"{rate:,} actions/s, USD a day" for rate in RATES) + " |",
        "|---|" + "---:|" * len(RATES),
    ]
    found = {rate: ways(prices, rate) for rate in RATES}
    for number, name in enumerate(WAYS):
        cells = [_cell(found[rate][number]) for rate in RATES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(way: Way) -> str:
    if not way.parts:
        return "0"
    parts = ", ".join(f"{name} {_usd(usd)}" for name, usd in way.parts.items())
    return f"**{_usd(way.usd)}** ({parts})"


def _usd(usd: Decimal) -> str:
    return f"{usd:,.2f}" if usd < 100 else f"{usd:,.0f}"
