"""Serving over HTTP with uvicorn, stopped by us and not by uvicorn's own signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

#: Connections that wait to be accepted: bursts of a thousand rollouts knock at once.
_BACKLOG = 4096
#: How long open requests get when the server stops; the longest polls are cut.
_GRACE_S = 3


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the composition root's: hosts are ended before the server stops."""
        yield


def bind(host: str, port: int, *, preferred: int | None = None) -> socket.socket:
    """A socket to serve on.

    Args:
        port: 0 takes any free one; `preferred` is then tried first, because hosts that live on know it.

    Raises:
        OSError: The address cannot be taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tries = [preferred, 0] if port == 0 and preferred else [port]
    for number, attempt in enumerate(tries):
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, attempt))
            taken.listen(_BACKLOG)
        except OSError:
            taken.close()
            if number + 1 == len(tries):
                raise
        else:
            return taken
    raise AssertionError("not reached")


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve until the block is left; the app's lifespan has begun when it is entered.

    Raises:
        RuntimeError: The app did not start.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
        backlog=_BACKLOG,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the application did not start")
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await task
