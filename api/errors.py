"""How an error looks on HTTP: one table from code to status, and handlers so that every error answer is an ErrorBody.

Nothing of the inside leaves this module: an exception that is not a `ShoalError` answers `internal` with the request's
id, and its traceback goes to the log alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from provisioner.blobs.port import BlobError, BlobFull, BlobUnavailable
from provisioner.store.port import Conflict, StoreError, StoreUnavailable, Throttled
from shoal.contract.errors import ErrorCode, ShoalError, invalid

log = structlog.get_logger("api.errors")

#: The status of each code: the only place that knows it. docs/errors.md is generated from it.
STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 422,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.CONFLICT: 409,
    ErrorCode.IDEMPOTENCY_CONFLICT: 409,
    ErrorCode.PAYLOAD_TOO_LARGE: 413,
    ErrorCode.NOT_IMPLEMENTED: 501,
    ErrorCode.QUOTA_EXCEEDED: 429,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.NO_CAPACITY: 503,
    ErrorCode.SESSION_NOT_READY: 409,
    ErrorCode.SESSION_ENDED: 410,
    ErrorCode.SESSION_REWOUND: 409,
    ErrorCode.EPOCH_MISMATCH: 409,
    ErrorCode.SANDBOX_LOST: 410,
    ErrorCode.SANDBOX_START_FAILED: 502,
    ErrorCode.SUBSTRATE_UNAVAILABLE: 422,
    ErrorCode.ACTION_CONFLICT: 409,
    ErrorCode.ACTION_OUTCOME_UNKNOWN: 409,
    ErrorCode.ACTION_NOT_RUNNING: 409,
    ErrorCode.IMAGE_NOT_FOUND: 404,
    ErrorCode.IMAGE_NOT_READY: 409,
    ErrorCode.IMAGE_BUILD_FAILED: 409,
    ErrorCode.IMAGE_PULL_FAILED: 502,
    ErrorCode.SNAPSHOT_NOT_FOUND: 404,
    ErrorCode.SNAPSHOT_NOT_READY: 409,
    ErrorCode.SNAPSHOT_FAILED: 502,
    ErrorCode.HOST_REFUSED: 503,
    ErrorCode.HOST_FENCED: 503,
    ErrorCode.HOST_UNREACHABLE: 503,
    ErrorCode.TOKEN_REFUSED: 503,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.INTERNAL: 500,
}

_HTTP_CODES: dict[int, ErrorCode] = {
    400: ErrorCode.INVALID_REQUEST,
    401: ErrorCode.UNAUTHENTICATED,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    413: ErrorCode.PAYLOAD_TOO_LARGE,
}

REQUEST_ID_KEY = "shoal.request_id"


def status_of(error: ShoalError) -> int:
    """The HTTP status that says this error."""
    return STATUS[error.code]


def error_body(error: ShoalError) -> bytes:
    """The error as the JSON of an ErrorBody."""
    return error.body().model_dump_json(exclude_none=True).encode()


def error_headers(error: ShoalError) -> dict[str, str]:
    """Headers that go with an error: `Retry-After` in whole seconds, rounded up, and how to authenticate."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(0, math.ceil(error.retry_after_s)))
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: ShoalError) -> Response:
    """The whole answer for an error."""
    return Response(
        error_body(error),
        status_code=status_of(error),
        headers=error_headers(error),
        media_type="application/json",
    )


def internal_error(request_id: str) -> ShoalError:
    """What an unexpected exception looks like outside: nothing but where to find it in the log."""
    return ShoalError(
        ErrorCode.INTERNAL,
        "an error of ours; the log has it under this request id",
        retry_after_s=1.0,
        details={"request_id": request_id},
    )


def field_path(location: tuple[Any, ...] | list[Any]) -> str:
    """Where a wrong field is: in the body as `resources.cpu_millis`, elsewhere as `query.limit`."""
    parts = [str(part) for part in location]
    if len(parts) > 1 and parts[0] == "body":
        parts = parts[1:]
    return ".".join(parts)


