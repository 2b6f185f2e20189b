"""What the commands share: the client, naming sessions, options of a new session."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from shoal.cli.output import Fail
from shoal.client.effects import RetryPolicy
from shoal.client.sync_client import Shoal
from shoal.client.sync_session import Session

#: People do not wait two minutes for a service that is not there.
POLICY = RetryPolicy(retry_for_s=8.0, wait_for_s=None, internal_attempts=3)

SessionArg = Annotated[
    str,
    typer.Argument(metavar="SESSION", help="A session's id, or its name (see --run).", show_default=False),
]
RunOption = Annotated[str | None, typer.Option("--run", help="The run it belongs to.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="KEY=VALUE; repeatable.")]


@contextmanager
def connected() -> Iterator[Shoal]:
    """A client from the environment or the credentials file."""
    with make_client() as shoal:
        yield shoal


def make_client() -> Shoal:
    """The client; tests put their own here."""
    return Shoal(policy=POLICY)


def step_prefix() -> str:
    """Steps of a command line are new each time: never the answer of an earlier one."""
    return f"cli-{secrets.token_hex(6)}"


def find(shoal: Shoal, session: str, run: str | None = None, *, wait: bool = False) -> Session:
    """The session of an id or a name.

    Raises:
        Fail: There is none of that name, or several.
    """
    if session.startswith("ses_"):
        return shoal.session(id=session, steps=step_prefix(), keep=True, wait=wait)
    found = list(shoal.list_sessions(name=session, run=run))
    if not found:
        where = f" in run {run!r}" if run else ""
        raise Fail(
            f"no living session is named {session!r}{where}; `shoal session list` shows those there are"
        )
    if len(found) > 1:
        runs = ", ".join(sorted(str(info.run) for info in found))
        raise Fail(f"several sessions are named {session!r}; say which by --run (runs: {runs})")
    return shoal.session(id=found[0].id, steps=step_prefix(), keep=True, wait=wait)


def pairs(values: list[str] | None, what: str) -> dict[str, str]:
    """KEY=VALUE options."""
    made: dict[str, str] = {}
    for value in values or []:
        key, equals, text = value.partition("=")
        if not key or not equals:
            raise Fail(f"{what} takes KEY=VALUE, not {value!r}")
        made[key] = text
    return made


def resources(
    cpu: float | None, memory_mib: int | None, disk_mib: int | None, pids: int | None
) -> dict[str, int]:
    """Resource options, in the contract's units."""
    values: dict[str, Any] = {
        "cpu_millis": None if cpu is None else round(cpu * 1000),
        "memory_mib": memory_mib,
        "disk_mib": disk_mib,
        "pids": pids,
    }
    return {key: value for key, value in values.items() if value is not None}


Cpu = Annotated[float | None, typer.Option("--cpu", help="Cores, such as 0.5.")]
Memory = Annotated[int | None, typer.Option("--memory-mib", help="Memory in MiB.")]
Disk = Annotated[int | None, typer.Option("--disk-mib", help="Disk in MiB.")]
Pids = Annotated[int | None, typer.Option("--pids", help="Processes and threads at the most.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE; repeatable.")]


def source(image_or_snapshot: str) -> dict[str, Any]:
    """An image's `name:tag`, or a snapshot's id."""
    key = "snapshot" if image_or_snapshot.startswith("snp_") else "image"
    return {key: image_or_snapshot}
