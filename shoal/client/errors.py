"""What the SDK raises: the service's errors by what the caller does next, and the SDK's own.

    ShoalError                       (shoal.contract.errors) any refusal or failure of the platform
    └── ServiceError                 one that this SDK raised; adds `status` and `request_id`
        ├── FixError                 the request is wrong: change it
        │   ├── InvalidRequest  Unauthenticated  Forbidden  NotFound (ImageNotFound, SnapshotNotFound)
        │   ├── Conflict (IdempotencyConflict, ActionConflict)
        │   ├── SessionRewound       the disk went back: acknowledge (`box.ack()`), then go on
        │   └── EpochMismatch  ActionNotRunning  SubstrateUnavailable  ImageBuildFailed
        ├── WaitError                waited for as long as the retry policy allows; later it may work
        │   └── QuotaExceeded  RateLimited  NoCapacity  SessionNotReady  ImageNotReady  SnapshotNotReady
        ├── RetryError               repeated for as long as the retry policy allows
        │   ├── ConnectionFailed     no answer of the service at all
        │   └── SandboxStartFailed  ImagePullFailed  SnapshotFailed  HostUnreachable  Unavailable  InternalError
        ├── ReplaceError             this sandbox is gone or unusable: `box.replace()`, or start from a snapshot
        │   └── SandboxLost  ActionOutcomeUnknown
        └── GiveUpError              repeating it will not help
            └── SessionEnded  NotImplementedByService
    WaitTimeout (TimeoutError)       the caller's own `timeout_s` passed; what was asked for goes on
    ActionFailed                     `.check()` on a result that failed: the user's command, never the platform
    RemoteError                      a remote function raised; carries the remote traceback as text
    ResultError                      a remote function's result cannot be carried by the chosen format
    PythonMismatch                   the image's Python cannot load what this Python pickled
    ConfigError                      no URL or key, or a credentials file that cannot be read

All survive pickling.
"""

from __future__ import annotations

from typing import Any

from shoal.contract.errors import TABLE, ErrorCode, ErrorDetail, Next, ShoalError


class ServiceError(ShoalError):
    """An error of the platform as the SDK raises it.

    Attributes:
        status: The HTTP status; None when there was no answer.
        request_id: The service's id of the request, for its logs; None when it told none.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
        status: int | None = None,
        next_step: Next | None = None,
    ) -> None:
        super().__init__(code, message, retry_after_s=retry_after_s, details=details)
        self.status = status
        self._next = next_step

    @property
    def next(self) -> Next:
        """What the caller does about it: as the service said, else by the code."""
        return self._next if self._next is not None else TABLE[self.code].next

    @property
    def request_id(self) -> str | None:
        """The service's id of the request, for its logs."""
        found = self.details.get("request_id")
        return found if isinstance(found, str) else None

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.code, self.message, self.retry_after_s, self.details, self.status, self._next)
        return (_rebuild, (type(self), *state))


def _rebuild(
    kind: type[ServiceError],
    code: ErrorCode,
    message: str,
    retry_after_s: float | None,
    details: dict[str, Any],
    status: int | None,
    next_step: Next | None,
) -> ServiceError:
    return kind(
        code, message, retry_after_s=retry_after_s, details=details, status=status, next_step=next_step
    )


class FixError(ServiceError):
    """The request is wrong: change it."""


class WaitError(ServiceError):
    """Nothing is wrong; it was waited for as long as the retry policy allows."""


class RetryError(ServiceError):
    """Something passing went wrong, for longer than the retry policy allows."""


class ReplaceError(ServiceError):
    """This sandbox is gone or unusable: replace it, or start another from a snapshot."""


class GiveUpError(ServiceError):
    """Repeating it will not help."""


class InvalidRequest(FixError):
    """A field is missing, unknown or out of range; `details["fields"]` is a list of `{path, message}`."""


class Unauthenticated(FixError):
    """No API key, or one that is unknown, expired or revoked."""


class Forbidden(FixError):
    """The key lacks a scope."""


class NotFound(FixError):
    """Nothing of that id is visible to this tenant."""


