"""The composition root of the HTTP surface.

`build_app` declares every route; `create_app` gives them something to work on and puts the front before them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from api import errors
from api.acting import Acting
from api.archive import JournalArchive
from api.auth import Gate
from api.front import Front
from api.large import Large
from api.metrics import Metrics
from api.relay import Relay
from api.routes import (
    execute,
    health,
    images,
    internal,
    later,
    pools,
    relayed,
    sessions,
    snapshots,
    transfers,
    usage,
    waiting,
)
from api.routing import Routes
from api.settings import ApiSettings
from api.state import Parts
from api.upstream import Upstream
from provisioner.execute import Executions
from provisioner.journals import Journals
from provisioner.services import Services
from shoal.contract.base import new_id

_DESCRIPTION = """\
Elastic sandboxes for agent training: isolated, stateful environments behind one HTTPS endpoint.

Every error answer is an `ErrorBody`; its `next` says what the caller does (see docs/errors.md). A command that fails
in a sandbox is an observation with 200, never an error. `wait_s` turns a slow call into a long poll: done in time
answers 200 or 201, else 202 with the resource in its present state. Unknown fields are refused with their path.
"""

_TAGS = [
    {"name": "sessions", "description": "The stateful environment a trainer holds."},
    {
        "name": "actions",
        "description": "Steps an agent takes in a session, and what the environment answers.",
    },
    {"name": "files", "description": "Raw bytes in and out of a session, streamed."},
    {"name": "snapshots", "description": "Durable copies of a session's disk; sessions start from them."},
    {"name": "images", "description": "Names and tags for immutable stacks of layers."},
    {"name": "pools", "description": "Hosts of one shape, and capacity made ready before a run."},
    {"name": "execute", "description": "One stateless call, no session to manage."},
    {"name": "usage", "description": "What sandboxes reserved and used."},
    {"name": "health", "description": "Health and metrics; they need no key."},
    {"name": "later", "description": "Named by the contract, not implemented yet: 501."},
]


def _operation_id(route: APIRoute) -> str:
    return route.name


def _version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "0"


def build_app(lifespan: Any = None) -> FastAPI:
    """All routes, with nothing behind them yet."""
    app = FastAPI(
        title="Shoal",
        version=_version(),
        summary="Sandboxes for agent training",
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        lifespan=lifespan,
        generate_unique_id_function=_operation_id,
        redirect_slashes=False,
    )
    routers = [
        module.router
        for module in (
            sessions, relayed, waiting, snapshots, images, transfers, pools, execute, usage, health, later, internal
        )
    ]  # fmt: skip
    errors.install(app, [route for router in routers for route in router.routes])
    for router in routers:
        app.include_router(router)
    return app


def create_app(services: Services, settings: ApiSettings | None = None) -> Front:
    """The application that a server runs.

    Its lifespan holds the connections to agents; starting and closing the services is the caller's.
    """
    settings = settings or ApiSettings()
    metrics = Metrics()
    routes = Routes(services.sessions, cache_s=settings.route_cache_s)
    gate = Gate(services.auth, cache_s=settings.key_cache_s)
    upstream = Upstream(routes=routes, metrics=metrics, settings=settings)
    archive = JournalArchive(sessions=services.sessions, journals=Journals(services.blobs))
    acting = Acting(upstream=upstream, archive=archive)
    executions = Executions(sessions=services.sessions, actor=acting, clock=services.clock, new_id=new_id)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with upstream:
            try:
                yield
            finally:
                await executions.close()

    app = build_app(lifespan)
    app.state.parts = Parts(
        services=services,
        gate=gate,
        routes=routes,
        acting=acting,
        executions=executions,
        metrics=metrics,
        settings=settings,
    )
    large = Large(upstream=upstream, transfers=services.transfers, settings=settings)
    relay = Relay(gate=gate, upstream=upstream, archive=archive, large=large, settings=settings)
    return Front(
        app=app, relay=relay, metrics=metrics, lifespan=lambda: lifespan(app), settle=executions.settle
    )
