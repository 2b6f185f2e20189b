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
from rich.console import Console

from shoal.cli.output import OURS, Fail, Json, print_json, stderr, stdout

_HOME = "~/.local/share/shoal"
Home = Annotated[Path | None, typer.Option("--home", help=f"State and blobs (default: {_HOME}).")]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def server_python(module: str) -> list[str]:
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
    command = server_python("api")
    _say_what_is_missing(home)
    options = _given(home=home, host=host, port=port, max_hosts=max_hosts, idle_to_zero_s=idle_to_zero_s)
    # The server takes this process's place: signals, terminal and exit code are its own.
    os.execv(command[0], [*command, "up", *options, *context.args])


def down(
    home: Home = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait for it (default: 120).")] = None,
    json: Json = False,
) -> None:
    """Stop the server on this machine, and wait until nothing of it is left."""
    command = server_python("api")
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
    told = _checked(home)
    if json:
        print_json(told)
    else:
        console = stdout()
        _print_checks(console, told["checks"])
        if told["ok"]:
            console.print("this machine can run sandboxes")
    if not told["ok"]:
        raise typer.Exit(OURS)


def _checked(home: Path | None) -> dict[str, Any]:
    command = server_python("runtime_image.agent.doctor")
    done = subprocess.run(
        [*command, "--json", *_given(home=home)], check=False, stdout=subprocess.PIPE, text=True
    )
    try:
        told: dict[str, Any] = jsonlib.loads(done.stdout)
    except ValueError:
        raise Fail(f"the checks did not run (exit code {done.returncode})") from None
    return told


def _lacks_root(checks: list[dict[str, Any]]) -> bool:
    return any(check["name"] == "root" and not check["ok"] for check in checks)


def _say_what_is_missing(home: Path | None) -> None:
    """Before a server starts whose sandboxes would not: without root none does; other gaps may be mended meanwhile.

    Raises:
        Fail: This is not root.
    """
    try:
        told = _checked(home)
    except Fail:
        return  # that checks do not run is no reason to keep a server from trying
    if _lacks_root(told["checks"]):
        raise Fail(
            "hosts and sandboxes of this machine need root; run: sudo shoal up (sudo shoal doctor says more)"
        )
    if not told["ok"]:
        stderr().print("shoal: this machine lacks what sandboxes need:", highlight=False)
        _print_checks(stderr(), [check for check in told["checks"] if not check["ok"]])


def _print_checks(console: Console, checks: list[dict[str, Any]]) -> None:
    width = max((len(check["name"]) for check in checks), default=0)
    no_root = _lacks_root(checks)
    for check in checks:
        found, remedy = (
            str(check[key]).replace("[", "\\[").replace("\n", "; ") for key in ("found", "remedy")
        )
        mark = "[green]ok     [/]" if check["ok"] else "[bold red]missing[/]"
        if no_root and ("ermission denied" in found or "not permitted" in found):
            # What only root may try tells nothing about the machine, and its remedy would mislead.
            mark, found, remedy = "[yellow]unknown[/]", "only root can try it", ""
        console.print(f"{mark}  {check['name']:<{width}}  {found}", highlight=False)
        if not check["ok"] and remedy:
            console.print(f"         {'':<{width}}  [bold]next:[/] {remedy}", highlight=False)