def invalid_request(errors: list[Mapping[str, Any]]) -> ShoalError:
    """Validation errors of pydantic as one error; inputs are not repeated in it, they may be secrets."""
    fields = [(field_path(error.get("loc", ())), str(error.get("msg", ""))) for error in errors[:50]]
    return invalid(*(fields[0] if fields else ("body", "invalid")), *fields[1:])


def unknown_query(names: Iterable[str]) -> ShoalError:
    """The refusal of query parameters (one at the least) that a route does not have."""
    fields = [(f"query.{name}", "there is no such parameter") for name in dict.fromkeys(names)]
    return invalid(*fields[0], *fields[1:50])


def request_id_of(scope: Mapping[str, Any]) -> str:
    """The id this request has in the log."""
    return str(scope.get(REQUEST_ID_KEY, "unknown"))


async def _on_shoal_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ShoalError)
    if exc.code is ErrorCode.INTERNAL:
        return error_response(_with_request_id(exc, request_id_of(request.scope)))
    return error_response(exc)


def _with_request_id(error: ShoalError, request_id: str) -> ShoalError:
    return ShoalError(
        error.code,
        error.message,
        retry_after_s=error.retry_after_s,
        details={"request_id": request_id, **error.details},
    )


async def _on_validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    return error_response(invalid_request(list(exc.errors())))


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    code = _HTTP_CODES.get(exc.status_code)
    if code is None:
        return error_response(internal_error(request_id_of(request.scope)))
    messages = {
        ErrorCode.NOT_FOUND: f"there is no route {request.url.path}",
        ErrorCode.METHOD_NOT_ALLOWED: f"{request.method} is not a method of {request.url.path}",
    }
    response = error_response(ShoalError(code, messages.get(code, str(exc.detail))))
    if code is ErrorCode.METHOD_NOT_ALLOWED:
        response.headers["allow"] = ", ".join(_methods_of(request))
    return response


def _methods_of(request: Request) -> list[str]:
    """The methods that a path has: the framework itself tells only those of the first route that matches."""
    table: list[tuple[re.Pattern[str], set[str]]] = request.app.state.methods
    path = request.scope["path"]
    return sorted({method for pattern, methods in table if pattern.match(path) for method in methods})


def from_dependency(exc: Exception) -> ShoalError | None:
    """A failure of the store or the blob store that passes by itself, as the caller is told it; None: it is a bug."""
    if isinstance(exc, Conflict | Throttled | StoreUnavailable | BlobUnavailable):
        return ShoalError(
            ErrorCode.UNAVAILABLE,
            "a part of the service is overloaded or down for the moment",
            retry_after_s=1.0,
        )
    if isinstance(exc, BlobFull):
        return ShoalError(ErrorCode.UNAVAILABLE, "the service's own storage is full", retry_after_s=25.0)
    return None


async def _on_dependency_error(request: Request, exc: Exception) -> Response:
    error = from_dependency(exc)
    if error is None:
        raise exc
    log.warning("request.unavailable", request_id=request_id_of(request.scope), reason=type(exc).__name__)
    return error_response(error)


async def _on_unexpected(request: Request, exc: Exception) -> Response:
    # Starlette raises it again after this answer; the front logs it with its traceback.
    return error_response(internal_error(request_id_of(request.scope)))


def install(app: FastAPI, routes: Iterable[BaseRoute]) -> None:
    """Make every error answer of the app an ErrorBody. `routes` are all that it has."""
    app.state.methods = [
        (route.path_regex, set(route.methods or ())) for route in routes if isinstance(route, Route)
    ]
    app.add_exception_handler(ShoalError, _on_shoal_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(StoreError, _on_dependency_error)
    app.add_exception_handler(BlobError, _on_dependency_error)
    app.add_exception_handler(Exception, _on_unexpected)