class ImageNotFound(NotFound):
    """No image of that name and tag."""


class SnapshotNotFound(NotFound):
    """No snapshot of that id."""


class Conflict(FixError):
    """The resource's state does not allow this."""


class IdempotencyConflict(Conflict):
    """The key, or the session's name in its run, was used with another body."""


class ActionConflict(Conflict):
    """The step's id was used with another action: the script took another way than the one recorded."""


class SessionRewound(FixError):
    """The disk went back; `details` has `restored_seq` and `lost_actions`."""


class EpochMismatch(FixError):
    """The session is in another incarnation than the caller believes."""


class ActionNotRunning(FixError):
    """The action has ended, or takes no input."""


class SubstrateUnavailable(FixError):
    """No host of the pool offers this substrate."""


class ImageBuildFailed(FixError):
    """The image could not be built; `details["log"]` has the end of the log."""


class QuotaExceeded(WaitError):
    """The tenant or run is at its quota."""


class RateLimited(WaitError):
    """Too many requests."""


class NoCapacity(WaitError):
    """No host has room and the pool may not grow, or the request is larger than any host."""


class SessionNotReady(WaitError):
    """The session is queued, starting or restoring."""


class ImageNotReady(WaitError):
    """The image is being built or pulled."""


class SnapshotNotReady(WaitError):
    """The snapshot is not durable yet."""


class ConnectionFailed(RetryError):
    """The service gave no answer at all."""


class SandboxStartFailed(RetryError):
    """The sandbox did not start; `details["phase"]` tells where."""


class ImagePullFailed(RetryError):
    """A layer could not be fetched or did not match its digest."""


class SnapshotFailed(RetryError):
    """The snapshot failed and left nothing."""


class HostUnreachable(RetryError):
    """The session's host does not answer, or refuses."""


class Unavailable(RetryError):
    """A part of the service is down or overloaded."""


class InternalError(RetryError):
    """An error of the service's own."""


class SandboxLost(ReplaceError):
    """The sandbox is gone; the session can be replaced."""


class ActionOutcomeUnknown(ReplaceError):
    """The action had started when its host crashed; it is not known how far it got, and it is not run again."""


class SessionEnded(GiveUpError):
    """The session ended; `details["end"]` tells the cause."""


class NotImplementedByService(GiveUpError):
    """The contract names this; the service's version does not do it yet."""


_BY_CODE: dict[ErrorCode, type[ServiceError]] = {
    ErrorCode.INVALID_REQUEST: InvalidRequest,
    ErrorCode.UNAUTHENTICATED: Unauthenticated,
    ErrorCode.FORBIDDEN: Forbidden,
    ErrorCode.NOT_FOUND: NotFound,
    ErrorCode.CONFLICT: Conflict,
    ErrorCode.IDEMPOTENCY_CONFLICT: IdempotencyConflict,
    ErrorCode.NOT_IMPLEMENTED: NotImplementedByService,
    ErrorCode.QUOTA_EXCEEDED: QuotaExceeded,
    ErrorCode.RATE_LIMITED: RateLimited,
    ErrorCode.NO_CAPACITY: NoCapacity,
    ErrorCode.SESSION_NOT_READY: SessionNotReady,
    ErrorCode.SESSION_ENDED: SessionEnded,
    ErrorCode.SESSION_REWOUND: SessionRewound,
    ErrorCode.EPOCH_MISMATCH: EpochMismatch,
    ErrorCode.SANDBOX_LOST: SandboxLost,
    ErrorCode.SANDBOX_START_FAILED: SandboxStartFailed,
    ErrorCode.SUBSTRATE_UNAVAILABLE: SubstrateUnavailable,
    ErrorCode.ACTION_CONFLICT: ActionConflict,
    ErrorCode.ACTION_OUTCOME_UNKNOWN: ActionOutcomeUnknown,
    ErrorCode.ACTION_NOT_RUNNING: ActionNotRunning,
    ErrorCode.IMAGE_NOT_FOUND: ImageNotFound,
    ErrorCode.IMAGE_NOT_READY: ImageNotReady,
    ErrorCode.IMAGE_BUILD_FAILED: ImageBuildFailed,
    ErrorCode.IMAGE_PULL_FAILED: ImagePullFailed,
    ErrorCode.SNAPSHOT_NOT_FOUND: SnapshotNotFound,
    ErrorCode.SNAPSHOT_NOT_READY: SnapshotNotReady,
    ErrorCode.SNAPSHOT_FAILED: SnapshotFailed,
    ErrorCode.HOST_REFUSED: HostUnreachable,
    ErrorCode.HOST_FENCED: HostUnreachable,
    ErrorCode.HOST_UNREACHABLE: HostUnreachable,
    ErrorCode.UNAVAILABLE: Unavailable,
    ErrorCode.INTERNAL: InternalError,
}
_BY_NEXT: dict[Next, type[ServiceError]] = {
    Next.FIX: FixError,
    Next.WAIT: WaitError,
    Next.RETRY: RetryError,
    Next.REPLACE: ReplaceError,
    Next.GIVE_UP: GiveUpError,
}


