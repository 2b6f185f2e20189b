"""A layer between the DynamoDB adapter and the SDK's client that is as unkind as DynamoDB may be.

Emulators are kinder. What DynamoDB does and MiniStack does not, and this layer adds (API reference, read 2026-11):

- two transactions at one item at once: the later one is cancelled with `TransactionConflict` (MiniStack does one after
  the other); a second call with a token under way gets `TransactionInProgressException`;
- throttles, in every form they come in: of the whole call, of one item of a transaction, as keys left unprocessed;
- answers lost after the effect, connections lost before it, server errors;
- pages of a query that end before their limit.

It also refuses what the adapter promised never to ask for: a scan, an index, an inconsistent read, a write without a
token, more than 100 operations or 4 MB a transaction, an item over 400 KB.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    ReadTimeoutError,
)

_URL = "http://127.0.0.1"
_CALL_S = 0.003
_ITEM_BYTES = 400 * 1024
_TRANSACTION_BYTES = 4 * 1024 * 1024
_EXPRESSION_BYTES = 4096


def client_error(operation: str, code: str, message: str, status: int = 400, **more: Any) -> ClientError:
    """What the SDK raises for an error that DynamoDB answered."""
    response = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "RetryAttempts": 0},
        **more,
    }
    return ClientError(response, operation)


def cancelled(reasons: list[dict[str, Any]]) -> ClientError:
    """A cancelled transaction."""
    codes = ", ".join(reason["Code"] for reason in reasons)
    message = f"Transaction cancelled, please refer cancellation reasons for specific reasons [{codes}]"
    return client_error(
        "TransactWriteItems", "TransactionCanceledException", message, CancellationReasons=reasons
    )


class HostileClient:
    """DynamoDB's client at its worst.

    Args:
        share: Of the calls that fail by injection; the same call fails three times in a row at the most.
        conflicts: Whether transactions that meet at an item conflict.

    Attributes:
        injected: How often each kind of failure was injected.
    """

    def __init__(self, client: Any, *, seed: int = 5, share: float = 0.0, conflicts: bool = False) -> None:
        self._client = client
        self._chance = random.Random(seed)
        self._share = share
        self._conflicts = conflicts
        self._failed: dict[str, int] = {}
        self._items: set[str] = set()
        self._tokens: set[str] = set()
        self.injected: dict[str, int] = {}

    async def get_item(self, **request: Any) -> Any:
        assert request["ConsistentRead"] is True
        return await self._bad(
            "GetItem", json.dumps(request["Key"]), lambda: self._client.get_item(**request)
        )

    async def batch_get_item(self, **request: Any) -> Any:
        ((table, about),) = request["RequestItems"].items()
        assert about["ConsistentRead"] is True
        assert len(about["Keys"]) <= 100
        left: list[Any] = []
        if self._share and self._chance.random() < 0.5:
            self._count("unprocessed")
            keep = self._chance.randrange(len(about["Keys"]) + 1)
            about, left = {**about, "Keys": about["Keys"][:keep]}, about["Keys"][keep:]
            if not keep and self._failed.get("empty", 0) >= 2:
                about, left = {**about, "Keys": left}, []
            self._failed["empty"] = 0 if keep else self._failed.get("empty", 0) + 1
        if not about["Keys"]:
            return {"Responses": {}, "UnprocessedKeys": {table: {**about, "Keys": left}}}
        request["RequestItems"] = {table: about}
        name = json.dumps(about["Keys"][0])
        answer = await self._bad("BatchGetItem", name, lambda: self._client.batch_get_item(**request))
        if left:
            answer["UnprocessedKeys"] = {table: {**about, "Keys": left}}
        return answer

    async def query(self, **request: Any) -> Any:
        assert request["ConsistentRead"] is True
        assert "IndexName" not in request
        values = request["ExpressionAttributeValues"]
        prefix = values.get(":prefix", {"S": ""})["S"]
        start = request.get("ExclusiveStartKey")
        if start is None:
            request.pop("ExclusiveStartKey", None)
        elif not start["sk"]["S"].startswith(prefix) or start["pk"] != values[":pk"]:
            message = "The provided starting key is outside query boundaries based on provided conditions"
            raise client_error("Query", "ValidationException", message)
        if self._share:
            request["Limit"] = self._chance.randint(1, request["Limit"])
        return await self._bad("Query", values[":pk"]["S"], lambda: self._client.query(**request))

    async def transact_write_items(self, **request: Any) -> Any:
        items = request["TransactItems"]
        token = request["ClientRequestToken"]
        assert 1 <= len(token) <= 36
        self._refuse(items)
        if not self._conflicts:
            return await self._bad(
                "TransactWriteItems", token, lambda: self._client.transact_write_items(**request), items=items
            )
        touched = [_target(item) for item in items]
        # A call takes its time: others run in between, or who repeats at once would keep the first from ending.
        await asyncio.sleep(_CALL_S)
        if token in self._tokens:
            self._count("TransactionInProgressException")
            message = "The transaction with the given request token is already in progress."
            raise client_error("TransactWriteItems", "TransactionInProgressException", message)
        if any(target in self._items for target in touched):
            self._count("TransactionConflict")
            raise cancelled(
                [{"Code": "TransactionConflict" if target in self._items else "None"} for target in touched]
            )
        self._items.update(touched)
        self._tokens.add(token)
        try:
            await asyncio.sleep(0)
            return await self._client.transact_write_items(**request)
        finally:
            self._items.difference_update(touched)
            self._tokens.discard(token)

    def _refuse(self, items: list[dict[str, Any]]) -> None:
        operation = "TransactWriteItems"
        if len(items) > 100:
            message = "Member must have length less than or equal to 100"
            raise client_error(operation, "ValidationException", message)
        if len({_target(item) for item in items}) < len(items):
            message = "Transaction request cannot include multiple operations on one item"
            raise client_error(operation, "ValidationException", message)
        for (about,) in (item.values() for item in items):
            if len(json.dumps(about.get("Item", {}), ensure_ascii=False).encode()) > 2 * _ITEM_BYTES:
                message = "Item size has exceeded the maximum allowed size"
                raise client_error(operation, "ValidationException", message)
            for expression in ("ConditionExpression", "UpdateExpression"):
                if len(about.get(expression, "").encode()) > _EXPRESSION_BYTES:
                    message = f"Invalid {expression}: Expression size has exceeded the maximum allowed size"
                    raise client_error(operation, "ValidationException", message)
        if len(json.dumps(items, ensure_ascii=False).encode()) > _TRANSACTION_BYTES:
            raise client_error(
                operation, "ValidationException", "Transaction request exceeds the 4MB transaction size limit"
            )

    async def _bad(self, operation: str, name: str, call: Any, *, items: list[Any] | None = None) -> Any:
        name = f"{operation} {name}"
        failed = self._failed.get(name, 0)
        if failed >= 3 or self._chance.random() >= self._share:
            self._failed.pop(name, None)
            return await call()
        self._failed[name] = failed + 1
        kinds = ["throttled", "provisioned", "limit", "server", "refused connection", "lost", "late"]
        if items is not None:
            kinds += ["conflict", "item throttled", "in progress", "lost", "late"]
        kind = self._chance.choice(kinds)
        self._count(kind)
        match kind:
            case "throttled":
                raise client_error(operation, "ThrottlingException", "Rate of requests exceeds the limit")
            case "provisioned":
                code = "ProvisionedThroughputExceededException"
                raise client_error(operation, code, "The level of configured throughput was exceeded")
            case "limit":
                raise client_error(operation, "RequestLimitExceeded", "Throughput exceeds the current limit")
            case "server":
                raise client_error(operation, "InternalServerError", "Internal server error", 500)
            case "refused connection":
                raise EndpointConnectionError(endpoint_url=_URL)
            case "lost":
                await call()
                raise ConnectionClosedError(endpoint_url=_URL)
            case "late":
                await call()
                raise ReadTimeoutError(endpoint_url=_URL)
            case "in progress":
                raise client_error(operation, "TransactionInProgressException", "already in progress")
            case _:
                assert items is not None
                code = "TransactionConflict" if kind == "conflict" else "ThrottlingError"
                at = self._chance.randrange(len(items))
                raise cancelled([{"Code": code if index == at else "None"} for index in range(len(items))])

    def _count(self, kind: str) -> None:
        self.injected[kind] = self.injected.get(kind, 0) + 1


def _target(item: dict[str, Any]) -> str:
    (about,) = item.values()
    keys = about.get("Key") or about["Item"]
    return json.dumps([keys["pk"], keys["sk"]])
