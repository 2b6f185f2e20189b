"""The store on AWS: one DynamoDB table, read consistently by key and by partition; no index, no scan.

Every write is a `TransactWriteItems` under a token, also a single one: only that call is idempotent, so a lost answer
can be asked for again without writing twice. No operation is repeated here, nor by the SDK: `SteadyStore` above does
that, and knows the token; only in the midst of a read of several calls is one repeated, to keep what was read already.
Slowing down is done here (`dynamodb_pace.py`), and counted.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from provisioner.aws.clients import AwsClients
from provisioner.clock import Clock, SystemClock
from provisioner.store.dynamodb_errors import sdk_errors, typed
from provisioner.store.dynamodb_items import (
    client_token,
    decode_item,
    encode_key,
    fresh_version,
    transact_item,
)
from provisioner.store.dynamodb_pace import Busy, Gate, Pace
from provisioner.store.port import (
    ConditionFailed,
    Conflict,
    Key,
    Op,
    Page,
    Put,
    Stored,
    StoreError,
    StoreUnavailable,
    Throttled,
    Update,
)
from provisioner.store.rules import check_ops, check_query, check_sizes, encode

#: Keys of one BatchGetItem (API reference, read 2026-11).
_BATCH = 100
#: Times that a part of a larger read is asked for before the whole fails, and the pause after the first, in seconds
#: (each next one is twice as long, times a draw between a half and one).
_TRIES = 4
_PAUSE_S = 0.02


@dataclass(kw_only=True)
class StoreCounters:
    """What the table was asked, since the start of the process.

    Attributes:
        calls: Calls by API operation (`get_item` ...), answered or not.
        read_units, write_units: Request units, as DynamoDB reports them; refused calls are billed but not reported.
        throttled, conflicts, refused, unavailable: Calls that ended so (`refused`: a condition did not hold).
        unprocessed: Keys of batches that had to be asked for again.
        repeated: Calls repeated in the midst of a larger read.
        shed: Calls refused here, because too many waited.
    """

    calls: Counter[str] = field(default_factory=Counter)
    read_units: float = 0.0
    write_units: float = 0.0
    throttled: int = 0
    conflicts: int = 0
    refused: int = 0
    unavailable: int = 0
    unprocessed: int = 0
    repeated: int = 0
    shed: int = 0


class DynamoStore:
    """The `Store` port over a table that `provisioner/store/table.py` describes. Its calls also raise `StoreRefused`.

    Args:
        clients: Shared with others, and closed by whoever made them.
        table: The table's name.
        pace: How many calls at once; None begins at the most.
        clock, chance: For the pauses between unfinished batches.
    """

    def __init__(
        self,
        clients: AwsClients,
        table: str,
        *,
        pace: Pace | None = None,
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.counters = StoreCounters()
        self._clients = clients
        self._table = table
        self._clock = clock or SystemClock()
        self._chance = chance or random.Random()
        self.gate = Gate(pace or Pace(), self._clock.monotonic)
        self._closed = False

    async def __aenter__(self) -> DynamoStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, key: Key) -> Stored | None:
        """As the port says."""
        answer = await self._call("get_item", Key=encode_key(key), ConsistentRead=True, TableName=self._table)
        item = answer.get("Item")
        return decode_item(item) if item else None

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        """As the port says."""
        if len(keys) == 1:
            return [await self.get(keys[0])]
        unique = list(dict.fromkeys(keys))
        chunks = [unique[at : at + _BATCH] for at in range(0, len(unique), _BATCH)]
        answers = await asyncio.gather(
            *(self._batch(chunk, several=len(chunks) > 1) for chunk in chunks), return_exceptions=True
        )
        found: dict[Key, Stored] = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found |= answer
        return [found.get(key) for key in keys]

    async def query(
        self, pk: str, *, prefix: str = "", after: str | None = None, limit: int = 100, reverse: bool = False
    ) -> Page:
        """As the port says."""
        check_query(pk, after, limit)
        request: dict[str, Any] = {
            "TableName": self._table,
            "ConsistentRead": True,
            "ScanIndexForward": not reverse,
            "KeyConditionExpression": "pk = :pk AND begins_with(sk, :prefix)" if prefix else "pk = :pk",
            "ExpressionAttributeValues": {":pk": {"S": pk}} | ({":prefix": {"S": prefix}} if prefix else {}),
        }
        if after is not None:
            if _is_past(after, prefix, reverse):
                return Page(items=(), after=None)
            if after and after.startswith(prefix):
                request["ExclusiveStartKey"] = {"pk": {"S": pk}, "sk": {"S": after}}
        found: list[Stored] = []
        while True:
            # One more than asked says whether there are more.
            part = {**request, "Limit": limit + 1 - len(found)}
            answer = await (self._part("query", part) if found else self._call("query", **part))
            found += [decode_item(item) for item in answer["Items"]]
            request["ExclusiveStartKey"] = answer.get("LastEvaluatedKey")
            if not request["ExclusiveStartKey"] or len(found) > limit:
                break
        more = len(found) > limit
        return Page(items=tuple(found[:limit]), after=found[limit - 1].key.sk if more else None)

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        """As the port says."""
        check_ops(ops)
        check_sizes(
            (op.key, item, encode(item), op.expires_at is not None)
            for op in ops
            if isinstance(op, Put | Update)
            for item in [op.item if isinstance(op, Put) else op.set]
        )
        token = token or secrets.token_hex(16)
        items = [
            transact_item(self._table, op, fresh=fresh_version(token, index)) for index, op in enumerate(ops)
        ]
        await self._call("transact_write_items", TransactItems=items, ClientRequestToken=client_token(token))

    @property
    def counts(self) -> Mapping[str, float]:
        """What `StoreCounters` says, calls by operation, and how many calls may run at once (`limit`) and wait."""
        told = {name: float(value) for name, value in vars(self.counters).items() if name != "calls"}
        told |= {name: float(value) for name, value in self.counters.calls.items()}
        return told | {"limit": float(int(self.gate.pace.limit)), "waiting": float(self.gate.waiting)}

    async def close(self) -> None:
        """As the port says. The clients stay open."""
        self._closed = True
        await self.gate.idle()

    async def _batch(self, keys: list[Key], *, several: bool) -> dict[Key, Stored]:
        found: dict[Key, Stored] = {}
        asked = [encode_key(key) for key in keys]
        empty = 0
        while asked:
            request = {self._table: {"Keys": asked, "ConsistentRead": True}}
            part = {"RequestItems": request}
            answer = await (
                self._part("batch_get_item", part)
                if several or found
                else self._call("batch_get_item", **part)
            )
            items = answer.get("Responses", {}).get(self._table, [])
            for item in items:
                stored = decode_item(item)
                found[stored.key] = stored
            asked = answer.get("UnprocessedKeys", {}).get(self._table, {}).get("Keys", [])
            if not asked:
                break
            self.counters.unprocessed += len(asked)
            empty = 0 if items else empty + 1
            if empty:
                self._throttled()
            if empty >= _TRIES:
                raise Throttled(f"{len(asked)} keys of a batch are left unprocessed")
            await self._pause(empty)
        return found

    async def _part(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        """A call in the midst of a larger read."""
        for failures in range(_TRIES - 1):
            try:
                return await self._call(operation, **request)
            except (Throttled, StoreUnavailable):
                if self._closed:
                    raise
                self.counters.repeated += 1
                await self._pause(failures)
        return await self._call(operation, **request)

    async def _pause(self, failures: int) -> None:
        await self._clock.sleep(_PAUSE_S * 2**failures * (0.5 + self._chance.random() / 2))

    async def _call(self, operation: str, **request: Any) -> dict[str, Any]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        try:
            async with self.gate:
                return await self._ask(operation, request)
        except Busy as error:
            self.counters.shed += 1
            raise Throttled(str(error)) from error

    async def _ask(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        self.counters.calls[operation] += 1
        try:
            client = await self._clients.get("dynamodb")
            answer: dict[str, Any] = await getattr(client, operation)(
                ReturnConsumedCapacity="TOTAL", **request
            )
        except sdk_errors() as error:
            refused = typed(error)
            self._count(refused)
            raise refused from error
        self.gate.succeeded()
        self._consume(operation, answer.get("ConsumedCapacity"))
        return answer

    def _count(self, error: StoreError) -> None:
        match error:
            case Throttled():
                self._throttled()
            case Conflict():
                self.counters.conflicts += 1
            case ConditionFailed():
                self.counters.refused += 1
            case StoreUnavailable():
                self.counters.unavailable += 1

    def _throttled(self) -> None:
        self.counters.throttled += 1
        self.gate.throttled()

    def _consume(self, operation: str, consumed: Any) -> None:
        for each in consumed if isinstance(consumed, list) else [consumed] if consumed else []:
            units = float(each.get("CapacityUnits", 0.0))
            # A repeat under a known token writes nothing and is billed as a read.
            read = float(each.get("ReadCapacityUnits", 0.0 if operation == "transact_write_items" else units))
            self.counters.read_units += read
            self.counters.write_units += units - read


def _is_past(after: str, prefix: str, reverse: bool) -> bool:
    """Whether nothing with this prefix comes after `after`. DynamoDB refuses a start outside of what is asked for."""
    if after.startswith(prefix):
        return reverse and not after
    return after < prefix if reverse else after > prefix
