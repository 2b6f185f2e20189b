"""The capacity port: hosts come and go. `tests/contract/test_capacity.py` is this page as tests.

    CapacityError
    ├── NoMoreHosts         the provider has none to give now, or a limit is reached
    └── CapacityUnavailable no answer: it is not known whether it happened

A host is asked for until it is there: `start` may answer fewer than asked; the rest is on order and asked for again,
with the same `HostStart`s (join tokens can be made again, `provisioner.join_tokens`). Which agent process is the host
is not decided here: the first that registers with the join token is, by its boot id, and any other that a lost answer
may have started is refused and ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

from shoal.contract.base import HostId


class CapacityError(Exception):
    """Anything a capacity driver refuses or fails with. `reason` is fit for `not_scaling`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoMoreHosts(CapacityError):
    """There are none to give now.

    Attributes:
        refused: Which of the hosts asked for will not come; None: all that have no instance.
    """

    def __init__(self, reason: str, *, refused: Collection[HostId] | None = None) -> None:
        super().__init__(reason)
        self.refused = None if refused is None else frozenset(refused)


class CapacityUnavailable(CapacityError):
    """No answer."""


@dataclass(frozen=True, kw_only=True)
class HostStart:
    """A host to start. `join_token` lets its agent register once as `host`; `asked_at`: when it was first asked for."""

    host: HostId
    pool: str
    join_token: str
    asked_at: datetime


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A host as its driver knows it.

    Attributes:
        id: The driver's own name of it.
        host: Whom it was started as.
        alive: Whether its agent can still be running; False once it certainly is not. What a driver merely does not
            see at the moment is alive: heartbeats tell better.
        detail: Why it is not alive, or what keeps it from coming up, in a sentence.
        queued: Whether it stands in a queue of the provider's own, with no machine yet: its start has not begun.
        ran_at: When its start began, where the provider has such a queue; None: when it was asked for.
    """

    id: str
    host: HostId
    pool: str
    alive: bool
    started_at: datetime
    detail: str | None = None
    queued: bool = False
    ran_at: datetime | None = None


class Capacity(Protocol):
    """Starts and stops hosts. Every method may be repeated, also after an answer that was lost."""

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """Start hosts, in the order asked; a host that was started before is answered as it is.

        Args:
            starts: All hosts of their pools that are to come: a driver sizes its order by them.

        Returns:
            Those that exist by now, in the order asked. What is missing is on order: ask again with the same.

        Raises:
            NoMoreHosts: Not all of them will come; `instances` tells afterwards which there are.
            CapacityUnavailable: Ask again with the same.
        """

    async def stop(self, instances: Sequence[str]) -> None:
        """End hosts and clean up what they leave. Unknown ones are no failure.

        It may return before they are gone: whoever wants that looks at `instances` and asks again. A host that still
        runs is told to end and given its time first. Machines that carry a host are protected from the provider's own
        scaling in until here; exactly those named are ended, and nothing replaces them.
        """

    async def instances(self) -> list[Instance]:
        """All that exist, dead ones included until they are stopped; one per host.

        Raises:
            CapacityUnavailable: Part of it could not be read: half a picture is none.
        """

    async def close(self) -> None:
        """Forget them without ending any: another start of the control plane finds them again."""


@runtime_checkable
class Settles(Protocol):
    """A driver that orders machines before it knows whose they will be."""

    async def settle(self, coming: Collection[HostId]) -> None:
        """Give back what is for nobody: orders beyond `coming`, machines that carry no host and that none waits for,
        and machines whose host ended without being stopped.

        Args:
            coming: Every host that was asked for and has not come up yet.
        """
