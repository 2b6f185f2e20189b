"""What the SDK raises, as the store port's errors.

    StoreError (port.py)
    └── StoreRefused        the caller's setup or program is at fault: no credentials, no table, no permission, an
                            invalid request; repeating does not help

Codes: DynamoDB's "Error handling" and the API reference of TransactWriteItems, read 2026-11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from provisioner.store.dynamodb_items import decode_item
from provisioner.store.port import (
    ConditionFailed,
    Conflict,
    StoreError,
    StoreUnavailable,
    Throttled,
    TokenReused,
    TooLarge,
)


class StoreRefused(StoreError):
    """DynamoDB, or the SDK, will not do this however often it is asked; the message says what to put right."""


#: Of an error, and of the reasons of a cancelled transaction.
_CONFLICT = frozenset(
    {"TransactionConflict", "TransactionConflictException", "ReplicatedWriteConflictException"}
)
_THROTTLED = frozenset(
    {
        "ThrottlingError",
        "ThrottlingException",
        "Throttling",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "LimitExceededException",
    }
)
#: Another call with the same token is under way: it may write yet.
_UNDER_WAY = frozenset({"TransactionInProgressException"})
_TOO_LARGE = (
    "size has exceeded",
    "size to update has exceeded",
    "transaction size limit",
    "cannot exceed 4 MB",
)
_ADVICE = {
    "ResourceNotFoundException": "there is no such table in this Region: `shoal admin table create` makes it",
    "AccessDeniedException": "the credentials lack a permission on the table",
    "UnrecognizedClientException": "the credentials are not known",
    "InvalidSignatureException": "the credentials are wrong, or this machine's clock is",
    "ExpiredTokenException": "the credentials have expired",
}


def sdk_errors() -> tuple[type[Exception], ...]:
    """What a call through the SDK may raise. (A function, so that importing this module does not import the SDK.)"""
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    return (ClientError, BotoCoreError, aiohttp.ClientError, OSError)


def typed(error: Exception) -> StoreError:
    """The port's error for one of `sdk_errors`."""
    from botocore.exceptions import ClientError

    return _answered(error.response) if isinstance(error, ClientError) else unanswered(error)


def unanswered(error: Exception) -> StoreError:
    """The port's error when there was no answer, or no request at all."""
    from botocore import exceptions

    text = f"{type(error).__name__}: {error}"
    if isinstance(error, exceptions.NoRegionError):
        return StoreRefused("no AWS Region is set: set AWS_REGION")
    if isinstance(
        error,
        exceptions.NoCredentialsError
        | exceptions.PartialCredentialsError
        | exceptions.CredentialRetrievalError,
    ):
        return StoreRefused(f"no AWS credentials were found ({text}): see the SDK's credential chain")
    connection = exceptions.HTTPClientError | exceptions.ConnectionError | exceptions.IncompleteReadError
    if isinstance(error, exceptions.BotoCoreError) and not isinstance(error, connection):
        return StoreRefused(text)
    return StoreUnavailable(text)


def _answered(response: Mapping[str, Any]) -> StoreError:
    about = response.get("Error", {})
    code, message = str(about.get("Code", "")), str(about.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "TransactionCanceledException":
        return _cancelled(response.get("CancellationReasons") or [], message)
    if code in _CONFLICT:
        return Conflict(message)
    if code in _THROTTLED:
        return Throttled(f"{code}: {message}")
    if code in _UNDER_WAY:
        return StoreUnavailable(f"a transaction with this token is under way: {message}")
    if code == "IdempotentParameterMismatchException":
        return TokenReused(message)
    if code in ("ItemCollectionSizeLimitExceededException", "RequestEntityTooLarge") or status == 413:
        return TooLarge(message)
    if code == "ValidationException" and any(part in message for part in _TOO_LARGE):
        return TooLarge(message)
    if status >= 500 or code in ("InternalServerError", "ServiceUnavailable", "InternalFailure"):
        return StoreUnavailable(f"{code}: {message}")
    advice = _ADVICE.get(code)
    return StoreRefused(f"{code}: {message}" + (f" ({advice})" if advice else ""))


def _cancelled(reasons: Sequence[Mapping[str, Any]], message: str) -> StoreError:
    """The first reason that is one. What stands before a failed condition and could not be looked at (a conflict, a
    throttle) might have failed as well, and callers tell failures apart by the first: so that is repeated."""
    for index, reason in enumerate(reasons):
        code = reason.get("Code") or "None"
        said = str(reason.get("Message") or message)
        if code == "None":
            continue
        if code == "ConditionalCheckFailed":
            item = reason.get("Item")
            return ConditionFailed(index, decode_item(item) if item else None)
        if code in _CONFLICT:
            return Conflict(said)
        if code in _THROTTLED:
            return Throttled(f"{code}: {said}")
        if any(part in said for part in _TOO_LARGE):
            return TooLarge(said)
        return StoreRefused(f"operation {index}: {code}: {said}")
    return StoreUnavailable(message)
