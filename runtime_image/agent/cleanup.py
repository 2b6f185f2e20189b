"""`python -m runtime_image.agent.cleanup --home DIR`: remove what a killed host has left on the machine.

Processes, mounts, loop devices, cgroups, disks of its sandboxes; nothing that another home made. The journals stay: an
agent that starts on the home again still accounts for them. Refuses while an agent lives on the home.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from runtime_image.agent import id_stretch, logs
from runtime_image.agent.host_runtime import runtime_settings
from runtime_image.agent.sandboxes import SandboxRuntime, SandboxRuntimeError


async def clean_up(home: Path, *, cgroup_name: str | None = None) -> list[str]:
    """Remove everything of a home's sandboxes; gives the ids of those there were.

    Raises:
        SandboxRuntimeError: An agent lives on the home.
        ExceptionGroup: Something could not be removed; the rest was.
    """
    if not (home / "runtime").is_dir():
        id_stretch.give_up(home)
        return []
    settings = runtime_settings(home, guest_dir=home / "guest", cgroup_name=cgroup_name)
    async with SandboxRuntime(settings) as runtime:
        removed = await runtime.sweep(set())
    id_stretch.give_up(home)
    return removed


def main(argv: Sequence[str] | None = None) -> int:
    """0: nothing is left; 1: something is, or an agent lives on the home."""
    parser = argparse.ArgumentParser(prog="python -m runtime_image.agent.cleanup", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the host's directory")
    parser.add_argument("--cgroup-name", default=None, help="where the agent was given one")
    options = parser.parse_args(argv)
    logs.configure()
    try:
        removed = asyncio.run(clean_up(options.home, cgroup_name=options.cgroup_name))
    except (SandboxRuntimeError, ExceptionGroup) as error:
        structlog.get_logger().error("cleanup.failed", error=str(error))
        return 1
    structlog.get_logger().info("cleanup.done", removed=len(removed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
