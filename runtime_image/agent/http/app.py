"""The agent's application: its routes and nothing else. Bodies are parsed by the contract's models in each route."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

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


def create_app(
    routes: Sequence[Route], *, metrics: Callable[[], bytes], ready: Callable[[], bool]
) -> FastAPI:
    """The application.

    Args:
        routes: What it serves besides health and metrics.
        metrics: Gives the metrics in Prometheus's text format.
        ready: Whether this host takes work.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

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

    async def refused(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.METHOD_NOT_ALLOWED}.get(
            status, ErrorCode.INVALID_REQUEST
        )
        return error_response(ShoalError(code, f"{request.method} {request.url.path}: no such route here."))

    app.router.routes[:] = [
        *routes,
        *(Route(path, later, methods=_METHODS) for path in _LATER),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", numbers, methods=["GET"]),
    ]
    app.add_exception_handler(HTTPException, refused)
    return app
