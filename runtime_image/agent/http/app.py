"""The agent's application: its routes and nothing else. Bodies are parsed by the contract's models in each route.

Starlette's router alone: FastAPI's layers of middleware and dependencies cost more than an `exec` does here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime_image.agent.errors import error_response
from shoal.contract.errors import ErrorCode, ShoalError

#: Named by the contract, for later versions: answered with `not_implemented`.
_LATER = (
    "/v1/sessions/{session}/ports/{port:int}",
    "/v1/sessions/{session}/ports/{port:int}/{path:path}",
    "/v1/sessions/{session}/pause",
    "/v1/sessions/{session}/resume",
)
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_app(routes: Sequence[Route], *, metrics: Callable[[], bytes], ready: Callable[[], bool]) -> Router:
    """The application.

    Args:
        routes: What it serves besides health and metrics.
        metrics: Gives the metrics in Prometheus's text format.
        ready: Whether this host takes work.
    """

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        return PlainTextResponse("ok\n") if ready() else PlainTextResponse("not ready\n", status_code=503)

    async def numbers(request: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def later(request: Request) -> Response:
        return error_response(
            ShoalError(ErrorCode.NOT_IMPLEMENTED, "The contract names this; this version does not do it yet.")
        )

    async def refused(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        known = any(route.path_regex.match(scope["path"]) for route in all_routes)
        code = ErrorCode.METHOD_NOT_ALLOWED if known else ErrorCode.NOT_FOUND
        error = ShoalError(code, f"{scope['method']} {scope['path']}: no such route here.")
        await error_response(error)(scope, receive, send)

    all_routes = [
        *routes,
        *(Route(path, later, methods=_METHODS) for path in _LATER),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", numbers, methods=["GET"]),
    ]
    return _Router(all_routes, refused)


class _Router(Router):
    """A router that tells a wrong method as every other error is told: only whole matches are served."""

    def __init__(self, routes: Sequence[Route], refused: ASGIApp) -> None:
        super().__init__(routes=list(routes), default=refused, redirect_slashes=False)
        self._routes = list(routes)
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            for route in self._routes:
                match, child = route.matches(scope)
                if match is Match.FULL:
                    scope.update(child)
                    await route.handle(scope, receive, send)
                    return
        await self._refused(scope, receive, send)
