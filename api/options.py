"""What `python -m api` (and so `shoal up`) can be told."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from api.home import DEFAULT_HOME, credentials_path
from api.logs import LogFormat

DEFAULT_PORT = 8700


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """How a server on one machine is run.

    Attributes:
        port: 0 takes any free one, the one of the last start where that is free.
        max_hosts: The most agents at once; they share the machine's capacity evenly.
        idle_to_zero_s: Seconds without demand until the last agent is ended.
        warm: Warm sandboxes kept at least of each image that was asked for lately; 0 keeps none but prepared ones.
        credentials: Where URL and key are put for SDK and CLI.
        ready_file: A file that gets the ready line as JSON; None writes none.
        ready_fd: A descriptor that gets it and is closed then; None for none.
    """

    home: Path
    host: str
    port: int
    max_hosts: int
    idle_to_zero_s: float
    warm: int
    credentials: Path
    ready_file: Path | None
    ready_fd: int | None
    log_level: str
    log_format: LogFormat


@dataclass(frozen=True, kw_only=True)
class DownOptions:
    """Which server to stop, and for how long to wait for it."""

    home: Path
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a replica over shared state is run.

    Attributes:
        profile: Where state is. Both are told by the environment (`SHOAL_AWS_...`, `AWS_ENDPOINT_URL`).
        role: What it is for.
    """

    profile: Literal["aws", "localstack"]
    role: Literal["router"]
    host: str
    port: int
    log_level: str
    log_format: LogFormat


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError("must be 0 to 65535")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m api", description="Shoal on one machine.")
    commands = parser.add_subparsers(dest="command")
    up = commands.add_parser("up", help="run the server until it is told to stop (the default)")
    _add_home(up)
    up.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    up.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help="0 takes any free one (default: %(default)s)"
    )
    up.add_argument(
        "--max-hosts",
        type=_positive,
        default=max(1, (os.cpu_count() or 1) // 4),
        help="agents at the most (default: %(default)s)",
    )
    up.add_argument(
        "--idle-to-zero-s",
        type=float,
        default=300.0,
        help="seconds without demand until the last agent ends (default: %(default)s)",
    )
    up.add_argument(
        "--warm",
        "--prewarm",
        type=int,
        default=2,
        help="warm sandboxes kept at least of each image in use; 0 keeps none but prepared ones (default: %(default)s)",
    )
    up.add_argument(
        "--credentials",
        type=Path,
        default=None,
        help="where URL and key are put (default: where the SDK looks)",
    )
    up.add_argument("--ready-file", type=Path, default=None, help="gets a JSON line once it serves")
    up.add_argument("--ready-fd", type=int, default=None, help="descriptor that gets the same line")
    up.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    up.add_argument("--log-format", choices=["auto", "json", "text"], default="auto")
    _add_serve(commands)
    down = commands.add_parser("down", help="stop the server of a home, and wait until nothing of it is left")
    _add_home(down)
    down.add_argument("--timeout-s", type=float, default=120.0, help="(default: %(default)s)")
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve", help="serve over the state of an AWS deployment, as one of any number of replicas"
    )
    serve.add_argument("--profile", choices=["aws", "localstack"], default="aws")
    serve.add_argument("--role", choices=["router"], default="router")
    serve.add_argument("--host", default="0.0.0.0", help="(default: %(default)s)")
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help="(default: %(default)s)")
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    serve.add_argument("--log-format", choices=["json", "text"], default="json")


def _add_home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--home", type=Path, default=DEFAULT_HOME, help="state and blobs (default: %(default)s)"
    )


def parse(argv: Sequence[str]) -> UpOptions | DownOptions | ServeOptions:
    """The options; exits with a message when they do not fit."""
    arguments = list(argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "up")
    given = _parser().parse_args(arguments)
    if given.command == "serve":
        return ServeOptions(
            profile=given.profile,
            role=given.role,
            host=given.host,
            port=given.port,
            log_level=given.log_level,
            log_format=given.log_format,
        )
    if given.command == "down":
        return DownOptions(home=given.home, timeout_s=given.timeout_s)
    form: Literal["json", "text"] = "text" if sys.stderr.isatty() else "json"
    return UpOptions(
        home=given.home,
        host=given.host,
        port=given.port,
        max_hosts=given.max_hosts,
        idle_to_zero_s=given.idle_to_zero_s,
        warm=given.warm,
        credentials=given.credentials or credentials_path(),
        ready_file=given.ready_file,
        ready_fd=given.ready_fd,
        log_level=given.log_level,
        log_format=form if given.log_format == "auto" else given.log_format,
    )
