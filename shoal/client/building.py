"""From Python values to wire models and bodies, and from answers to models."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from shoal.client.effects import Reply
from shoal.client.errors import InternalError, InvalidRequest, of_code
from shoal.contract import actions
from shoal.contract.actions import File
from shoal.contract.base import Wire
from shoal.contract.errors import ErrorCode
from shoal.contract.errors import invalid as refusal
from shoal.contract.sessions import MAX_COUNT, Network, SessionBatch, SessionCreate
from shoal.contract.snapshots import Snapshot

M = TypeVar("M", bound=BaseModel)

_JSON = {"content-type": "application/json"}


def idempotency_key() -> str:
    """A key for one logical creation; made once, sent with each attempt."""
    return uuid.uuid4().hex


def quoted(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe=":")


def model(kind: type[M], values: Mapping[str, Any]) -> M:
    """A wire model.

    Raises:
        InvalidRequest: As the service would say it, with the path of each field in `details["fields"]`.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> InvalidRequest:
    """A failed validation in the service's own words."""
    fields = [
        (".".join(str(part) for part in item["loc"]), item["msg"])
        for item in error.errors(include_url=False, include_input=False)
    ]
    told = refusal(*fields[0], *fields[1:])
    return InvalidRequest(told.code, told.message, details=told.details)


def body(value: BaseModel) -> bytes:
    """Only what was given: the service knows its defaults."""
    return value.model_dump_json(exclude_unset=True, by_alias=True).encode()


def tagged(action: Wire) -> Wire:
    """An action that says its type, also where that was left to the default."""
    return action.model_copy(update={"type": getattr(action, "type", None)})


def json_headers(key: str | None = None) -> dict[str, str]:
    """Headers of a JSON body."""
    return _JSON if key is None else {**_JSON, "idempotency-key": key}


def parsed(kind: type[M], reply: Reply) -> M:
    """An answer's model.

    Raises:
        InternalError: The answer is not of the contract.
    """
    try:
        return kind.model_validate_json(reply.content)
    except ValidationError as error:
        excerpt = reply.content[:200].decode("utf-8", "replace")
        raise InternalError(
            ErrorCode.INTERNAL,
            f"the service's answer is not a {kind.__name__}: {error.error_count()} errors; it begins {excerpt!r}",
            status=reply.status,
        ) from error


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None: left out, it means the same."""
    return {key: value for key, value in values.items() if value is not None}


def text(value: str | bytes) -> tuple[str, str]:
    """A value and its encoding on the wire: bytes travel exactly."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii"), "base64"
    return value, "utf-8"


def with_stdin(values: dict[str, Any]) -> dict[str, Any]:
    """`stdin` as the wire has it."""
    stdin = values.pop("stdin", None)
    if stdin is not None:
        values["stdin"], encoding = text(stdin)
        if encoding != "utf-8":
            values["stdin_encoding"] = encoding
    return values


def files(value: Mapping[str, str | bytes] | Sequence[File]) -> list[dict[str, Any]]:
    """Files as the wire has them."""
    if isinstance(value, Mapping):
        made = []
        for path, content in value.items():
            written, encoding = text(content)
            made.append({"path": path, "content": written, "encoding": encoding})
        return made
    return [item.model_dump() for item in value]


def network(value: Any) -> Any:
    """ "none", a list of what may be reached, or the model."""
    if isinstance(value, Network):
        return value.model_dump()
    if value == "none":
        return {"mode": "none"}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"mode": "allowlist", "allow": list(value)}
    return value


def plain(value: Any) -> Any:
    """A model's fields that were given, or a mapping's."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return dict(value) if isinstance(value, Mapping) else value


def snapshot_id(value: str | Snapshot) -> str:
    """The id of a snapshot given by itself or by its id."""
    return value.id if isinstance(value, Snapshot) else value


def session_create(
    image: str | None,
    snapshot: str | Snapshot | None,
    name: str | None,
    options: Mapping[str, Any],
    **more: Any,
) -> SessionCreate:
    """The body that creates sessions; idle_pause_s None is said, not left out."""
    values = {key: value for key, value in options.items() if value is not None or key == "idle_pause_s"}
    if "network" in values:
        values["network"] = network(values["network"])
    for key in ("resources", "labels", "env"):
        if key in values:
            values[key] = plain(values[key])
    if "on_start" in values:
        if isinstance(values["on_start"], str):
            raise of_code(ErrorCode.INVALID_REQUEST, "on_start: a list of commands, not one string")
        values["on_start"] = list(values["on_start"])
    values.update(given({"image": image, "name": name, **more}))
    if snapshot is not None:
        values["snapshot"] = snapshot_id(snapshot)
    return model(SessionCreate, values)


def group_bodies(
    image: str | None,
    snapshot: str | Snapshot | None,
    count: int | None,
    names: Sequence[str] | None,
    options: Mapping[str, Any],
) -> list[SessionCreate | SessionBatch]:
    """The bodies that create a group: `count` at once, or a batch of one per name; a thousand a body."""
    bodies: list[SessionCreate | SessionBatch] = []
    if names is not None:
        items = [session_create(image, snapshot, name, options) for name in names]
        for at in range(0, len(items), MAX_COUNT):
            bodies.append(SessionBatch(items=items[at : at + MAX_COUNT]))
        return bodies
    left = count or 0
    while left > 0:
        bodies.append(session_create(image, snapshot, None, options, count=min(left, MAX_COUNT)))
        left -= MAX_COUNT
    return bodies


def fields(options: Mapping[str, Any], kind: type[Wire]) -> dict[str, Any]:
    """The options that are fields of an action.

    Raises:
        TypeError: One is neither that nor an option of steps.
    """
    unknown = set(options) - set(kind.model_fields) - {"step", "epoch", "parallel", "wait_timeout_s"}
    if unknown:
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}")
    return given({key: value for key, value in options.items() if key in kind.model_fields})


def exec_action(command: str | Sequence[str], options: Mapping[str, Any], **more: Any) -> actions.Exec:
    """The wire's exec: a string by a shell, a list as it is."""
    values = with_stdin(fields(options, actions.Exec))
    line = command if isinstance(command, str) else list(command)
    return model(actions.Exec, {"type": "exec", "command": line, **values, **more})
