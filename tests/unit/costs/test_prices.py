"""The price table: complete, dated, exact, and never silent about what it does not know."""

from __future__ import annotations

import re
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from costs.prices import PriceError, UnknownInstance, UnknownPrice, prices, read_prices


def test_every_price_names_its_source_and_day() -> None:
    """Each has a page of AWS, the day it was read, and whether it was checked then."""
    table = prices()
    assert table.region == "us-east-1"
    assert table.currency == "USD"
    for price in table.prices.values():
        assert re.fullmatch(r"https://aws\.amazon\.com/[\w/-]+/", price.source), price.name
        assert date(2026, 1, 1) <= price.read
        assert re.fullmatch(r"[a-z0-9_]+\.[a-z0-9_]+", price.name)
        assert price.unit


def test_money_is_exact() -> None:
    """A million reads are exactly their price, and a third of a write is not rounded on the way."""
    assert prices()["dynamodb.read"].of(1_000_000) == Decimal("0.125")
    assert prices()["lambda.request"].of(5_000_000) == Decimal("1.00")
    assert prices()["s3.write"].of(Decimal("0.5")) == Decimal("0.0000025")


def test_negative_units_are_refused() -> None:
    """A cost is never a gain."""
    with pytest.raises(ValueError, match="-1 units"):
        prices()["s3.read"].of(-1)


def test_instances_are_priced_by_family_and_size() -> None:
    """Prices of a family go with the size; so do cores and memory."""
    host = prices().instance("m7i.4xlarge")
    assert host.on_demand_usd_h == Decimal("0.8064")
    assert (host.vcpus, host.memory_gib) == (16, 64)
    assert Decimal(0) < host.spot_usd_h < host.on_demand_usd_h
    assert prices().instance("c7g.large").on_demand_usd_h == Decimal("0.0725")


@pytest.mark.parametrize("type", ["x9.large", "m7i.huge", "m7i", "", "m7i.4xlarge.metal"])
def test_unknown_instances_are_refused(type: str) -> None:
    """There is no price of zero for what is not known."""
    with pytest.raises(UnknownInstance, match=re.escape(repr(type))):
        prices().instance(type)


def test_unknown_prices_are_refused() -> None:
    """By an error that is a LookupError, and says what is missing."""
    with pytest.raises(UnknownPrice, match=r"lambda\.gpu") as raised:
        prices()["lambda.gpu"]
    assert isinstance(raised.value, PriceError)
    assert isinstance(raised.value, LookupError)


BAD = {
    "a float": (
        'usd = 0.1\nper = 1\nunit = "x"\nsource = "y"\nread = 2026-11-30\nchecked = true',
        "usd is text",
    ),
    "no source": ('usd = "0.1"\nper = 1\nunit = "x"\nread = 2026-11-30\nchecked = true', "source missing"),
    "below zero": (
        'usd = "-0.1"\nper = 1\nunit = "x"\nsource = "y"\nread = 2026-11-30\nchecked = true',
        r"-0\.1 for 1",
    ),
    "for nothing": (
        'usd = "0.1"\nper = 0\nunit = "x"\nsource = "y"\nread = 2026-11-30\nchecked = true',
        r"0\.1 for 0",
    ),
}


@pytest.mark.parametrize("entry", BAD)
def test_entries_without_form_are_refused(tmp_path: Path, entry: str) -> None:
    """A table that could be misread is not read: the message names the entry."""
    text, message = BAD[entry]
    path = tmp_path / "prices.toml"
    path.write_text(
        f'region = "r"\ncurrency = "USD"\n[prices."a.b"]\n{text}\n[instances]\nfamilies = {{}}\nsizes = {{}}\n'
    )
    with pytest.raises(ValueError, match=rf"a\.b: {message}"):
        read_prices(path)
