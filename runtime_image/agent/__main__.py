"""`python -m runtime_image.agent --control-url URL --join-token T --home DIR`: be a host."""

from __future__ import annotations

import asyncio
import gc
import sys

import structlog
import uvloop

from runtime_image.agent import crash, logs
from runtime_image.agent.app import create_agent
from runtime_image.agent.sandboxes import SandboxRuntimeError
from runtime_image.agent.settings import read_settings
from shoal.contract.errors import ShoalError


async def _run() -> None:
    await create_agent(read_settings(sys.argv[1:])).run()


def main() -> int:
    """Run until told to stop. 0: ended by order; 1: this machine or the control plane does not let it be a host."""
    logs.configure()
    crash.arm()
    # Requests make many short-lived objects and few cycles; what start-up made stays for good.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run())
    except (ShoalError, SandboxRuntimeError) as error:
        structlog.get_logger().error("agent.failed", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
