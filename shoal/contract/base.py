"""What every wire model shares: strictness, names of ids, bounded integers."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated, Any, NewType

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, PlainSerializer
from pydantic_core import CoreSchema

SessionId = NewType("SessionId", str)
SnapshotId = NewType("SnapshotId", str)
HostId = NewType("HostId", str)
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
EventId = NewType("EventId", str)

#: The longest long poll, in seconds: every hop (HTTP API 30 s, load balancers 60 s) lets it through.
MAX_WAIT_S = 25.0

#: Names a caller chooses (sessions, runs, pools, labels' keys): printable, no white space, no control characters.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+=-]{0,199}$"
#: Ids a caller chooses for its own steps.
ACTION_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+=-]{0,127}$"

#: A limit of length that no string of a request reaches.
_ANY_LENGTH = 2**31 - 1
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """An opaque id: `prefix`, an underscore and 100 random bits in 20 characters of Crockford's base 32."""
    bits = secrets.randbits(100)
    return prefix + "_" + "".join(_ALPHABET[(bits >> shift) & 31] for shift in range(95, -5, -5))


def whole_number(text: str) -> int | None:
    """What a query, a header or a cursor says in at most 18 ASCII digits; None for anything else."""
    return int(text) if 0 < len(text) <= 18 and text.isascii() and text.isdigit() else None


def _as_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs an offset; write it as RFC 3339 in UTC, such as 2026-01-31T12:00:00Z")
    return value.astimezone(UTC)


def _rfc3339(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


#: An aware time; written as RFC 3339 in UTC with microseconds.
Time = Annotated[
    datetime, AfterValidator(_as_utc), PlainSerializer(_rfc3339, return_type=str, when_used="json")
]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
ActionId = Annotated[str, Field(pattern=ACTION_ID_PATTERN)]
WaitSeconds = Annotated[float, Field(ge=0, le=MAX_WAIT_S)]
Labels = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")],
        Annotated[str, Field(max_length=256)],
    ],
    Field(max_length=32),
]


class Wire(BaseModel):
    """A model of the contract: unknown fields are refused, instances do not change, and text is Unicode that can be
    written down: half of a surrogate pair is refused wherever it stands."""

    # The length refuses nothing: a string with a limit is read as UTF-8, and that is what finds lone surrogates, which
    # JSON can name ("\\ud800") and neither a digest nor a store can take.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        str_max_length=_ANY_LENGTH,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        _untold(schema.get("properties", {}))
        return schema


def _untold(schema: Any) -> None:
    """Take the limit that is none out of a schema."""
    if isinstance(schema, dict):
        if schema.get("maxLength") == _ANY_LENGTH:
            del schema["maxLength"]
        for below in schema.values():
            _untold(below)
    elif isinstance(schema, list):
        for below in schema:
            _untold(below)


class Answer(BaseModel):
    """What the service answers: frozen, and tolerant of fields that a newer service adds."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_bytes="base64", val_json_bytes="base64")
