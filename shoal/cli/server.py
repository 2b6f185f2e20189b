"""`shoal up`, `down`, `doctor`: the server on this machine, which is a program of its own."""

from __future__ import annotations

import importlib.util
import json as jsonlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.output import OURS, Fail, Json, print_json, stdout

_HOME = "~/.local/share/shoal"
Home = Annotated[Path | None, typer.Option("--home", help=f"State and blobs (default: {_HOME}).")]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _server_python(module: str) -> list[str]:
    """The command that runs a module of the server, which the SDK's wheel does not contain."""
    if not _is_installed(module.partition(".")[0]):
        raise Fail(
            "the server is not installed here: this is the SDK alone. Install the server from its source tree "
            "(`make setup`), or set SHOAL_URL and SHOAL_API_KEY to use one that runs elsewhere"
        )
    return [sys.executable, "-m", module]


def _given(**options: Any) -> list[str]:
    arguments: list[str] = []
    for name, value in options.items():
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def up(
    context: typer.Context,
    home: Home = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes any free one (default: 8700).")] = None,
    max_hosts: Annotated[int | None, typer.Option(min=1, help="Agents at the most.")] = None,
    idle_to_zero_s: Annotated[
        float | None, typer.Option(help="Seconds without demand until the last agent ends.")
    ] = None,
) -> None:
    """Run the server on this machine until Ctrl-C; further options go to it (`python -m api up --help`)."""
    command = _server_python("api")
    options = _given(home=home, host=host, port=port, max_hosts=max_hosts, idle_to_zero_s=idle_to_zero_s)
    # The server takes this process's place: signals, terminal and exit code are its own.
    os.execv(command[0], [*command, "up", *options, *context.args])


def down(
    home: Home = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait for it (default: 120).")] = None,
    json: Json = False,
) -> None:
    """Stop the server on this machine, and wait until nothing of it is left."""
    command = _server_python("api")
    done = subprocess.run(
        [*command, "down", *_given(home=home, timeout_s=timeout_s)],
        check=False,
        stderr=subprocess.PIPE if json else None,
        text=True,
    )
    if json:
        print_json({"stopped": done.returncode == 0, "message": (done.stderr or "").strip()})
    if done.returncode:
        raise typer.Exit(OURS)


def doctor(home: Home = None, json: Json = False) -> None:
    """Say what this machine lacks for running sandboxes, and what to run to mend it."""
    command = _server_python("runtime_image.agent.doctor")
    done = subprocess.run(
        [*command, "--json", *_given(home=home)], check=False, stdout=subprocess.PIPE, text=True
    )
    try:
        checks = jsonlib.loads(done.stdout)
    except ValueError:
        raise Fail(f"the checks did not run (exit code {done.returncode})") from None
    if json:
        print_json(checks)
    else:
        _print_checks(checks["checks"])
    if not checks["ok"]:
        raise typer.Exit(OURS)


def _print_checks(checks: list[dict[str, Any]]) -> None:
    console = stdout()
    width = max((len(check["name"]) for check in checks), default=0)
    for check in checks:
        mark = "[green]ok     [/]" if check["ok"] else "[bold red]missing[/]"
        found = str(check["found"]).replace("[", "\\[")
        console.print(f"{mark}  {check['name']:<{width}}  {found}", highlight=False)
        if not check["ok"]:
            remedy = str(check["remedy"]).replace("[", "\\[")
            console.print(f"         {'':<{width}}  [bold]next:[/] {remedy}", highlight=False)
    if all(check["ok"] for check in checks):
        console.print("this machine can run sandboxes")
