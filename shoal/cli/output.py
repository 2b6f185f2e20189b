"""What the commands print: results to stdout, what people read meanwhile to stderr, errors without tracebacks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from shoal.client.errors import ConfigError, ConnectionFailed, PythonMismatch, RemoteError, WaitTimeout
from shoal.contract.errors import Next, ShoalError
from shoal.contract.sessions import Session

#: Our own failures; a command's own exit code passes through.
OURS = 125
INTERRUPTED = 130

_NEXT = {
    Next.FIX: "change the request",
    Next.WAIT: "wait, then try again",
    Next.RETRY: "try again",
    Next.REPLACE: "replace the session's sandbox, or start another session from a snapshot",
    Next.GIVE_UP: "trying again will not help",
}


class _State:
    json = False


def reset() -> None:
    """Forgets the last command's options; a process may run several."""
    _State.json = False


def _set_json(value: bool) -> bool:
    _State.json = value
    return value


#: `--json` of every command.
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON, errors too.", callback=_set_json, is_eager=True)
]


def stdout() -> Console:
    """Where results go; not wrapped where nobody looks at it."""
    width = None if sys.stdout.isatty() else 1000
    return Console(file=sys.stdout, soft_wrap=True, width=width)


def stderr() -> Console:
    """Where progress and errors go."""
    return Console(file=sys.stderr, stderr=True, soft_wrap=True)


def jsonable(value: Any) -> Any:
    """Models as the wire has them."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    return value


def print_json(value: Any) -> None:
    """One JSON document on a line of its own."""
    sys.stdout.write(json.dumps(jsonable(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def emit(value: Any, text: str, *, as_json: bool) -> None:
    """A result as JSON, or as a line."""
    if as_json:
        print_json(value)
    else:
        sys.stdout.write(text + "\n")


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Rows for people."""
    made = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*("" if cell is None else str(cell) for cell in row))
    stdout().print(made)


def when(time: datetime) -> str:
    """A time for people, in their own zone."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


class Fail(Exception):
    """A failure of the command itself, told in one sentence."""


def explain(error: BaseException) -> bool:
    """Prints an error that is known; False for one that is not."""
    if isinstance(error, ShoalError):
        if _State.json:
            print_json(error.body())
            return True
        console = stderr()
        console.print(f"[bold red]error:[/] {_plain(error.message)} [dim]({error.code})[/]", highlight=False)
        fields = error.details.get("fields")
        if isinstance(fields, list) and len(fields) > 1:
            for field in fields:
                if isinstance(field, dict):
                    line = f"{field.get('path') or 'body'}: {field.get('message', '')}"
                    console.print(f"  {_plain(line)}", highlight=False)
        if isinstance(log := error.details.get("log"), str):
            console.print(_plain(log.rstrip()), highlight=False)
        after = f" in {error.retry_after_s:g} s" if error.retry_after_s else ""
        step = _NEXT[error.next]
        if isinstance(error, ConnectionFailed):
            step = "start the server (`shoal up`), or say where it is (SHOAL_URL, SHOAL_API_KEY)"
        console.print(f"[bold]next:[/] {step}{after} [dim]({error.next})[/]", highlight=False)
        return True
    if isinstance(error, ConfigError | WaitTimeout | PythonMismatch | RemoteError | Fail | OSError):
        if _State.json:
            print_json({"error": {"code": "cli", "message": str(error), "next": "fix", "details": {}}})
        else:
            stderr().print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False)
        return True
    return False


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


class Phases:
    """Shows a session's state and phase while it is waited for; why no host comes is told for good, once."""

    def __init__(self, status: Any) -> None:
        self._status = status
        self._told: set[str] = set()

    def __call__(self, session: Session) -> None:
        why = session.waiting_for
        if why and why not in self._told:
            self._told.add(why)
            stderr().print(f"session {session.id} waits for a host: {why}", highlight=False, markup=False)
        phase = f" · {session.phase.value.replace('_', ' ')}" if session.phase else ""
        if self._status is not None:
            self._status.update(f"session {session.id}: {session.state}{phase}")


@contextmanager
def phases(first: str = "creating a session") -> Iterator[Phases]:
    """A spinner on a terminal; nothing elsewhere, and with --json."""
    console = stderr()
    if _State.json or not console.is_terminal:
        yield Phases(None)
        return
    with console.status(first) as status:
        yield Phases(status)
