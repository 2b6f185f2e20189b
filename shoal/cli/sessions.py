"""`shoal session ...`, `logs` and `trajectory`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from shoal.cli import asking
from shoal.cli.output import Json, emit, jsonable, phases, print_json, stderr, stdout, table, when
from shoal.contract.actions import ActionRecord
from shoal.contract.sessions import Event, Session
from shoal.contract.states import SessionState

app = typer.Typer(help="Make, list, show and end sessions.", no_args_is_help=True, rich_markup_mode=None)


@app.command("new")
def new(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="name:tag, or a snapshot's id.")],
    name: Annotated[str | None, typer.Option(help="Unique in the run: the same name finds it again.")] = None,
    run: asking.RunOption = None,
    label: asking.Labels = None,
    env: asking.Env = None,
    cpu: asking.Cpu = None,
    memory_mib: asking.Memory = None,
    disk_mib: asking.Disk = None,
    pids: asking.Pids = None,
    workdir: Annotated[
        str | None, typer.Option(help="Where commands start; the image's, else /workspace, unless said.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="As whom they run; the image's, else root, unless said.")
    ] = None,
    ttl_s: Annotated[int | None, typer.Option(help="Seconds until it ends (4 hours unless said).")] = None,
    pool: Annotated[str | None, typer.Option(help="The pool whose hosts run it.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many to make at once.")] = 1,
    wait: Annotated[bool, typer.Option(help="Wait until it runs.")] = True,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait; it stays queued after.")] = None,
    json: Json = False,
) -> None:
    """Make a session; print its id."""
    options: dict[str, Any] = {
        "run": run,
        "labels": asking.pairs(label, "--label"),
        "env": asking.pairs(env, "--env"),
        "resources": asking.resources(cpu, memory_mib, disk_mib, pids),
        "workdir": workdir,
        "user": user,
        "ttl_s": ttl_s,
        "pool": pool,
    }
    with asking.connected() as shoal:
        if count > 1:
            with phases(f"creating {count} sessions"):
                group = shoal.sessions(**asking.source(image), count=count, **options)
                if wait:
                    group.ready(timeout_s)
            infos = [box.info for box in group]
            emit({"sessions": infos}, "\n".join(info.id for info in infos), as_json=json)
            return
        with phases() as watch:
            box = shoal.session(
                **asking.source(image), name=name, wait=wait, timeout_s=timeout_s, watch=watch, **options
            )
        emit(box.info, box.id, as_json=json)


@app.command("list")
def list_(
    run: asking.RunOption = None,
    name: Annotated[str | None, typer.Option(help="Only of this name.")] = None,
    state: Annotated[
        SessionState | None, typer.Option(help="Only in this state; ended ones only so.")
    ] = None,
    label: asking.Labels = None,
    json: Json = False,
) -> None:
    """List sessions."""
    with asking.connected() as shoal:
        labels = asking.pairs(label, "--label")
        found = list(shoal.list_sessions(run=run, name=name, state=state, labels=labels))
    if json:
        print_json({"sessions": found})
        return
    rows = [
        (
            info.id,
            info.name,
            info.state,
            info.phase,
            info.image or info.snapshot,
            info.run,
            info.epoch,
            info.last_seq,
        )
        for info in found
    ]
    table(("ID", "NAME", "STATE", "PHASE", "FROM", "RUN", "EPOCH", "SEQ"), rows)


@app.command("show")
def show(session: asking.SessionArg, run: asking.RunOption = None, json: Json = False) -> None:
    """Show a session, also after it ended."""
    with asking.connected() as shoal:
        info = asking.find(shoal, session, run).refresh()
    if json:
        print_json(info)
        return
    _print_session(info)


def _print_session(info: Session) -> None:
    width = max(len(key) for key in Session.model_fields)
    for key, value in jsonable(info).items():
        if value is not None and value != {}:
            stdout().print(f"{key:<{width}}  {value}", highlight=False, markup=False)


@app.command("rm")
def rm(
    session: Annotated[list[str] | None, typer.Argument(metavar="SESSION...", help="Ids or names.")] = None,
    run: asking.RunOption = None,
    all_: Annotated[bool, typer.Option("--all", help="All sessions of --run.")] = False,
    json: Json = False,
) -> None:
    """End sessions, from any state; or all of a run."""
    with asking.connected() as shoal:
        if all_:
            if run is None or session:
                raise typer.BadParameter("--all needs --run, and no sessions")
            gone = shoal.delete_sessions(run=run)
        else:
            if not session:
                raise typer.BadParameter("name sessions, or give --run and --all")
            # An id is sent as it is: an ended session, or one that never ran, can be removed too.
            gone = [one if one.startswith("ses_") else asking.find(shoal, one, run).id for one in session]
            for one in gone:
                shoal._run(shoal._core.delete(f"/v1/sessions/{one}"))
    emit({"ids": gone}, "\n".join(gone), as_json=json)


def logs(
    session: asking.SessionArg,
    run: asking.RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the session ends.")] = False,
    json: Json = False,
) -> None:
    """Show what happened to a session: waits, placements, restores, limits, its end."""
    with asking.connected() as shoal:
        box = asking.find(shoal, session, run)
        seen, told = 0, ""
        while True:
            ended = follow and box.refresh().state is SessionState.ENDED
            events = box.events()
            for event in events[seen:]:
                _print_event(event, json)
            seen = len(events)
            told = _print_waiting(box.refresh(), told)
            if not follow or ended:
                return
            time.sleep(1.0)


def _print_waiting(info: Session, told: str) -> str:
    """Why a session still waits, when that was not said already; answers what is said by now."""
    why = info.waiting_for or ""
    if why and why != told:
        line = f"{info.id} waits for a host: {why}"
        stderr().print(line, highlight=False, markup=False)
    return why


def _print_event(event: Event, as_json: bool) -> None:
    if as_json:
        print_json(event)
        return
    facts = " ".join(f"{key}={value}" for key, value in event.data.items())
    line = f"{when(event.at)}  {event.kind:<28} {event.message} {facts}".rstrip()
    stdout().print(line, highlight=False, markup=False)


def trajectory(
    session: asking.SessionArg,
    run: asking.RunOption = None,
    after_seq: Annotated[int, typer.Option(min=0, help="Only steps after this seq.")] = 0,
    json: Json = False,
) -> None:
    """Show a session's steps, also after it ended; --json prints one whole record a line."""
    with asking.connected() as shoal:
        records = asking.find(shoal, session, run).trajectory(after_seq)
    if json:
        for record in records:
            print_json(record)
        return
    rows = [(r.seq, r.epoch, r.id, r.status, r.action.type, _what(r), _outcome(r)) for r in records]
    table(("SEQ", "EPOCH", "ID", "STATUS", "TYPE", "WHAT", "OUTCOME"), rows)


def _what(record: ActionRecord) -> str:
    action = record.action
    text = (
        getattr(action, "command", None)
        or getattr(action, "path", None)
        or getattr(action, "code", None)
        or ""
    )
    flat = " ".join(str(text if isinstance(text, str) else " ".join(text)).split())
    return flat if len(flat) <= 60 else flat[:59] + "…"


def _outcome(record: ActionRecord) -> str:
    seen = record.observation
    if seen is None:
        return record.error.code if record.error else ""
    if seen.error is not None:
        return seen.error.errno
    if seen.type in {"exec", "run_code"}:
        if getattr(seen, "timed_out", False):
            return "timed out"
        code, signal = getattr(seen, "exit_code", None), getattr(seen, "signal", None)
        return f"exit {code}" if code is not None else f"signal {signal}"
    return "failed" if seen.failed else "ok"
