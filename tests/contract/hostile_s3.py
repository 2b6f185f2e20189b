"""S3 on a bad day, before a real emulator: answers are lost after the effect, calls are throttled, conditional writes
conflict, bodies come slowly, in crumbs, and break off. Never more than three times in a row for one caller, so that a
steady caller gets through."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import aiohttp
from botocore.exceptions import ClientError, ReadTimeoutError

from provisioner.aws.clients import AwsClients
from provisioner.clock import SystemClock

MOST_IN_A_ROW = 3


class HastyClock(SystemClock):
    """Pauses give others a turn and take no time."""

    async def sleep(self, seconds: float) -> None:
        """A turn."""
        await asyncio.sleep(0)


def refusal(operation: str, status: int, code: str) -> ClientError:
    """What the SDK raises for an answer of S3."""
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, operation)


class HostileS3(AwsClients):
    """Clients whose `s3` misbehaves.

    Attributes:
        done: How often each kind of harm was done; a test asserts that there was some.
        before: Called before each call with the operation and its arguments; may raise.
    """

    def __init__(self, clients: AwsClients, seed: int, *, before: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._real = clients
        self.before = before
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.row: defaultdict[Any, int] = defaultdict(int)

    async def get(self, service: str) -> Any:
        """The client."""
        return _Client(await self._real.get(service), self)

    def harm(self, *kinds: str) -> str | None:
        """What is done to this call, if anything."""
        task = asyncio.current_task()
        if self.row[task] >= MOST_IN_A_ROW or self.chance.random() > 0.1 * (len(kinds) + 1):
            self.row[task] = 0
            return None
        self.row[task] += 1
        kind = self.chance.choice(kinds)
        self.done[kind] += 1
        return kind


class _Client:
    def __init__(self, real: Any, bad: HostileS3) -> None:
        self._real = real
        self._bad = bad

    def __getattr__(self, operation: str) -> Any:
        real = getattr(self._real, operation)
        if operation == "generate_presigned_url":
            return real

        async def call(**arguments: Any) -> Any:
            if self._bad.before is not None:
                await self._bad.before(self._real, operation, arguments)
            kinds = ["slow_down", "lost"] + (["conflict"] if "IfNoneMatch" in arguments else [])
            harm = self._bad.harm(*kinds)
            if harm == "slow_down":
                raise refusal(operation, 503, "SlowDown")
            if harm == "conflict":
                raise refusal(operation, 409, "ConditionalRequestConflict")
            answer = await real(**arguments)
            if harm == "lost":
                if "Body" in answer:
                    answer["Body"].close()
                raise ReadTimeoutError(endpoint_url="http://s3")
            if operation == "get_object":
                answer["Body"] = _Body(answer["Body"], self._bad)
            return answer

        return call


class _Body:
    def __init__(self, real: Any, bad: HostileS3) -> None:
        self._real = real
        self._bad = bad

    async def __aenter__(self) -> _Body:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._real.close()

    async def read(self, amount: int) -> bytes:
        harm = self._bad.harm("crumbs", "broken", "cut_short")
        if harm == "broken":
            raise aiohttp.ClientPayloadError("not enough data")
        if harm == "cut_short":
            return b""
        if harm == "crumbs":
            await asyncio.sleep(0)
            amount = min(amount, 1000)
        data: bytes = await self._real.read(amount)
        return data
