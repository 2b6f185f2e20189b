"""The Lambda function of the API: `api.lambda_handler.handler`, behind an HTTP API (payload format 2.0).

Importing this module does no work and loads nothing heavy. In a function it also loads what the first request will
need: that belongs to the function's initialization, which Lambda may do ahead of requests (provisioned concurrency, and
at times by itself). Nothing is opened before there is a request.
"""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mangum import Mangum

    from provisioner.services import Services

#: What the first request needs.
_NEEDED = (
    "aioboto3",
    "mangum",
    "api.function",
    "provisioner.agents.http",
    "provisioner.aws.profile",
    "provisioner.blobs.s3",
    "provisioner.store.dynamodb",
)
_adapter: Mangum | None = None


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Answer one request."""
    global _adapter
    if _adapter is None:
        _adapter = _adapt()
    return _adapter(event, context)


def _adapt() -> Mangum:
    import asyncio

    from mangum import Mangum

    from api.function import Function
    from api.logs import configure

    configure()
    # The one that Mangum runs every request on: connections live on from one to the next.
    asyncio.set_event_loop(asyncio.new_event_loop())
    # Everything in base64, whatever it is: text would be escaped, and nobody knows by how much it grows.
    return Mangum(Function(_opening), lifespan="off", text_mime_types=["-"])


def _opening() -> AbstractAsyncContextManager[Services]:
    from provisioner.aws.profile import open_services
    from provisioner.aws.settings import AwsSettings
    from provisioner.settings import ProvisionerSettings

    return open_services(AwsSettings(), ProvisionerSettings(), role="api")


def _preload() -> None:
    from importlib import import_module

    for name in _NEEDED:
        import_module(name)


if "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
    _preload()
