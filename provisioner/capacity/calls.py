"""Calls to AWS as capacity drivers make them: in turn, repeated when throttled, within bounds, counted.

CapacityUnavailable
└── Refused     AWS says no, and will say so again: a permission, a name, a limit
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any

import structlog

from provisioner.aws.clients import AwsClients
from provisioner.capacity.limits import BUCKETS, TokenBucket
from provisioner.capacity.port import CapacityUnavailable
from provisioner.clock import Clock

log = structlog.get_logger("provisioner.capacity")

Answer = Mapping[str, Any]

#: Tries of one call, the first included; each is the SDK's own few.
_TRIES = 5
#: Seconds before the second try, doubled for each further one, times a draw between a half and one.
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
#: Calls under way at once.
_AT_ONCE = 16
_THROTTLED = frozenset(
    {
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "TooManyRequestsException",
        "LimitExceededException",
        "SlowDown",
        # Auto Scaling: another change of the group is under way.
        "ResourceContention",
        "ScalingActivityInProgress",
    }
)


class Refused(CapacityUnavailable):
    """AWS refuses. `code` is its own name for why."""

    def __init__(self, call: str, code: str, message: str) -> None:
        super().__init__(f"AWS refuses {call}: {code}: {message}")
        self.code = code


class Calls:
    """The AWS calls of one process.

    Attributes:
        counts: How many were made, by service, operation and outcome: `ok`, `throttled` (tried again or given up),
            `refused`, `lost` (no answer).
        waited_s: Seconds that calls waited for their turn, by bucket.
    """

    def __init__(self, clients: AwsClients, clock: Clock, *, chance: random.Random | None = None) -> None:
        self._clients = clients
        self._clock = clock
        self._chance = chance or random.Random()
        self._buckets: dict[str, TokenBucket] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.waited_s: dict[str, float] = defaultdict(float)

    async def call(self, service: str, operation: str, **about: Any) -> Answer:
        """Make one call (`start_task` of `ecs`), when its turn comes.

        Raises:
            Refused: AWS says no; another try will not help.
            CapacityUnavailable: Still throttled after some tries, or no answer: whether it happened is not known.
        """
        name, limit = BUCKETS[service, operation]
        bucket = self._buckets.setdefault(name, TokenBucket(limit))
        pause = _PAUSE_S
        for left in reversed(range(_TRIES)):
            wait = bucket.take(self._clock.monotonic())
            if wait > 0:
                self.waited_s[name] += wait
                await self._clock.sleep(wait)
            async with self._slots:
                answer, code, message = await self._once(service, operation, about)
            if answer is not None:
                self.counts[service, operation, "ok"] += 1
                return answer
            if code is None:
                self.counts[service, operation, "lost"] += 1
                raise CapacityUnavailable(f"No answer to {service} {operation}: {message}")
            if code not in _THROTTLED:
                self.counts[service, operation, "refused"] += 1
                raise Refused(f"{service} {operation}", code, message)
            self.counts[service, operation, "throttled"] += 1
            log.info("aws.throttled", service=service, operation=operation, code=code)
            bucket.throttled(self._clock.monotonic())
            if left:
                await self._clock.sleep(pause * (0.5 + self._chance.random() / 2))
                pause = min(_LONGEST_PAUSE_S, pause * 2)
        log.warning("aws.given_up", service=service, operation=operation, tries=_TRIES)
        raise CapacityUnavailable(f"AWS throttles {service} {operation}: {message}")

    async def _once(
        self, service: str, operation: str, about: Mapping[str, Any]
    ) -> tuple[Answer | None, str | None, str]:
        """The answer, or the error's code and message; no code means no answer."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        client = await self._clients.get(service)
        try:
            return await getattr(client, operation)(**about), None, ""
        except ClientError as error:
            told = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
            code = str(told.get("Code", "Unknown"))
            message = str(told.get("Message", ""))[:500]
            if status >= 500 and code not in _THROTTLED:
                return None, None, f"{code}: {message}"
            return None, code, message
        except (BotoCoreError, ResponseParserError, OSError, TimeoutError) as error:
            return None, None, f"{type(error).__name__}: {error}"[:500]

    async def pages(
        self, service: str, operation: str, field: str, *, token: str = "nextToken", **about: Any
    ) -> AsyncIterator[Any]:
        """The items of all pages of a list. `token` is how the service spells its page token."""
        while True:
            answer = await self.call(service, operation, **about)
            for item in answer.get(field) or ():
                yield item
            if not answer.get(token):
                return
            about[token] = answer[token]
