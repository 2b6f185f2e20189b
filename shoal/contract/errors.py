"""The one error vocabulary.

    ShoalError                    anything this service says no with; carries an ErrorCode
    ├── by `next`: fix            the request is wrong: change it
    ├── by `next`: wait           nothing is wrong: the same request succeeds later (see retry_after_s)
    ├── by `next`: retry          something passing went wrong: repeat it under the same id
    ├── by `next`: replace        this sandbox is gone or unusable: replace it, or restore from a snapshot
    └── by `next`: give_up        repeating it will not help

A code says what happened; `next` says what the caller does. The command that a user runs in a sandbox
failing is never an error of ours: it is an observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from shoal.contract.base import Answer


class Next(StrEnum):
    """What the caller does about an error."""

    FIX = "fix"
    WAIT = "wait"
    RETRY = "retry"
    REPLACE = "replace"
    GIVE_UP = "give_up"


class ErrorCode(StrEnum):
    """Every code the service answers with; a closed list."""

    # the request
    INVALID_REQUEST = "invalid_request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    NOT_IMPLEMENTED = "not_implemented"
    # capacity and limits
    QUOTA_EXCEEDED = "quota_exceeded"
    RATE_LIMITED = "rate_limited"
    NO_CAPACITY = "no_capacity"
    # sessions and sandboxes
    SESSION_NOT_READY = "session_not_ready"
    SESSION_ENDED = "session_ended"
    SESSION_REWOUND = "session_rewound"
    EPOCH_MISMATCH = "epoch_mismatch"
    SANDBOX_LOST = "sandbox_lost"
    SANDBOX_START_FAILED = "sandbox_start_failed"
    SUBSTRATE_UNAVAILABLE = "substrate_unavailable"
    # actions
    ACTION_CONFLICT = "action_conflict"
    ACTION_OUTCOME_UNKNOWN = "action_outcome_unknown"
    ACTION_NOT_RUNNING = "action_not_running"
    # images and snapshots
    IMAGE_NOT_FOUND = "image_not_found"
    IMAGE_NOT_READY = "image_not_ready"
    IMAGE_BUILD_FAILED = "image_build_failed"
    IMAGE_PULL_FAILED = "image_pull_failed"
    SNAPSHOT_NOT_FOUND = "snapshot_not_found"
    SNAPSHOT_NOT_READY = "snapshot_not_ready"
    SNAPSHOT_FAILED = "snapshot_failed"
    # hosts, between the control plane and its agents
    HOST_REFUSED = "host_refused"
    HOST_FENCED = "host_fenced"
    HOST_UNREACHABLE = "host_unreachable"
    TOKEN_REFUSED = "token_refused"
    # the service itself
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


@dataclass(frozen=True, kw_only=True)
class CodeInfo:
    """What a code means, for the table in docs/errors.md and for `next`."""

    next: Next
    meaning: str


TABLE: dict[ErrorCode, CodeInfo] = {
    ErrorCode.INVALID_REQUEST: CodeInfo(
        next=Next.FIX,
        meaning="A field is missing, unknown or out of range; details.fields has each one's path and message.",
    ),
    ErrorCode.UNAUTHENTICATED: CodeInfo(
        next=Next.FIX, meaning="No API key, or one that is unknown, expired or revoked."
    ),
    ErrorCode.FORBIDDEN: CodeInfo(next=Next.FIX, meaning="The key lacks the scope that this route needs."),
    ErrorCode.NOT_FOUND: CodeInfo(next=Next.FIX, meaning="Nothing of that id is visible to this tenant."),
    ErrorCode.METHOD_NOT_ALLOWED: CodeInfo(
        next=Next.FIX, meaning="The path exists; this method on it does not."
    ),
    ErrorCode.CONFLICT: CodeInfo(
        next=Next.FIX, meaning="The resource is in a state that does not allow this."
    ),
    ErrorCode.IDEMPOTENCY_CONFLICT: CodeInfo(
        next=Next.FIX, meaning="This idempotency key, or this name in its run, was used with another body."
    ),
    ErrorCode.PAYLOAD_TOO_LARGE: CodeInfo(
        next=Next.FIX,
        meaning="The body, or the answer, is over details.limit_bytes; large content goes as files.",
    ),
    ErrorCode.NOT_IMPLEMENTED: CodeInfo(
        next=Next.GIVE_UP, meaning="The contract names this; this version does not do it yet."
    ),
    ErrorCode.QUOTA_EXCEEDED: CodeInfo(
        next=Next.WAIT, meaning="The tenant or run is at its quota; free some or wait."
    ),
    ErrorCode.RATE_LIMITED: CodeInfo(next=Next.WAIT, meaning="Too many requests; see retry_after_s."),
    ErrorCode.NO_CAPACITY: CodeInfo(
        next=Next.WAIT,
        meaning="No host has room and the pool may not grow, the request is larger than any host, or execution is "
        "switched off (details.reason).",
    ),
    ErrorCode.SESSION_NOT_READY: CodeInfo(
        next=Next.WAIT, meaning="The session is queued, starting or restoring."
    ),
    ErrorCode.SESSION_ENDED: CodeInfo(
        next=Next.GIVE_UP, meaning="The session ended; details.end tells the cause."
    ),
    ErrorCode.SESSION_REWOUND: CodeInfo(
        next=Next.FIX,
        meaning="The disk went back to details.restored_seq; acknowledge it, then go on from there.",
    ),
    ErrorCode.EPOCH_MISMATCH: CodeInfo(
        next=Next.FIX, meaning="The session is in another incarnation than the caller believes."
    ),
    ErrorCode.SANDBOX_LOST: CodeInfo(
        next=Next.REPLACE, meaning="The sandbox is gone; the session can be replaced."
    ),
    ErrorCode.SANDBOX_START_FAILED: CodeInfo(
        next=Next.RETRY, meaning="The sandbox did not start; details.phase tells where."
    ),
    ErrorCode.SUBSTRATE_UNAVAILABLE: CodeInfo(
        next=Next.FIX, meaning="No host of the pool offers this substrate."
    ),
    ErrorCode.ACTION_CONFLICT: CodeInfo(
        next=Next.FIX, meaning="This action id was used with another action."
    ),
    ErrorCode.ACTION_OUTCOME_UNKNOWN: CodeInfo(
        next=Next.REPLACE,
        meaning="The action had started when its host crashed; it is not known how far it got.",
    ),
    ErrorCode.ACTION_NOT_RUNNING: CodeInfo(next=Next.FIX, meaning="The action has ended, or takes no input."),
    ErrorCode.IMAGE_NOT_FOUND: CodeInfo(
        next=Next.FIX, meaning="No image of that name and tag is registered."
    ),
    ErrorCode.IMAGE_NOT_READY: CodeInfo(next=Next.WAIT, meaning="The image is being built or pulled."),
    ErrorCode.IMAGE_BUILD_FAILED: CodeInfo(
        next=Next.FIX, meaning="The image could not be built; details.log has the end of the log."
    ),
    ErrorCode.IMAGE_PULL_FAILED: CodeInfo(
        next=Next.RETRY, meaning="A layer could not be fetched or did not match its digest."
    ),
    ErrorCode.SNAPSHOT_NOT_FOUND: CodeInfo(
        next=Next.FIX, meaning="No snapshot of that id is visible to this tenant."
    ),
    ErrorCode.SNAPSHOT_NOT_READY: CodeInfo(next=Next.WAIT, meaning="The snapshot is not durable yet."),
    ErrorCode.SNAPSHOT_FAILED: CodeInfo(
        next=Next.RETRY, meaning="The snapshot failed and left nothing; details.reason tells why."
    ),
    ErrorCode.HOST_REFUSED: CodeInfo(
        next=Next.RETRY, meaning="The host had no room after all; another one is tried."
    ),
    ErrorCode.HOST_FENCED: CodeInfo(
        next=Next.RETRY, meaning="The host lost touch with the control plane and refuses work."
    ),
    ErrorCode.HOST_UNREACHABLE: CodeInfo(
        next=Next.RETRY, meaning="The session's host did not answer; its fate is being decided."
    ),
    ErrorCode.TOKEN_REFUSED: CodeInfo(
        next=Next.RETRY, meaning="The route token is expired, or for another host or epoch."
    ),
    ErrorCode.UNAVAILABLE: CodeInfo(
        next=Next.RETRY, meaning="A part of the service is down or overloaded for the moment."
    ),
    ErrorCode.INTERNAL: CodeInfo(
        next=Next.RETRY, meaning="An error of ours; the log has it under details.request_id."
    ),
}


class ErrorDetail(Answer):
    """The inside of an error answer."""

    code: str
    message: str
    next: Next
    retry_after_s: float | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class ErrorBody(Answer):
    """Every error answer: `{"error": {...}}`."""

    error: ErrorDetail


class ShoalError(Exception):
    """A refusal or failure of the service, on whichever side of the wire.

    Attributes:
        code: What happened.
        message: One sentence for people: what happened and what to do.
        retry_after_s: When to try again, in seconds; None lets the caller choose.
        details: JSON-able facts that a program can act on.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.code, self.message, self.retry_after_s, self.details))

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @property
    def next(self) -> Next:
        """What the caller does about it."""
        return TABLE[self.code].next

    def body(self) -> ErrorBody:
        """The answer that says this."""
        return ErrorBody(
            error=ErrorDetail(
                code=self.code.value,
                message=self.message,
                next=self.next,
                retry_after_s=self.retry_after_s,
                details=self.details,
            )
        )

    @classmethod
    def from_detail(cls, detail: ErrorDetail) -> ShoalError:
        """The error an answer tells; a code newer than this library is `internal`, its own code kept in details."""
        try:
            code = ErrorCode(detail.code)
        except ValueError:
            return cls(
                ErrorCode.INTERNAL,
                detail.message,
                retry_after_s=detail.retry_after_s,
                details={**detail.details, "code": detail.code},
            )
        return cls(code, detail.message, retry_after_s=detail.retry_after_s, details=detail.details)


def invalid(path: str, message: str, *more: tuple[str, str]) -> ShoalError:
    """The refusal of fields of a request, in the one form it has: `details.fields` is a list of `{path, message}`.

    Args:
        path: Where the field is: in the body as `resources.cpu_millis`, elsewhere as `query.limit`.
        message: What is wrong with it; the input itself is not repeated, it may be a secret.
        more: Further fields, each with what is wrong with it.
    """
    fields = [{"path": where, "message": what} for where, what in ((path, message), *more)]
    rest = f" (and {len(more)} more)" if more else ""
    return ShoalError(
        ErrorCode.INVALID_REQUEST, f"{path or 'body'}: {message}{rest}", details={"fields": fields}
    )


def _rebuild(
    kind: type[ShoalError],
    code: ErrorCode,
    message: str,
    retry_after_s: float | None,
    details: dict[str, Any],
) -> ShoalError:
    return kind(code, message, retry_after_s=retry_after_s, details=details)
