"""Routes of the contract that this version does not have yet: they say so, in the document and with 501."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

from fastapi import APIRouter, Depends

from api.state import BEARER, needs
from shoal.contract.errors import ErrorBody, ErrorCode, ShoalError
from shoal.contract.states import Scope

router = APIRouter(prefix="/v1", tags=["later"], dependencies=[BEARER])

#: Method, path, scope, what it will do.
_LATER: tuple[tuple[str, str, Scope, str], ...] = (
    ("POST", "/sessions/{id}/pause", Scope.SESSIONS, "Freeze a session and give its memory back"),
    ("POST", "/sessions/{id}/resume", Scope.SESSIONS, "Resume a paused session"),
    ("PUT", "/runs/{run}", Scope.SESSIONS, "Set a run's quota and weight"),
    ("POST", "/runs/{run}/pause", Scope.SESSIONS, "Pause all sessions of a run"),
    ("POST", "/runs/{run}/resume", Scope.SESSIONS, "Resume all sessions of a run"),
    ("GET", "/costs", Scope.COSTS, "What it cost, by tenant, run, image or day"),
    ("GET", "/tenants", Scope.ADMIN, "List tenants"),
    ("POST", "/tenants", Scope.ADMIN, "Create a tenant"),
    ("GET", "/tenants/{tenant}", Scope.ADMIN, "Read a tenant"),
    ("PATCH", "/tenants/{tenant}", Scope.ADMIN, "Change a tenant's quota"),
    ("GET", "/keys", Scope.ADMIN, "List API keys"),
    ("POST", "/keys", Scope.ADMIN, "Create an API key"),
    ("DELETE", "/keys/{key}", Scope.ADMIN, "Revoke an API key"),
)


def _endpoint(what: str) -> Callable[[], Awaitable[NoReturn]]:
    async def later() -> NoReturn:
        """Answers 501 `not_implemented` in this version."""
        raise ShoalError(ErrorCode.NOT_IMPLEMENTED, f"this version does not do it yet: {what}")

    return later


for _method, _path, _scope, _what in _LATER:
    router.add_api_route(
        _path,
        _endpoint(_what),
        methods=[_method],
        dependencies=[Depends(needs(_scope))],
        summary=f"{_what} (not implemented yet)",
        operation_id=f"{_method.lower()}_{_path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        responses={501: {"model": ErrorBody, "description": "Not implemented yet."}},
        status_code=501,
        response_model=None,
    )
