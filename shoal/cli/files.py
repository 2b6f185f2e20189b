"""`shoal cp`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import asking
from shoal.cli.output import Fail, Json, print_json

_REMOTE = re.compile(r"^([A-Za-z0-9][^:/]*):(.+)$")


def _remote(text: str) -> tuple[str, str] | None:
    match = _REMOTE.match(text)
    return (match[1], match[2]) if match else None


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path, SESSION:PATH, or - for stdin.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path, SESSION:PATH, or - for stdout.")],
    run: asking.RunOption = None,
    json: Json = False,
) -> None:
    """Copy a file or a directory into a session or out of it.

    A file goes to TARGET, or below it when TARGET ends with a slash or is a local directory. A directory's content goes
    into TARGET. Modes, links and times are kept in directories.
    """
    there, here = _remote(target), _remote(source)
    if (there is None) == (here is None):
        raise Fail("exactly one of SOURCE and TARGET must be SESSION:PATH")
    with asking.connected() as shoal:
        if there is not None:
            session, path = there
            if path.endswith("/") and source != "-" and not Path(source).is_dir():
                path += Path(source).name
            box = asking.find(shoal, session, run)
            if source == "-":
                box.upload(sys.stdin.buffer, path)
            else:
                local = Path(source)
                mode = None if local.is_dir() else local.stat().st_mode & 0o777
                box.upload(local, path, mode=mode)
        elif here is not None:
            session, path = here
            box = asking.find(shoal, session, run)
            if target == "-":
                box.download(path, sys.stdout.buffer)
                sys.stdout.buffer.flush()
                return
            place = Path(target)
            if target.endswith("/") or place.is_dir():
                place = _below(place, path, box_is_directory=_is_directory(box, path))
            box.download(path, place)
    if json:
        print_json({"source": source, "target": target})


def _is_directory(box: object, path: str) -> bool:
    from shoal.client.sync_session import Session

    if not isinstance(box, Session):
        return False
    return box.list_files(path, max_entries=1).error is None


def _below(place: Path, path: str, *, box_is_directory: bool) -> Path:
    return place if box_is_directory else place / Path(path.rstrip("/")).name