def from_detail(detail: ErrorDetail, *, status: int | None = None) -> ServiceError:
    """The exception an answer tells.

    A code newer than this library becomes the class of its `next`, with code `internal` and its own code in
    `details["code"]`.
    """
    step = detail.next
    details = detail.details
    try:
        code = ErrorCode(detail.code)
        kind = _BY_CODE.get(code) or _BY_NEXT[step]
    except ValueError:
        code = ErrorCode.INTERNAL
        kind = _BY_NEXT[step]
        details = {**details, "code": detail.code}
    return kind(
        code,
        detail.message,
        retry_after_s=detail.retry_after_s,
        details=details,
        status=status,
        next_step=step,
    )


def of_code(code: ErrorCode, message: str, **details: Any) -> ServiceError:
    """An error that the SDK itself finds, in the service's own words."""
    kind = _BY_CODE.get(code) or _BY_NEXT[TABLE[code].next]
    return kind(code, message, details=details)


class WaitTimeout(TimeoutError):
    """The caller's `timeout_s` passed. What was asked for goes on; `what` names it (`session ses_...`)."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(
            f"{what} was not done within {timeout_s:g} s; it goes on and can be waited for again"
        )
        self.what = what
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.what, self.timeout_s))


class ActionFailed(Exception):
    """The user's own command, edit or file operation failed: raised only by `.check()`. `result` has all of it."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.result))


class RemoteError(Exception):
    """A remote function raised, or its process ended without a result.

    Attributes:
        kind: The remote exception's qualified name, such as `builtins.ValueError`; None when the process died.
        remote_traceback: The remote traceback as text; never code to run.
        stdout, stderr: What the function printed.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        remote_traceback: str = "",
        stdout: str = "",
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.remote_traceback = remote_traceback
        self.stdout = stdout
        self.stderr = stderr

    def __str__(self) -> str:
        head = super().__str__()
        return f"{head}\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else head

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.kind, self.remote_traceback, self.stdout, self.stderr)
        return (_rebuild_remote, (type(self), self.args[0], *state))


def _rebuild_remote(
    kind: type[RemoteError], message: str, name: str | None, text: str, stdout: str, stderr: str
) -> RemoteError:
    return kind(message, kind=name, remote_traceback=text, stdout=stdout, stderr=stderr)


class ResultError(RemoteError):
    """The function returned something that its `result` format cannot carry."""


class PythonMismatch(Exception):
    """The image's Python cannot load what this Python pickled; nothing was unpickled there.

    Attributes:
        here, there: `major.minor` of either side.
    """

    def __init__(self, here: str, there: str) -> None:
        super().__init__(
            f"this is Python {here}, the image has Python {there}: a pickled function does not travel between "
            f"them; use an image with Python {here}, or run it from Python {there}"
        )
        self.here = here
        self.there = there

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.here, self.there))


class ConfigError(Exception):
    """The SDK does not know where the service is, or as whom to speak to it."""
