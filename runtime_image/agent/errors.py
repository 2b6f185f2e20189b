"""From what went wrong to what a caller of the agent is told: one table of statuses, one way to answer."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from shoal.contract.errors import ErrorCode, ErrorDetail, ShoalError, invalid

#: HTTP status of each code that an agent answers with; anything else is 500.
STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 422,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.TOKEN_REFUSED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.SNAPSHOT_NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.CONFLICT: 409,
    ErrorCode.EPOCH_MISMATCH: 409,
    ErrorCode.SESSION_REWOUND: 409,
    ErrorCode.SESSION_NOT_READY: 409,
    ErrorCode.ACTION_CONFLICT: 409,
    ErrorCode.ACTION_NOT_RUNNING: 409,
    ErrorCode.ACTION_OUTCOME_UNKNOWN: 409,
    ErrorCode.SESSION_ENDED: 410,
    ErrorCode.SANDBOX_LOST: 410,
    ErrorCode.PAYLOAD_TOO_LARGE: 413,
    ErrorCode.NOT_IMPLEMENTED: 501,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.HOST_REFUSED: 503,
    ErrorCode.HOST_FENCED: 503,
    ErrorCode.SUBSTRATE_UNAVAILABLE: 409,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.SANDBOX_START_FAILED: 502,
    ErrorCode.IMAGE_PULL_FAILED: 502,
    ErrorCode.SNAPSHOT_FAILED: 502,
    ErrorCode.INTERNAL: 500,
}


def error_response(error: ShoalError) -> Response:
    """The answer that says `error`, with its status and, where it has one, a Retry-After header."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Response(
        error.body().model_dump_json(exclude_none=True),
        status_code=STATUS.get(error.code, 500),
        media_type="application/json",
        headers=headers,
    )


def invalid_request(error: ValidationError) -> ShoalError:
    """What a body that does not fit its model is told: each field's path and what is wrong with it, never the input."""
    fields = [
        (".".join(str(part) for part in item["loc"]), item["msg"])
        for item in error.errors(include_url=False, include_context=False, include_input=False)[:50]
    ]
    return invalid(*fields[0], *fields[1:])


def detail_of(error: ShoalError) -> ErrorDetail:
    """The part of an error that records and reports carry."""
    return error.body().error


def sandbox_lost(message: str, **details: Any) -> ShoalError:
    """The sandbox is gone; its session can be replaced."""
    return ShoalError(ErrorCode.SANDBOX_LOST, message, details=details)
