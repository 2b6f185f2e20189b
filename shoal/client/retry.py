"""Whether, when and how often a request is repeated; always the same request, under the same id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from tenacity import RetryCallState, Retrying, wait_random_exponential

from shoal.client import errors
from shoal.client.effects import Context, Op, Reply, Send, Sleep, TransportFailed, reply_of
from shoal.contract.errors import ErrorBody, ErrorCode, ErrorDetail, Next
from shoal.contract.route import BY_FUNCTION, BY_FUNCTION_HEADER

#: What a gateway may send to routers on the hosts, and the most that is sent another way: a function takes little.
_ROUTED = re.compile(r"/v1/(sessions/[^/]+/(actions|files)|actions:wait)")
_SMALL_BYTES = 512 * 1024

_STATUS_CODES = {
    401: ErrorCode.UNAUTHENTICATED,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    408: ErrorCode.UNAVAILABLE,
    409: ErrorCode.CONFLICT,
    413: ErrorCode.PAYLOAD_TOO_LARGE,
    425: ErrorCode.UNAVAILABLE,
    429: ErrorCode.RATE_LIMITED,
    501: ErrorCode.NOT_IMPLEMENTED,
}


def error_of(reply: Reply) -> errors.ServiceError | None:
    """The error an answer tells; None for an answer below 400.

    An error without our body is some gateway's: 5xx, 408 and 425 are passing (`retry`), 429 is `wait`.
    """
    if reply.status < 400:
        return None
    detail = _detail(reply)
    if detail is None:
        fallback = ErrorCode.UNAVAILABLE if reply.status >= 500 else ErrorCode.INVALID_REQUEST
        code = fallback if reply.status == 501 else _STATUS_CODES.get(reply.status, fallback)
        message = f"HTTP {reply.status} without an error of the service: {_excerpt(reply)}"
        if code is ErrorCode.PAYLOAD_TOO_LARGE:
            message += "; what is larger than the entrance carries goes as a file (upload, download)"
        error = errors.of_code(code, message)
        error.status = reply.status
        error.retry_after_s = _retry_after(reply.headers)
        return error
    error = errors.from_detail(detail, status=reply.status)
    if error.retry_after_s is None:
        error.retry_after_s = _retry_after(reply.headers)
    return error


def _detail(reply: Reply) -> ErrorDetail | None:
    try:
        body = json.loads(reply.content)
        if body["error"]["next"] not in set(Next):
            body["error"]["next"] = Next.GIVE_UP  # a newer service's word: not to be repeated blindly
        return ErrorBody.model_validate(body).error
    except (ValueError, KeyError, TypeError):  # pydantic's ValidationError is a ValueError
        return None


def _excerpt(reply: Reply) -> str:
    text = " ".join(reply.content[:300].decode("utf-8", "replace").split())
    return text or "empty body"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:  # absent, or a date: our own delay does
        return None
    return seconds if 0 <= seconds < 86_400 else None


def _by_function(send: Send, reply: Reply) -> Send | None:
    """The way past a gateway that has no router to ask, as while no host is there; None when it said something else."""
    if reply.status != 503 or _detail(reply) is not None or not _ROUTED.match(send.path):
        return None
    elsewhere = send.foreign or send.base_url is not None
    large = send.source is not None or len(send.content or b"") > _SMALL_BYTES
    if elsewhere or large or not send.repeatable:
        return None
    return replace(send, path=BY_FUNCTION + send.path)


class Patience:
    """Decides over the failures of one logical request: how long until the next attempt, or that it is over."""

    def __init__(self, context: Context, deadline: float | None) -> None:
        self._context = context
        self._deadline = deadline
        self._first_failure: float | None = None
        self._internal = 0
        # Full jitter: uniform from zero to the doubled bound, so that callers that failed together do not come
        # back together (AWS Architecture Blog, "Exponential Backoff And Jitter", read 2026-11).
        policy = context.policy
        self._backoff = wait_random_exponential(multiplier=policy.base_s, max=policy.cap_s)
        self._attempts = RetryCallState(Retrying(), None, (), {})
        self._attempts.attempt_number = 0

    def delay_after(self, error: errors.ServiceError, *, repeatable: bool) -> float:
        """Seconds to wait before the same request is sent again.

        Raises:
            ServiceError: `error` itself, when it should not be repeated (any more).
        """
        policy, now = self._context.policy, self._context.clock()
        if self._first_failure is None:
            self._first_failure = now
        self._attempts.attempt_number += 1
        if error.next is Next.WAIT:
            budget = policy.wait_for_s
        elif error.next is Next.RETRY and repeatable:
            budget = policy.retry_for_s
        else:
            raise error
        if error.code is ErrorCode.INTERNAL:
            self._internal += 1
            if self._internal >= policy.internal_attempts:
                raise error
        delay = (error.retry_after_s or 0.0) + self._backoff(self._attempts)
        if budget is not None and now + delay > self._first_failure + budget:
            raise error
        if self._deadline is not None and now + delay > self._deadline:
            raise error
        return delay


def call(context: Context, send: Send, *, deadline: float | None = None) -> Op[Reply]:
    """Send a request until it is answered below 400.

    Args:
        deadline: By the context's clock; no attempt starts after it. None leaves it to the policy.

    Raises:
        ServiceError: The service said no, or no answer came for as long as the policy allows.
    """
    patience = Patience(context, deadline)
    while True:
        repeatable = send.repeatable
        error: errors.ServiceError
        try:
            reply = reply_of((yield send))
            other = _by_function(send, reply)
            if other is not None:
                answer = reply_of((yield other))
                # Without it somebody else answered, who knows nothing of that way.
                if BY_FUNCTION_HEADER in answer.headers:
                    reply = answer
        except TransportFailed as failure:
            error = errors.ConnectionFailed(ErrorCode.UNAVAILABLE, f"no answer from the service at {failure}")
            repeatable = repeatable or not failure.arrived
        else:
            refusal = error_of(reply)
            if refusal is None:
                return reply
            error = refusal
        yield Sleep(patience.delay_after(error, repeatable=repeatable))
