"""`python -m provisioner.admin` (and so `shoal admin`): what an operator does to a deployment on AWS, once.

Exit codes: 0 done, or done already; 1 it could not be done, with a sentence on stderr; 2 wrong options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

from provisioner.auth import DEFAULT_TENANT, Auth, NewKey
from provisioner.aws.clients import AwsClients
from provisioner.clock import SystemClock
from provisioner.store.dynamodb import DynamoStore
from provisioner.store.dynamodb_errors import StoreRefused
from provisioner.store.port import StoreError
from provisioner.store.steady import SteadyStore
from provisioner.store.table import TableOptions, create_table
from shoal.contract.errors import ShoalError
from shoal.contract.states import Scope

#: Where the table's name is looked for when no option names it; also what the service itself reads.
TABLE_VARIABLE = "SHOAL_AWS_TABLE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    options = _parser().parse_args(argv)
    if not options.table:
        print(f"shoal: name the table: --table, or {TABLE_VARIABLE}", file=sys.stderr)
        return 2
    try:
        told, text, note = asyncio.run(options.run(options))
    except (StoreError, ShoalError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(told))
    else:
        if note:
            print(note, file=sys.stderr)
        if text:
            print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal admin", description="What an operator does on AWS, once.")
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="the table that keeps state").add_subparsers(
        dest="table_command", required=True
    )
    create = table.add_parser("create", help="make it, or complete the one that is there")
    _add_where(create)
    create.add_argument("--no-stream", dest="stream", action="store_false", help="no stream of changes")
    create.add_argument("--recovery", action="store_true", help="point-in-time recovery (billed by size)")
    create.add_argument("--protect", action="store_true", help="refuse to delete the table")
    create.add_argument("--kms-key", default=None, help="encrypt with this key (default: DynamoDB's own)")
    create.add_argument("--warm-writes", type=int, default=None, help="write units/s from the start")
    create.add_argument("--warm-reads", type=int, default=None, help="read units/s from the start")
    create.add_argument("--tag", action="append", default=[], type=_tag, metavar="KEY=VALUE")
    create.set_defaults(run=_create)
    bootstrap = commands.add_parser("bootstrap", help="make the first tenant and its admin key")
    _add_where(bootstrap)
    bootstrap.add_argument(
        "--another-key", action="store_true", help="make one more admin key where there is one"
    )
    bootstrap.set_defaults(run=_bootstrap)
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", default=os.environ.get(TABLE_VARIABLE), help=f"default: {TABLE_VARIABLE}")
    parser.add_argument("--region", default=None, help="default: the SDK's own (AWS_REGION, profile)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _tag(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not key or not found:
        raise argparse.ArgumentTypeError("is KEY=VALUE")
    return key, value


_Told = tuple[dict[str, Any], str, str]


async def _create(options: argparse.Namespace) -> _Told:
    clients = AwsClients(region=options.region)
    try:
        made = await create_table(
            clients,
            options.table,
            TableOptions(
                stream=options.stream,
                point_in_time_recovery=options.recovery,
                deletion_protection=options.protect,
                kms_key_id=options.kms_key,
                warm_writes=options.warm_writes,
                warm_reads=options.warm_reads,
                tags=dict(options.tag),
            ),
        )
    finally:
        await clients.close()
    told = {"table": made.name, "created": made.created, "stream_arn": made.stream_arn}
    note = f"the table {made.name} is {'made' if made.created else 'there already'}, and active"
    return told, made.name, note


async def _bootstrap(options: argparse.Namespace) -> _Told:
    clients = AwsClients(region=options.region)
    clock = SystemClock()
    store = SteadyStore(DynamoStore(clients, options.table), clock, random.Random())
    try:
        await _look(clients, options.table)
        auth = Auth(store, clock)
        key = await auth.bootstrap()
        created = key is not None
        if key is None and options.another_key:
            key = await auth.make_key(DEFAULT_TENANT, "admin", (Scope.ADMIN,))
    finally:
        await store.close()
        await clients.close()
    return _told_of_key(options.table, key, created=created)


async def _look(clients: AwsClients, table: str) -> None:
    """That credentials, Region and table are there, told at once rather than after repeats.

    Raises:
        StoreError: They are not.
    """
    from provisioner.store.dynamodb_errors import sdk_errors, typed

    try:
        client = await clients.get("dynamodb")
        status = (await client.describe_table(TableName=table))["Table"]["TableStatus"]
    except sdk_errors() as error:
        raise typed(error) from error
    if status not in ("ACTIVE", "UPDATING"):
        raise StoreRefused(f"the table {table} is {status}; try again when it is active")


def _told_of_key(table: str, key: NewKey | None, *, created: bool) -> _Told:
    told: dict[str, Any] = {"table": table, "tenant": str(DEFAULT_TENANT), "created": created}
    if key is None:
        note = (
            f"the table {table} has its first tenant already; its key was shown then and is kept nowhere. "
            "--another-key makes one more"
        )
        return told | {"api_key": None}, "", note
    note = (
        "This admin key is shown this once; keep it where secrets are kept. Next:\n"
        "  export SHOAL_URL=<the endpoint> SHOAL_API_KEY=<this key>\n"
        "  shoal image push <directory> <name:tag>\n"
        "  shoal run <name:tag> echo it works"
    )
    return told | {"api_key": key.secret, "key_id": key.key.id}, key.secret, note


if __name__ == "__main__":
    raise SystemExit(main())
