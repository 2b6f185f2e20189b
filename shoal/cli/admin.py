"""`shoal admin`: what an operator does to a deployment on AWS, once; the server's own program does it."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from shoal.cli import server
from shoal.cli.output import Fail, Json

app = typer.Typer(
    help="What an operator does to a deployment on AWS, once.", no_args_is_help=True, rich_markup_mode=None
)
_table = typer.Typer(help="The table that keeps state.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(_table, name="table")

Table = Annotated[str | None, typer.Option("--table", help="The table's name (default: SHOAL_AWS_TABLE).")]
Region = Annotated[
    str | None, typer.Option("--region", help="AWS Region (default: the SDK's own, as AWS_REGION).")
]


@_table.command("create")
def create(
    table: Table = None,
    region: Region = None,
    stream: Annotated[
        bool, typer.Option(help="A stream of changes, which wakes the reconciler Lambda.")
    ] = True,
    recovery: Annotated[
        bool, typer.Option("--recovery", help="Point-in-time recovery; billed by size.")
    ] = False,
    protect: Annotated[bool, typer.Option("--protect", help="Refuse to delete the table.")] = False,
    kms_key: Annotated[
        str | None, typer.Option(help="Encrypt with this KMS key (default: DynamoDB's own).")
    ] = None,
    warm_writes: Annotated[
        int | None, typer.Option(min=4000, help="Write units per second from the start; billed once.")
    ] = None,
    warm_reads: Annotated[
        int | None, typer.Option(min=12000, help="Read units per second from the start; billed once.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, for cost allocation; repeatable.")] = None,
    json: Json = False,
) -> None:
    """Make the table, or complete the one that is there; return when it is active. Repeatable."""
    arguments = _where(table, region)
    arguments += [] if stream else ["--no-stream"]
    arguments += ["--recovery"] if recovery else []
    arguments += ["--protect"] if protect else []
    given = {"--kms-key": kms_key, "--warm-writes": warm_writes, "--warm-reads": warm_reads}
    arguments += [part for name, value in given.items() if value is not None for part in (name, str(value))]
    arguments += [part for each in tag or [] for part in ("--tag", each)]
    _run("table", "create", *arguments, json=json)


@app.command("bootstrap")
def bootstrap(
    table: Table = None,
    region: Region = None,
    another_key: Annotated[
        bool, typer.Option("--another-key", help="Make one more admin key where there is one already.")
    ] = False,
    json: Json = False,
) -> None:
    """Make the first tenant and its admin key in the table; the key is printed this once. Repeatable."""
    _run("bootstrap", *_where(table, region), *(["--another-key"] if another_key else []), json=json)


def _where(table: str | None, region: str | None) -> list[str]:
    given = {"--table": table, "--region": region}
    return [part for name, value in given.items() if value is not None for part in (name, value)]


def _run(*arguments: str, json: bool) -> None:
    command = [*server.server_python("provisioner.admin"), *arguments, *(["--json"] if json else [])]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    said = done.stderr.strip()
    if done.returncode:
        raise Fail(said.removeprefix("shoal: ") or f"it ended with code {done.returncode}")
    if said:
        print(said, file=sys.stderr)
