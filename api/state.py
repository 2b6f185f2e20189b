"""What the routes share: the assembled parts, handed to each request by FastAPI's dependencies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.security import HTTPBearer

from api.acting import Acting
from api.auth import Gate
from api.errors import unknown_query
from api.metrics import Metrics
from api.routing import Routes
from api.settings import ApiSettings
from provisioner.auth import Principal
from provisioner.execute import Executions
from provisioner.services import Services
from shoal.contract.states import Scope


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything a route may need."""

    services: Services
    gate: Gate
    routes: Routes
    acting: Acting
    executions: Executions
    metrics: Metrics
    settings: ApiSettings


def parts_of(request: Request) -> Parts:
    """The parts that the app was built with."""
    parts: Parts = request.app.state.parts
    return parts


def services_of(request: Request) -> Services:
    """The use cases."""
    return parts_of(request).services


def needs(*scopes: Scope) -> Callable[[Request], Awaitable[Principal]]:
    """A dependency that admits callers whose key has one of the scopes."""

    async def admit(request: Request) -> Principal:
        return await parts_of(request).gate.admit(request.scope["headers"], scopes)

    return admit


def _declared(request: Request) -> frozenset[str]:
    """The names of the query parameters that the matched route has."""
    dependant: Any = getattr(request.scope["route"], "dependant", None)
    names: set[str] = set()
    pending = [dependant] if dependant is not None else []
    while pending:
        one = pending.pop()
        names.update(field.alias for field in one.query_params)
        pending.extend(one.dependencies)
    return frozenset(names)


async def known_query(request: Request) -> None:
    """Refuse query parameters that the route does not have: a misspelt one would else be a filter that filters
    nothing.

    Raises:
        ShoalError: INVALID_REQUEST with each one's path.
    """
    if not request.scope["query_string"]:
        return
    declared = _declared(request)
    unknown = [
        name for name in request.query_params if name not in declared and not name.startswith(LABEL_PREFIX)
    ]
    if LABEL_PREFIX not in declared:
        unknown += [name for name in request.query_params if name.startswith(LABEL_PREFIX)]
    if unknown:
        raise unknown_query(unknown)


#: Query parameters `label.<key>=<value>` filter by labels; the routes that have them declare this name.
LABEL_PREFIX = "label."


# Asynchronous, because FastAPI sends what is not to a thread, for each request.
async def _parts(request: Request) -> Parts:
    return parts_of(request)


async def _services(request: Request) -> Services:
    return services_of(request)


Use = Annotated[Services, Depends(_services)]
All = Annotated[Parts, Depends(_parts)]
Reader = Annotated[Principal, Depends(needs(Scope.READ, Scope.SESSIONS))]
Writer = Annotated[Principal, Depends(needs(Scope.SESSIONS))]
ImageReader = Annotated[Principal, Depends(needs(Scope.READ, Scope.SESSIONS, Scope.IMAGES))]
ImageWriter = Annotated[Principal, Depends(needs(Scope.IMAGES))]
CostReader = Annotated[Principal, Depends(needs(Scope.READ, Scope.COSTS))]
Admin = Annotated[Principal, Depends(needs(Scope.ADMIN))]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="Makes a repeat harmless: same key and body answer the resource there is, in its present state; "
        "same key and another body are refused. Kept until 7 days after the resource ended.",
    ),
]

#: Declares the key in the OpenAPI document; `needs` is what checks it.
BEARER = Depends(HTTPBearer(auto_error=False, scheme_name="ApiKey", description="An API key."))
KNOWN_QUERY = Depends(known_query)
