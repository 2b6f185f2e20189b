"""The `local` profile: control plane, reconciler and hosts of one machine, from start to an empty end."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
import uvloop

from api import logs
from api.app import create_app
from api.home import Credentials, Home
from api.local import Local, open_local
from api.options import UpOptions
from api.serving import bind, serving
from provisioner.auth import DEFAULT_TENANT
from shoal.contract.states import Scope

log = structlog.get_logger("api.up")


class CannotStart(Exception):
    """Something outside is in the way; the message says what."""


@dataclass(frozen=True, kw_only=True)
class _Key:
    """The admin key, and whether this start made it."""

    secret: str
    fresh: bool


def run_up(options: UpOptions) -> int:
    """Serve until SIGTERM or SIGINT; then end every host and leave nothing behind.

    Raises:
        HomeBusy: Another server runs on this home.
        CannotStart: The port is taken, the home cannot be used.
    """
    logs.configure(level=options.log_level, form=options.log_format)
    home = Home(options.home)
    try:
        home.make()
    except OSError as error:
        raise CannotStart(f"the home {home.path} cannot be used: {error.strerror}") from error
    _allow_many_connections()
    with (
        home.locked(),
        _listen(options, home) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_run(options, home, listener))
    return 0


def _listen(options: UpOptions, home: Home) -> socket.socket:
    before = home.server()
    preferred = int(before.url.rpartition(":")[2]) if before is not None else None
    try:
        return bind(options.host, options.port, preferred=preferred)
    except OSError as error:
        raise CannotStart(f"cannot listen at {options.host}:{options.port}: {error.strerror}") from error


def _allow_many_connections() -> None:
    """Raise the soft limit of open files as far as it may go: each caller and each agent's connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def url_of(listener: socket.socket) -> str:
    """Where a listener is reached from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _run(options: UpOptions, home: Home, listener: socket.socket) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _told_to_stop, stop, number)
    url = url_of(listener)
    async with open_local(options, home, url) as local:
        key = await _admin_key(local, home)
        home.write_credentials(Credentials(url=url, api_key=key.secret), copy=options.credentials)
        front = create_app(local.services)
        async with serving(front, listener), _background(local):
            server = home.write_server(url)
            _say_ready(options, home, url, key, server.pid)
            await stop.wait()
            log.info("server.stopping")
            front.drain()
            # Hosts first: they flush journals and report what ended while somebody still listens.
            await local.services.end_hosts()
            front.cut()
    log.info("server.stopped")


def _told_to_stop(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        print("shoal: still ending the sandboxes; nothing is left behind", file=sys.stderr, flush=True)
    log.info("server.signal", signal=signal.Signals(number).name)
    stop.set()


@asynccontextmanager
async def _background(local: Local) -> AsyncIterator[None]:
    """The reconciler and what else runs by itself. It begins once hosts can reach the routes, since the ones that
    are adopted call at once."""
    await local.services.start()
    try:
        yield
    finally:
        await local.services.close()


async def _admin_key(local: Local, home: Home) -> _Key:
    """The admin key: made at the first start, known from the home afterwards, made anew when that was lost."""
    made = await local.services.auth.bootstrap()
    known = home.credentials()
    if made is None and known is not None:
        return _Key(secret=known.api_key, fresh=False)
    if made is None:
        made = await local.services.auth.make_key(DEFAULT_TENANT, "admin", (Scope.ADMIN,))
    return _Key(secret=made.secret, fresh=True)


def _say_ready(options: UpOptions, home: Home, url: str, key: _Key, pid: int) -> None:
    """Tell people on stderr, and programs by file or descriptor. The key is shown once, when it was made."""
    line = json.dumps(
        {"url": url, "pid": pid, "home": str(home.path), "credentials": str(options.credentials)}
    )
    log.info("server.ready", url=url, home=str(home.path))
    if options.ready_file is not None:
        aside = options.ready_file.with_name(options.ready_file.name + ".part")
        aside.write_text(line + "\n")
        aside.replace(options.ready_file)
    if options.ready_fd is not None:
        with os.fdopen(options.ready_fd, "w") as pipe:
            pipe.write(line + "\n")
    print(f"Shoal serves at {url}", flush=True)
    print(f"  home         {home.path}", flush=True)
    print(f"  credentials  {options.credentials}", flush=True)
    if key.fresh:
        print(f"  admin key    {key.secret}   (shown this once)", flush=True)
