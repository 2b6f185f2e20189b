"""DynamoDB for tests: a fresh table on MiniStack, and a layer between the adapter and the SDK's client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from provisioner.aws.clients import AwsClients
from provisioner.store.dynamodb import DynamoStore
from provisioner.store.table import create_table
from tests.emulators import CREDENTIALS, REGION, fresh_name


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
        async with DynamoStore(clients, table, **options) as store:
            yield store, table
        await (await plain.get("dynamodb")).delete_table(TableName=table)
    finally:
        await clients.close()
        await plain.close()
