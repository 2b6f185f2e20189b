"""`python -m api serve`: the app as a task beside others, over shared state. It keeps none, registers nothing itself
and reconciles nothing: any number may run, come and go.

It is the data plane's entrance on AWS (the `router` role): the same routes as the Lambda function's, without that one's
limits of size and time. Told to stop (SIGTERM), it says so to load balancers at once, still serves whom they send for
`LINGER_S`, refuses newcomers then and ends what is open: all within the 30 s that ECS gives a task by default (read
2026-11).
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import structlog
import uvloop
from pydantic import ValidationError

from api import logs
from api.app import create_app
from api.front import Front
from api.options import ServeOptions
from api.serving import bind, serving
from api.up import CannotStart
from provisioner.services import Services
from provisioner.store.port import StoreError
from shoal.contract.errors import ShoalError

log = structlog.get_logger("api.serve")

#: Seconds after the signal in which callers are still served: load balancers and DNS need them to look elsewhere.
LINGER_S = 5.0
#: Seconds after the signal at which the longest polls are cut. With the server's own grace it stays below 30 s.
DRAIN_S = 22.0


def run_serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        CannotStart: The address is taken, or the state store does not answer.
    """
    logs.configure(level=options.log_level, form=options.log_format)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        raise CannotStart(f"cannot listen at {options.host}:{options.port}: {error.strerror}") from error
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options, listener))
    return 0


async def _run(options: ServeOptions, listener: socket.socket) -> None:
    # Here, because the settings say what is missing in the environment, and only this command needs them.
    from provisioner.aws.profile import open_services
    from provisioner.aws.settings import AwsSettings
    from provisioner.settings import ProvisionerSettings

    try:
        aws, settings = AwsSettings(), ProvisionerSettings()
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise CannotStart(f"the settings are not complete or not right ({wrong}); see docs/aws.md") from None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await serve(lambda: open_services(aws, settings, role=options.role), listener, stop)
    except (ShoalError, StoreError) as error:
        raise CannotStart(f"the table {aws.table} cannot be used: {error}") from error


async def serve(
    opening: Callable[[], AbstractAsyncContextManager[Services]],
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    linger_s: float = LINGER_S,
    drain_s: float = DRAIN_S,
) -> None:
    """Serve until told to stop, and then in good order.

    Raises:
        ShoalError: UNAVAILABLE when the store does not answer at the start.
    """
    async with opening() as services:
        front = create_app(services)
        await services.start(reconciles=False)
        try:
            async with serving(front, listener):
                log.info("server.ready", address=listener.getsockname()[:2])
                await stop.wait()
                log.info("server.stopping")
                await _leave(front, linger_s, drain_s)
        finally:
            await services.close()
    log.info("server.stopped")


async def _leave(front: Front, linger_s: float, drain_s: float) -> None:
    front.leave()
    await asyncio.sleep(linger_s)
    front.drain()
    await front.idle(drain_s - linger_s)
    front.cut()
