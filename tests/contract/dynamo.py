"""DynamoDB for tests: a fresh table on MiniStack, and a layer between the adapter and the SDK's client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from provisioner.aws.clients import AwsClients
from provisioner.store.dynamodb import DynamoStore, StoreCounters
from provisioner.store.dynamodb_items import decode_item
from provisioner.store.fake import FakeStore
from provisioner.store.port import Key, Op, Page, Stored, Value
from provisioner.store.table import TTL_ATTRIBUTE, create_table
from tests.emulators import CREDENTIALS, REGION, aws_clients, fresh_name

T = TypeVar("T")


class WrappedClients(AwsClients):
    """Clients behind a layer."""

    def __init__(self, url: str, wrap: Callable[[Any], Any] | None) -> None:
        super().__init__(region=REGION, endpoint=url, credentials=CREDENTIALS)
        self._wrap = wrap
        self._wrapped: dict[str, Any] = {}

    async def get(self, service: str) -> Any:
        client = await super().get(service)
        if self._wrap is None:
            return client
        if service not in self._wrapped:
            self._wrapped[service] = self._wrap(client)
        return self._wrapped[service]


@asynccontextmanager
async def dynamo_store(
    url: str, *, wrap: Callable[[Any], Any] | None = None, **options: Any
) -> AsyncIterator[tuple[DynamoStore, str]]:
    """A store on a fresh table, and the table's name; the table goes in the end."""
    plain, clients = WrappedClients(url, None), WrappedClients(url, wrap)
    table = fresh_name("shoal")
    try:
        await create_table(plain, table)
        # Tests live in other years, and the emulator's clean-up in this one: it would take their items away.
        ttl = {"Enabled": False, "AttributeName": TTL_ATTRIBUTE}
        await (await plain.get("dynamodb")).update_time_to_live(TableName=table, TimeToLiveSpecification=ttl)
        async with DynamoStore(clients, table, **options) as store:
            yield store, table
        await (await plain.get("dynamodb")).delete_table(TableName=table)
    finally:
        await clients.close()
        await plain.close()


class InlineDynamoStore(FakeStore):
    """A scripted store over DynamoDB for tests in virtual time: each call is done before its caller's loop goes on.

    Calls run on a loop of their own in a thread; `dump` reads the whole table.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(**options)
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inline-dynamo", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._inner, self.table = self._now(self._stack.enter_async_context(dynamo_store(url)))

    async def get(self, key: Key) -> Stored | None:
        lost = await self._begin(f"get {key.pk} {key.sk}")
        found: Stored | None = self._now(self._inner.get(key))
        self._end(lost)
        return found

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        lost = await self._begin(f"get_many {len(keys)}")
        found: list[Stored | None] = self._now(self._inner.get_many(keys))
        self._end(lost)
        return found

    async def query(
        self, pk: str, *, prefix: str = "", after: str | None = None, limit: int = 100, reverse: bool = False
    ) -> Page:
        lost = await self._begin(f"query {pk} {prefix}")
        page: Page = self._now(
            self._inner.query(pk, prefix=prefix, after=after, limit=limit, reverse=reverse)
        )
        self._end(lost)
        return page

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        lost = await self._begin("transact " + " ".join(f"{type(op).__name__}:{op.key.pk}" for op in ops))
        self._now(self._inner.transact(ops, token=token))
        self._end(lost)

    def dump(self) -> dict[Key, dict[str, Value]]:
        async def read() -> dict[Key, dict[str, Value]]:
            clients = aws_clients(self._url)
            try:
                pages = (await clients.get("dynamodb")).get_paginator("scan").paginate(TableName=self.table)
                found = [decode_item(item) async for page in pages for item in page["Items"]]
            finally:
                await clients.close()
            return {stored.key: dict(stored.item) for stored in found}

        return self._now(read())

    @property
    def counters(self) -> StoreCounters:
        return self._inner.counters

    def end(self) -> None:
        """Take the table away and stop the thread."""
        self._now(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _now(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)
