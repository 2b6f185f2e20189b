"""`shoal simulate`: a pool under a made-up load in virtual time; the server's own program does it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import server
from shoal.cli.output import Json


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(help="A name (those that come with it: none given), or a TOML file.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Another draw of everything that is drawn.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="The same trace with random and least-loaded choices as well.")
    ] = False,
    real: Annotated[
        bool, typer.Option("--real", help="The use cases themselves, for small scenarios; prints JSON.")
    ] = False,
    plots: Annotated[Path | None, typer.Option(help="Write SVG plots into this directory.")] = None,
    json: Json = False,
) -> None:
    """Run the real planner, placement and capacity driver under a made-up load, in virtual time."""
    command = server.server_python("provisioner.simulate")
    arguments = [] if scenario is None else [scenario]
    arguments += server._given(seed=seed, plots=plots)
    arguments += [flag for flag, on in (("--compare", compare), ("--real", real), ("--json", json)) if on]
    os.execv(command[0], [*command, *arguments])
