"""`python -m bench.state`: how fast state is written through the DynamoDB adapter, beside the emulator's own rate.

    raw_put_per_s           conditional PutItem, straight through the SDK: what the emulator and the SDK can do
    raw_transact_per_s      TransactWriteItems of one conditional put, the same way
    adapter_put_per_s       the same put through `DynamoStore`: what the adapter costs
    ..._cpu_ms              CPU of this process (not of the emulator) for one of them; a busy machine changes it least
    create_per_s            creates through the use cases over `DynamoStore`, each to a running session on a fake host
    of_one_create           calls and request units of one create, as the table reported them

Everything is on this machine: the emulator's process takes its share of the same cores, and is what is busy. Only the
ratios say something; DynamoDB's own rate is not measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from provisioner.aws.clients import AwsClients
from provisioner.settings import ProvisionerSettings
from provisioner.store.dynamodb import DynamoStore
from provisioner.store.dynamodb_items import transact_item
from provisioner.store.port import Absent, Key, Put
from provisioner.store.table import create_table
from shoal.contract.host import Capacity
from shoal.contract.sessions import ResourcesAsked, SessionCreate
from tests.emulators import aws_clients, emulator, fresh_name
from tests.unit.provisioner.world import IMAGE, WHO, World, pool

AT_ONCE = 64
ROUNDS = 5
#: A session's record is about so large.
ITEM = {"state": "pending", "image": "code:1", "text": "x" * 700, "n": 1, "none": None}
HOST = Capacity(cpu_millis=10**9, memory_mib=10**9, disk_mib=10**9, sandboxes=10**6)


async def per_s(count: int, at_once: int, one: Callable[[int], Awaitable[Any]]) -> float:
    """How many a second, with so many under way."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return count / (time.perf_counter() - begun)


async def writes(clients: AwsClients, table: str, count: int) -> dict[str, float]:
    """The rates of single conditional puts."""
    client = await clients.get("dynamodb")
    store = DynamoStore(clients, table)

    def put(kind: str, number: int) -> Put:
        return Put(key=Key(pk=f"{kind}#{number}", sk="-"), item=ITEM, conditions=(Absent(),))

    async def raw(number: int) -> None:
        about = transact_item(table, put("raw", number), fresh=0)["Put"]
        del about["ReturnValuesOnConditionCheckFailure"]
        await client.put_item(**about)

    async def transact(number: int) -> None:
        await client.transact_write_items(TransactItems=[transact_item(table, put("tx", number), fresh=0)])

    async def ours(number: int) -> None:
        await store.transact([put("ours", number)])

    await per_s(count // 10, AT_ONCE, lambda number: store.transact([put("warm", number)]))
    kinds = {"raw_put": raw, "raw_transact": transact, "adapter_put": ours}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_s: dict[str, float] = dict.fromkeys(kinds, 0.0)
    part = count // ROUNDS
    # By turns, so that what else runs on the machine meets all of them.
    for round_ in range(ROUNDS):
        for kind, one in kinds.items():
            begun = time.process_time()
            rates[kind].append(await per_s(part, AT_ONCE, partial(_shifted, one, round_ * part)))
            cpu_s[kind] += time.process_time() - begun
    told = {f"{kind}_per_s": round(statistics.median(found), 1) for kind, found in rates.items()}
    return told | {f"{kind}_cpu_ms": round(spent / count * 1000, 2) for kind, spent in cpu_s.items()}


async def _shifted(one: Callable[[int], Awaitable[None]], by: int, number: int) -> None:
    await one(by + number)


async def creates(clients: AwsClients, table: str, count: int) -> dict[str, Any]:
    """The rate of creates, and what one costs."""
    store = DynamoStore(clients, table)
    world = World(store=store, settings=ProvisionerSettings(pools=(pool(max_hosts=1, host_capacity=HOST),)))

    async def time_passes() -> None:
        while True:
            await asyncio.sleep(0.02)
            await world.clock.advance(0.02)

    passing = asyncio.create_task(time_passes())
    try:
        await world.open()
        await world.host(capacity=HOST)
        body = SessionCreate(
            image=IMAGE, resources=ResourcesAsked(cpu_millis=100, memory_mib=64, disk_mib=64)
        )

        async def create(number: int) -> None:
            made = await world.services.sessions.create(WHO, body, idempotency_key=f"key-{number}", wait_s=0)
            assert made.created

        await per_s(AT_ONCE, AT_ONCE, lambda number: create(-1 - number))
        await world.services.context.background.idle()
        before = calls(store)
        rate = await per_s(count, AT_ONCE, create)
        await world.services.context.background.idle()
        after = calls(store)
    finally:
        passing.cancel()
        with suppress(asyncio.CancelledError):
            await passing
    one = {name: round((after[name] - before[name]) / count, 2) for name in after}
    return {"create_per_s": round(rate, 1), "of_one_create": one}


def calls(store: DynamoStore) -> dict[str, float]:
    """What the table was asked so far."""
    counted = {"read_units": store.counters.read_units, "write_units": store.counters.write_units}
    names = ("get_item", "batch_get_item", "query", "transact_write_items")
    return counted | {name: store.counters.calls[name] for name in names}


async def measured(url: str, count: int) -> dict[str, Any]:
    """All figures."""
    clients = aws_clients(url)
    try:
        tables = fresh_name("bench"), fresh_name("bench")
        for table in tables:
            await create_table(clients, table)
        found = {"items": count, "at_once": AT_ONCE, **await writes(clients, tables[0], count)}
        found |= await creates(clients, tables[1], max(64, count // 4))
    finally:
        await clients.close()
    found["adapter_of_raw_transact"] = round(found["adapter_put_per_s"] / found["raw_transact_per_s"], 2)
    found["create_of_raw_put"] = round(found["create_per_s"] / found["raw_put_per_s"], 3)
    return found


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.state", description=__doc__)
    parser.add_argument("--items", type=int, default=4000)
    options = parser.parse_args()
    with emulator("ministack", SERVICES="dynamodb") as url:
        print(json.dumps(asyncio.run(measured(url, options.items)), indent=1))


if __name__ == "__main__":
    main()
