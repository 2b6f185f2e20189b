"""What AWS charges: `prices.toml` as frozen records. Money is Decimal, never a float.

PriceError (a LookupError)
├── UnknownPrice     there is no price of that name
└── UnknownInstance  the table has no such instance type
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

#: The table of this release.
TABLE = Path(__file__).with_name("prices.toml")
#: Hours of a month, as AWS reckons monthly prices of what is billed by the hour.
HOURS_A_MONTH = Decimal(730)


class PriceError(LookupError):
    """What was asked for has no price here: nothing may be called free for that."""


class UnknownPrice(PriceError):
    """There is no price of that name."""


class UnknownInstance(PriceError):
    """The table has no such instance type."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """One price.

    Attributes:
        name: `service.what`.
        usd: For `per` units.
        unit: What is counted, in the singular.
        source: The page that states it.
        read: When that was last looked at.
        checked: Whether the page, or a dated copy, was at hand then; False: compare before you rely on it.
    """

    name: str
    usd: Decimal
    per: Decimal
    unit: str
    source: str
    read: date
    checked: bool

    def of(self, units: Decimal | int) -> Decimal:
        """What so many units cost, USD, not rounded. Raises ValueError below zero."""
        if units < 0:
            raise ValueError(f"{self.name}: {units} units")
        return self.usd * units / self.per


@dataclass(frozen=True, kw_only=True)
class InstancePrice:
    """An instance type: what an hour costs, USD, and what it has.

    Attributes:
        spot_usd_h: What Spot has typically been; to plan with, not a quote.
    """

    type: str
    on_demand_usd_h: Decimal
    spot_usd_h: Decimal
    vcpus: int
    memory_gib: int


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A price table."""

    region: str
    currency: str
    prices: Mapping[str, Price]
    families: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, Decimal]

    def __getitem__(self, name: str) -> Price:
        """The price of that name.

        Raises:
            UnknownPrice: There is none.
        """
        try:
            return self.prices[name]
        except KeyError:
            raise UnknownPrice(f"no price {name!r} in {TABLE.name}") from None

    def instance(self, type: str) -> InstancePrice:
        """The price of an instance type such as `m7i.4xlarge`.

        Raises:
            UnknownInstance: Its family or size is not in the table.
        """
        family, _, size = type.partition(".")
        about, factor = self.families.get(family), self.sizes.get(size)
        if about is None or factor is None:
            raise UnknownInstance(f"no price of instance type {type!r} in {TABLE.name}")
        hour = Decimal(about["xlarge_usd"]) * factor
        return InstancePrice(
            type=type,
            on_demand_usd_h=hour,
            spot_usd_h=hour * Decimal(about["spot_share"]),
            vcpus=int(about["vcpus"] * factor),
            memory_gib=int(about["memory_gib"] * factor),
        )


def read_prices(path: Path = TABLE) -> Prices:
    """A price table.

    Raises:
        ValueError: It does not have the form; the message names the entry.
    """
    with path.open("rb") as file:
        told = tomllib.load(file)
    return Prices(
        region=told["region"],
        currency=told["currency"],
        prices={name: _price(name, entry) for name, entry in told["prices"].items()},
        families=told["instances"]["families"],
        sizes={size: Decimal(factor) for size, factor in told["instances"]["sizes"].items()},
    )


@cache
def prices() -> Prices:
    """The table of this release, read once."""
    return read_prices()


def _price(name: str, entry: Mapping[str, Any]) -> Price:
    if not isinstance(entry.get("usd"), str):
        raise ValueError(f"{name}: usd is text, so that no digit is lost")
    missing = {"per", "unit", "source", "read", "checked"} - set(entry)
    if missing:
        raise ValueError(f"{name}: {', '.join(sorted(missing))} missing")
    price = Price(
        name=name,
        usd=Decimal(entry["usd"]),
        per=Decimal(entry["per"]),
        unit=entry["unit"],
        source=entry["source"],
        read=entry["read"],
        checked=entry["checked"],
    )
    if price.usd < 0 or price.per <= 0:
        raise ValueError(f"{name}: {price.usd} for {price.per}")
    return price
