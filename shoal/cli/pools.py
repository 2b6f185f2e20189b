"""`shoal pool ...`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cli import asking
from shoal.cli.output import Fail, Json, emit, explain, print_json, stderr, table, when
from shoal.contract.pools import Prepared

app = typer.Typer(
    help="Capacity: what there is, and making it ready.", no_args_is_help=True, rich_markup_mode=None
)

PoolOption = Annotated[str, typer.Option("--pool", help="The pool.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """List pools: hosts, what is busy, warm and waiting, and why no host is being added."""
    with asking.connected() as shoal:
        found = shoal.pools.list()
    if json:
        print_json({"pools": found})
        return
    rows = [
        (
            pool.name,
            " ".join(f"{state}={count}" for state, count in pool.hosts.items()) or "none",
            f"{pool.min_hosts}-{pool.max_hosts}",
            pool.busy,
            pool.warm,
            pool.pending,
            pool.not_scaling,
        )
        for pool in found
    ]
    table(("POOL", "HOSTS", "BOUNDS", "BUSY", "WARM", "PENDING", "NOT SCALING"), rows)


@app.command("prepare")
def prepare(
    sandboxes: Annotated[int, typer.Argument(min=1, help="How many sandboxes to have ready.")],
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="name:tag, or a snapshot's id.")],
    pool: PoolOption = "default",
    run: asking.RunOption = None,
    cpu: asking.Cpu = None,
    memory_mib: asking.Memory = None,
    disk_mib: asking.Disk = None,
    pids: asking.Pids = None,
    ttl_s: Annotated[int | None, typer.Option(help="Seconds that they are kept unclaimed.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until they are ready.")] = True,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait; it goes on after.")] = None,
    json: Json = False,
) -> None:
    """Have sandboxes made ready before a run starts."""
    options: dict[str, Any] = {
        **asking.source(image),
        "sandboxes": sandboxes,
        "run": run,
        "resources": asking.resources(cpu, memory_mib, disk_mib, pids) or None,
        "ttl_s": ttl_s,
    }
    console = stderr()
    with asking.connected() as shoal:
        if json or not wait or not console.is_terminal:
            prepared = shoal.pools.prepare(pool, **options, wait=wait, timeout_s=timeout_s)
        else:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("preparing", total=sandboxes)

                def watch(now: Prepared) -> None:
                    text = f"preparing · {now.waiting_for}" if now.waiting_for else "preparing"
                    progress.update(task, completed=now.ready, description=text)

                prepared = shoal.pools.prepare(pool, **options, timeout_s=timeout_s, watch=watch)
    emit(prepared, f"{prepared.id}  {prepared.ready}/{prepared.sandboxes} ready", as_json=json)


@app.command("prepares")
def prepares(pool: PoolOption = "default", json: Json = False) -> None:
    """List a pool's prepares that have not expired."""
    with asking.connected() as shoal:
        found = shoal.pools.prepares(pool)
    if json:
        print_json({"prepared": found})
        return
    rows = [
        (p.id, p.image or p.snapshot, f"{p.ready}/{p.sandboxes}", p.waiting_for, p.run, when(p.expires_at))
        for p in found
    ]
    table(("ID", "FROM", "READY", "WAITING FOR", "RUN", "EXPIRES"), rows)


@app.command("release")
def release(
    prepare_id: Annotated[str, typer.Argument(metavar="PREPARE")],
    pool: PoolOption = "default",
    json: Json = False,
) -> None:
    """Give back what a prepare holds."""
    with asking.connected() as shoal:
        # The service takes any release, so that one can be repeated; a person has mistyped.
        known = any(found.id == prepare_id for found in shoal.pools.prepares(pool))
        shoal.pools.release(prepare_id, pool)
    if not known:
        explain(Fail(f"pool {pool} has no prepare {prepare_id}; `shoal pool prepares` shows those there are"))
        raise typer.Exit(1)
    emit({"id": prepare_id}, prepare_id, as_json=json)
