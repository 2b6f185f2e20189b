"""`shoal snapshot`, `fork` and `snapshots ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli import asking
from shoal.cli.output import Json, emit, phases, print_json, size, table, when

app = typer.Typer(help="List, show and remove snapshots.", no_args_is_help=True, rich_markup_mode=None)


def snapshot(
    session: asking.SessionArg,
    run: asking.RunOption = None,
    label: asking.Labels = None,
    wait: Annotated[bool, typer.Option(help="Wait until it is durable.")] = True,
    json: Json = False,
) -> None:
    """Copy a session's disk; print the snapshot's id."""
    with asking.connected() as shoal, phases("taking a snapshot"):
        made = asking.find(shoal, session, run).snapshot(asking.pairs(label, "--label"), wait=wait)
    emit(made, made.id, as_json=json)


def fork(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A session (id or name) or a snapshot's id.")
    ],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many sessions.")] = 1,
    run: asking.RunOption = None,
    wait: Annotated[bool, typer.Option(help="Wait until they run.")] = True,
    json: Json = False,
) -> None:
    """Start sessions from a session's disk as it is now, or from a snapshot; print their ids."""
    with asking.connected() as shoal, phases(f"forking {count}"):
        if source.startswith("snp_"):
            group = shoal.sessions(snapshot=source, count=count, run=run)
        else:
            group = asking.find(shoal, source, run).fork(count)
        if wait:
            group.ready()
        infos = [box.info for box in group]
    emit({"sessions": infos}, "\n".join(info.id for info in infos), as_json=json)


@app.command("list")
def list_(
    session: Annotated[str | None, typer.Option(help="Only of this session (id).")] = None,
    run: asking.RunOption = None,
    json: Json = False,
) -> None:
    """List snapshots, newest first."""
    with asking.connected() as shoal:
        found = shoal.snapshots.list(session=session, run=run)
    if json:
        print_json({"snapshots": found})
        return
    rows = [
        (s.id, s.session, s.state, s.seq, s.layers, size(s.size_bytes), when(s.created_at)) for s in found
    ]
    table(("ID", "SESSION", "STATE", "SEQ", "LAYERS", "SIZE", "CREATED"), rows)


@app.command("show")
def show(snapshot_id: Annotated[str, typer.Argument(metavar="SNAPSHOT")], json: Json = False) -> None:
    """Show a snapshot."""
    with asking.connected() as shoal:
        found = shoal.snapshots.get(snapshot_id)
    emit(found, found.model_dump_json(indent=2), as_json=json)


@app.command("rm")
def rm(snapshot_ids: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...")], json: Json = False) -> None:
    """Remove snapshots; sessions that were started from them go on."""
    with asking.connected() as shoal:
        for one in snapshot_ids:
            shoal.snapshots.delete(one)
    emit({"ids": snapshot_ids}, "\n".join(snapshot_ids), as_json=json)
