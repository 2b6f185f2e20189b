"""`python -m runtime_image.agent.cleanup --home DIR`: remove what a host's agent left that ends no more by itself.

For capacity drivers of one machine, after the host's processes are gone: sandboxes, mounts, loop devices, cgroups and
the stretch of ids. Nothing of another host is touched. Repeatable.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from runtime_image.agent import id_stretch, logs
from runtime_image.agent.app import _runtime_settings
from runtime_image.agent.sandboxes import SandboxRuntime
from runtime_image.agent.settings import AgentSettings


async def clean(home: Path) -> list[str]:
    """Remove it all; gives the ids of the sandboxes that were left.

    Raises:
        SandboxRuntimeError: An agent runs on this home, or this machine cannot run sandboxes.
        ExceptionGroup: Some of it resisted; the rest was removed.
    """
    settings = AgentSettings(control_url="http://127.0.0.1:0", join_token="", home=home)
    async with SandboxRuntime(_runtime_settings(settings, home / "guest")) as runtime:
        removed = await runtime.sweep(set())
    id_stretch.give_up(home)
    return removed


def main() -> int:
    """0: nothing is left."""
    parser = argparse.ArgumentParser(prog="python -m runtime_image.agent.cleanup", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    home: Path = parser.parse_args().home
    logs.configure()
    if home.is_dir():
        asyncio.run(clean(home))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
