"""Clients of the AWS SDK: one session, one client per service, opened at first use, closed together.

The SDK is imported when the first client is asked for, not before: it costs half a second of a cold start.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

#: Tries of one call by the SDK itself, the first included; what is left then is the caller's to repeat.
SDK_ATTEMPTS = 3
#: Services whose adapter repeats its calls, or is repeated by whoever holds it: there the SDK tries once, so that
#: repeats neither multiply nor hide whether an earlier try may have been applied.
TRIED_ONCE = frozenset({"dynamodb", "s3"})
#: Seconds to connect, and without an answer, until a call is given up. What answers in milliseconds is given up
#: sooner, so that a repeat fits into a request of 25 s.
CONNECT_S = 3.0
READ_S = 20.0
READ_S_OF = {"dynamodb": 8.0}
#: Connections per service: a process has at most so many calls under way.
CONNECTIONS = 64
#: The SDK's own choice puts the global host (`<bucket>.s3.amazonaws.com`) into presigned URLs. Outside of us-east-1
#: that host redirects requests for a new bucket, to a host that was not signed; newer Regions refuse them.
#: https://docs.aws.amazon.com/AmazonS3/latest/API/UsingRouting.html (read 2026-11)
S3_OF_THE_REGION = {"addressing_style": "virtual", "us_east_1_regional_endpoint": "regional"}


class AwsClients:
    """The clients of one process (and one event loop).

    Args:
        region: None takes the SDK's own (environment, profile).
        endpoint: Answers for every service; None takes the SDK's own (`AWS_ENDPOINT_URL`), else AWS.
        credentials: `aws_access_key_id` and so on, for tests; None takes the SDK's own.
    """

    def __init__(
        self,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        credentials: dict[str, str] | None = None,
    ) -> None:
        self._region = region
        self._endpoint = endpoint
        self._credentials = credentials or {}
        self._stack = AsyncExitStack()
        self._clients: dict[str, Any] = {}
        self._opening = asyncio.Lock()
        self._session: Any = None

    async def get(self, service: str) -> Any:
        """The client of a service (`dynamodb`, `s3`, `ecs`, `autoscaling`, `ec2`, `batch`)."""
        client = self._clients.get(service)
        if client is not None:
            return client
        async with self._opening:
            if service not in self._clients:
                self._clients[service] = await self._open(service)
            return self._clients[service]

    @property
    def _elsewhere(self) -> bool:
        """Whether it is not AWS that answers: names of buckets are no host names there."""
        return bool(
            self._endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )

    async def _open(self, service: str) -> Any:
        import aioboto3
        from botocore.config import Config

        if self._session is None:
            self._session = aioboto3.Session()
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S_OF.get(service, READ_S),
            max_pool_connections=CONNECTIONS,
            # Standard, not adaptive: its client-side rate limiter blocks inside the SDK, unseen and uncounted.
            # Adapters slow down by themselves, within bounds, and count it.
            retries={
                "mode": "standard",
                "total_max_attempts": 1 if service in TRIED_ONCE else SDK_ATTEMPTS,
            },
            s3={"addressing_style": "path"} if self._elsewhere else S3_OF_THE_REGION,
            # Presigned URLs would else be of version 2, which signs no headers and which new Regions refuse.
            signature_version="s3v4" if service == "s3" else None,
            tcp_keepalive=True,
            user_agent_extra="shoal",
        )
        return await self._stack.enter_async_context(
            self._session.client(
                service,
                # This SDK knows AWS_DEFAULT_REGION alone; Lambda and ECS, and every other SDK, say AWS_REGION.
                region_name=self._region or os.environ.get("AWS_REGION"),
                endpoint_url=self._endpoint,
                config=config,
                **self._credentials,
            )
        )

    async def close(self) -> None:
        """Close all; repeatable."""
        await self._stack.aclose()
        self._clients.clear()
