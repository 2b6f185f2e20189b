"""The SDK's core does no I/O: its operations are generators that yield what should happen and get its outcome.

    operation --yields--> Send | Sleep --> driver (sync or async) --sends back--> Reply | None

A driver is a dozen lines (`shoal.client.drivers`); whatever decides anything is in the operations, once for both
twins, and is tested without a network or a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from shoal.contract.base import MAX_WAIT_S

T = TypeVar("T")

#: Seconds of reading beyond a long poll's own wait, before the connection counts as lost.
READ_MARGIN_S = 20.0


class Sink(Protocol):
    """Takes a successful answer's body as it arrives."""

    def start(self, headers: Mapping[str, str]) -> None:
        """A (new) body begins: forget what came before."""

    def write(self, chunk: bytes) -> None:
        """The next bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """One HTTP request.

    Attributes:
        path: Quoted, from the root of the service.
        wait_s: How long the service may hold the answer back; the read time-out is this plus a margin.
        source: For large bodies: makes the body's chunks anew for each attempt. `content` is then None.
        sink: Gets the body of a 2xx answer; the reply's `content` is then empty.
        repeatable: Whether it may be sent again when it is not known whether it arrived.
        base_url, token: Another way than the configured one (straight to a host).
        foreign: `path` is a whole URL of another service (a blob store's), which is its own permission: sent as it is,
            without the key.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    source: Callable[[], Iterator[bytes]] | None = None
    sink: Sink | None = None
    repeatable: bool = True
    base_url: str | None = None
    token: str | None = None
    foreign: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A whole answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait."""

    seconds: float


class TransportFailed(Exception):
    """No (whole) answer. `arrived`: False when the request surely did not reach the service."""

    def __init__(self, message: str, *, arrived: bool) -> None:
        super().__init__(message)
        self.arrived = arrived


Effect = Send | Sleep
#: An operation that gives a T.
Op = Generator[Effect, "Reply | None", T]


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to be patient. Delays grow by doubling with full jitter; the service's `retry_after_s` comes first.

    Attributes:
        retry_for_s: Seconds, from the first failure on, in which `retry` errors and lost connections are repeated.
        wait_for_s: Seconds in which `wait` errors (quota, capacity) are waited out; None for ever.
        internal_attempts: Attempts for an error of the service's own, which repeating seldom mends.
        base_s, cap_s: The first and the longest delay.
    """

    retry_for_s: float = 120.0
    wait_for_s: float | None = 900.0
    internal_attempts: int = 5
    base_s: float = 0.2
    cap_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Context:
    """What operations know of the world: all injected.

    Attributes:
        clock: Monotonic seconds.
        patience: The longest wait that a long poll should ask for now; less when many requests wait for a turn.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    clock: Callable[[], float] = time.monotonic
    patience: Callable[[], float] = lambda: MAX_WAIT_S

    def wait_s(self, deadline: float | None) -> float:
        """What a long poll asks for, given when the caller's own time is over."""
        wait = min(MAX_WAIT_S, self.patience())
        if deadline is not None:
            wait = min(wait, max(0.0, deadline - self.clock()))
        return round(wait, 3)

    def deadline(self, timeout_s: float | None) -> float | None:
        """When `timeout_s` from now is over, by the clock."""
        return None if timeout_s is None else self.clock() + timeout_s


def reply_of(outcome: Reply | None) -> Reply:
    """What a driver sent back for a Send."""
    if outcome is None:
        raise RuntimeError("a driver must answer a Send with a Reply")
    return outcome
