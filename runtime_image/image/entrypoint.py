"""Process 2 of the agent's container: works out what the agent is told, then becomes its holder.

    <state>/layers/             unpacked layers, shared by all agents of the machine; may come with its image
    <state>/guest/              the guest's runtime, shared, too
    <state>/hosts/<name>/       one agent's home, named after its join token: a container that is started again
                                with the same token goes on as the same host, another token is another host

`<state>` is `/var/lib/shoal`, a directory of the machine. What containers that died before have left there and in the
machine's cgroups is removed first. Whatever `SHOAL_AGENT_...` says wins.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

STATE = Path("/var/lib/shoal")
#: Where this container's agent has its home, for the health check.
HOME_LINK = Path("/run/shoal-agent/home")
PORT = 8701
#: A home that was touched less than this long ago may be another container's that is just starting, seconds.
YOUNG_S = 120.0
#: Journals that no control plane has asked for are kept this long, seconds.
KEPT_S = 86_400.0
#: How long an agent stays without hearing of its control plane: a machine of the cloud costs as long as it runs.
ORPHAN_S = 1800.0
_WILDCARDS = ("0.0.0.0", "[::]")


class NoTokenError(Exception):
    """The container was given no join token."""


def agent_environment(
    environ: Mapping[str, str], *, state: Path = STATE, address: Callable[[], str]
) -> dict[str, str]:
    """What the agent is told.

    Args:
        address: The machine's own address, where others reach it; asked only when nothing says it.

    Raises:
        NoTokenError: There is no join token, or none for this child of an array job.
    """
    told = dict(environ)
    token = told["SHOAL_AGENT_JOIN_TOKEN"] = _join_token(told)
    told.pop("SHOAL_AGENT_JOIN_TOKENS", None)
    name = hashlib.sha256(token.encode()).hexdigest()[:16]
    told.setdefault("SHOAL_AGENT_HOME", str(state / "hosts" / name))
    told.setdefault("SHOAL_AGENT_LAYERS_DIR", str(state / "layers"))
    told.setdefault("SHOAL_AGENT_GUEST_DIR", str(state / "guest"))
    listen = told.setdefault("SHOAL_AGENT_LISTEN", f"0.0.0.0:{PORT}")
    told.setdefault("SHOAL_AGENT_ORPHAN_S", f"{ORPHAN_S:g}")
    where, _, port = listen.rpartition(":")
    if where in _WILDCARDS and "SHOAL_AGENT_ADVERTISE" not in told:
        told["SHOAL_AGENT_ADVERTISE"] = f"http://{address()}:{port}"
    return told


def _join_token(told: Mapping[str, str]) -> str:
    """An array job gives all its children one list; each takes the one of its index."""
    if token := told.get("SHOAL_AGENT_JOIN_TOKEN"):
        return token
    tokens = told.get("SHOAL_AGENT_JOIN_TOKENS", "").split()
    # A job of one child is no array and has no index.
    index = int(told.get("AWS_BATCH_JOB_ARRAY_INDEX", "0"))
    if index >= len(tokens):
        raise NoTokenError(
            f"SHOAL_AGENT_JOIN_TOKEN is not set, and SHOAL_AGENT_JOIN_TOKENS has no number {index}"
        )
    return tokens[index]


def own_address(control_url: str) -> str:
    """This machine's address on the route to the control plane. Nothing is sent."""
    where = urlsplit(control_url)
    found = socket.getaddrinfo(where.hostname, where.port or 443, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address = str(probe.getsockname()[0])
    return f"[{address}]" if family == socket.AF_INET6 else address


def old_homes(hosts: Path, mine: Path, *, now_s: float) -> list[Path]:
    """Homes beside mine that are not just being made."""
    if not hosts.is_dir():
        return []
    return [
        home
        for home in sorted(hosts.iterdir())
        if home != mine and home.is_dir() and now_s - home.stat().st_mtime > YOUNG_S
    ]


def remove_leftovers(hosts: Path, mine: Path, *, now_s: float, clean: Callable[[Path], bool]) -> list[Path]:
    """Clean what dead agents of this machine have left; the homes whose directory is removed as well.

    Args:
        clean: Removes a home's sandboxes; False while an agent lives on it.
    """
    removed = []
    for home in old_homes(hosts, mine, now_s=now_s):
        if clean(home) and now_s - home.stat().st_mtime > KEPT_S:
            shutil.rmtree(home, ignore_errors=True)
            removed.append(home)
    return removed


def _clean(home: Path) -> bool:
    command = [sys.executable, "-m", "runtime_image.agent.cleanup", "--home", str(home)]
    return subprocess.run(command, check=False).returncode == 0


def main() -> None:
    """Become the holder of the agent; only a failure returns."""
    try:
        told = agent_environment(
            os.environ, address=lambda: own_address(os.environ.get("SHOAL_AGENT_CONTROL_URL", ""))
        )
    except (NoTokenError, OSError) as error:
        sys.exit(f"agent: {error}")
    home = Path(told["SHOAL_AGENT_HOME"])
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    HOME_LINK.parent.mkdir(parents=True, exist_ok=True)
    HOME_LINK.unlink(missing_ok=True)
    HOME_LINK.symlink_to(home)
    remove_leftovers(home.parent, home, now_s=time.time(), clean=_clean)
    # Not in the home: a socket's name ends with its container, and a home outlives it.
    holder = HOME_LINK.parent / "holder.sock"
    told["SHOAL_AGENT_HOLDER"] = str(holder)
    command = [
        sys.executable, "-m", "runtime_image.agent.holder", "--socket", str(holder), "--",
        sys.executable, "-m", "runtime_image.agent",
    ]  # fmt: skip
    os.execve(command[0], command, told)


if __name__ == "__main__":
    main()
