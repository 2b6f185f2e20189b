"""What every route has in common: its token, its errors, its body and its query, without any machinery per request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from runtime_image.agent.errors import error_response, invalid_request
from runtime_image.agent.link import LinkError
from runtime_image.agent.sandboxes import SandboxGone
from shoal.contract.base import MAX_WAIT_S
from shoal.contract.errors import ErrorCode, ShoalError, invalid

_log = structlog.get_logger()
_Model = TypeVar("_Model", bound=BaseModel)

Endpoint = Callable[[Request], Awaitable[Response]]


def guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint with every failure told as an `ErrorBody`."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ShoalError as error:
            return error_response(error)
        except ValidationError as error:
            return error_response(invalid_request(error))
        except ClientDisconnect:
            return Response(status_code=499)
        except (LinkError, SandboxGone):
            return error_response(ShoalError(ErrorCode.SANDBOX_LOST, "The sandbox went away meanwhile."))
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - the outermost loop of a request: logged, and told as ours
            _log.exception("request.failed", path=request.scope.get("path"), method=request.method)
            return error_response(ShoalError(ErrorCode.INTERNAL, "The host failed at the request."))

    return answer


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ShoalError: `payload_too_large`.
    """
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > limit_bytes:
        raise _too_large(limit_bytes)
    pieces: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        pieces.append(chunk)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(limit_bytes: int) -> ShoalError:
    return ShoalError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"The body is over {limit_bytes} bytes.",
        details={"limit_bytes": limit_bytes},
    )


async def read_model(request: Request, model: type[_Model], limit_bytes: int = 4 << 20) -> _Model:
    """The body as a model; an empty body is `{}`."""
    return model.model_validate_json(await read_body(request, limit_bytes) or b"{}")


def number(request: Request, name: str, default: int, *, least: int = 0) -> int:
    """An integer of the query."""
    raw = request.query_params.get(name)
    if raw is None:
        return default
    try:
        value = int(raw)
    except ValueError:
        raise invalid(f"query.{name}", "is not an integer") from None
    if value < least:
        raise invalid(f"query.{name}", f"is less than {least}")
    return value


def wait_s(request: Request, default: float = 0.0) -> float:
    """How long the call may wait."""
    raw = request.query_params.get("wait_s")
    if raw is None:
        return default
    try:
        value = float(raw)
    except ValueError:
        raise invalid("query.wait_s", "is not a number") from None
    if not 0 <= value <= MAX_WAIT_S:
        raise invalid("query.wait_s", f"is not between 0 and {MAX_WAIT_S:.0f}")
    return value


def flag(request: Request, name: str, default: bool) -> bool:
    """A truth value of the query."""
    raw = request.query_params.get(name)
    if raw is None:
        return default
    if raw.lower() in ("1", "true", "yes"):
        return True
    if raw.lower() in ("0", "false", "no"):
        return False
    raise invalid(f"query.{name}", "is not true or false")


def json_response(body: bytes | str, status: int = 200) -> Response:
    """JSON that is made already."""
    return Response(body, status_code=status, media_type="application/json")
