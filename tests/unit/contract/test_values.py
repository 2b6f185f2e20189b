"""What no value on the wire can do, whatever field it stands in."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest
from pydantic import ValidationError

import shoal.contract
from api.bodies import Body
from shoal.contract.base import MAX_WAIT_S, Wire, whole_number

LONE = "\ud800"

for _module in pkgutil.iter_modules(shoal.contract.__path__):
    importlib.import_module(f"shoal.contract.{_module.name}")


def _models(base: type[Wire] = Wire) -> list[type[Wire]]:
    return [each for below in base.__subclasses__() for each in (below, *_models(below))]


#: What callers send; hosts and the control plane talk to each other in `shoal.contract.host`.
CALLERS = [model for model in _models() if model.__module__ != "shoal.contract.host"]


@pytest.mark.parametrize("model", CALLERS, ids=lambda model: model.__name__)
def test_no_field_takes_half_of_a_surrogate_pair(model: type[Wire]) -> None:
    """JSON can name a lone surrogate, and neither a hash nor a store can write one: no field takes it, at no depth."""
    for value in (LONE, [LONE], [[LONE, LONE]], {LONE: "x"}, {"a": LONE}):
        for name, field in model.model_fields.items():
            with pytest.raises(ValidationError) as refused:
                model.model_validate({field.alias or name: value})
            assert any(error["loc"][:1] == (field.alias or name,) for error in refused.value.errors()), name


@pytest.mark.parametrize("text", ["", "-1", "+1", "1_0", " 1", "\u00b2", "\u0663", "9" * 5000, "1.0", "0x1"])
def test_only_plain_digits_are_a_number(text: str) -> None:
    """Digits of other scripts, and more digits than a number has, are refused and break nothing."""
    assert whole_number(text) is None


def test_a_number_is_read() -> None:
    """Plain digits are a number."""
    assert [whole_number("0"), whole_number("042"), whole_number("9" * 18)] == [0, 42, 10**18 - 1]


@pytest.mark.parametrize(
    ("content", "wait_s"),
    [
        (b"[" * 100_000, MAX_WAIT_S),
        (b'{"wait_s":' + b"[" * 100_000, MAX_WAIT_S),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, MAX_WAIT_S),
        (b'{"wait_s":1' + b"0" * 400 + b"}", MAX_WAIT_S),
        (b'{"wait_s":-1' + b"0" * 400 + b"}", 0.0),
        (b'{"wait_s":1' + b"0" * 5000 + b"}", MAX_WAIT_S),
        (b'{"wait_s":NaN}', MAX_WAIT_S),
        (b'{"wait_s":-Infinity}', 0.0),
        (b'{"wait_s":true}', MAX_WAIT_S),
        (b"\xff", MAX_WAIT_S),
        (json.dumps({"wait_s": 2.5}).encode(), 2.5),
    ],
)
def test_any_body_has_a_wait(content: bytes, wait_s: float) -> None:
    """A body that is no JSON, too deep, or whose wait is no sensible number is still one the relay can carry."""

    async def never() -> dict[str, object]:
        raise AssertionError

    body = Body(held=content, first=None, receive=never, length=None)
    assert body.wait_s() == wait_s
