"""The capacity port: hosts come and go. `tests/contract/test_capacity.py` is this page as tests.

CapacityError
├── NoMoreHosts         the provider has none to give now, or a limit is reached
└── CapacityUnavailable no answer: it is not known whether it happened
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from shoal.contract.base import HostId


class CapacityError(Exception):
    """Anything a capacity driver refuses or fails with. `reason` is fit for `not_scaling`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoMoreHosts(CapacityError):
    """There are none to give now."""


class CapacityUnavailable(CapacityError):
    """No answer."""


@dataclass(frozen=True, kw_only=True)
class HostStart:
    """A host to start. `join_token` lets its agent register once as `host`."""

    host: HostId
    pool: str
    join_token: str


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A host as its driver knows it.

    Attributes:
        id: The driver's own name of it.
        host: Whom it was started as.
        alive: Whether its agent can still be running; False once it certainly is not.
        detail: Why it is not alive, in a sentence.
    """

    id: str
    host: HostId
    pool: str
    alive: bool
    started_at: datetime
    detail: str | None = None


class Capacity(Protocol):
    """Starts and stops hosts. Every method may be repeated."""

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """Start hosts, in the order asked; a host that was started before is answered as it is.

        Raises:
            NoMoreHosts: Not all of them; `instances` tells afterwards which there are.
        """

    async def stop(self, instances: Sequence[str]) -> None:
        """End hosts and clean up what they leave; returns when they are gone. Unknown ones are no failure."""

    async def instances(self) -> list[Instance]:
        """All that exist, dead ones included until they are stopped."""

    async def close(self) -> None:
        """Forget them without ending any: another start of the control plane finds them again."""
