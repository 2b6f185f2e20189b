"""Sessions made together, for asyncio. The twin is shoal.client.sync_group; a test holds them alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from shoal.client.async_session import AsyncSession
from shoal.client.options import ExecOptions
from shoal.client.results import ExecResult
from shoal.contract.errors import ShoalError

if TYPE_CHECKING:
    from shoal.client.async_client import AsyncShoal

T = TypeVar("T")


class AsyncSessionGroup(Sequence[AsyncSession]):
    """Sessions made together, such as a rollout group. Leaving its block ends all by one call."""

    def __init__(self, shoal: AsyncShoal, boxes: Sequence[AsyncSession]) -> None:
        self._shoal = shoal
        self._boxes = list(boxes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (AsyncSessionGroup, (self._shoal, self._boxes))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return AsyncSessionGroup(self._shoal, self._boxes[index])
        return self._boxes[index]

    def __len__(self) -> int:
        return len(self._boxes)

    async def map(
        self,
        function: Callable[[AsyncSession], Awaitable[T]],
        *,
        concurrency: int | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """`function` of each session at once (at most `concurrency`), in order. One that raises does not stop the
        others: the first exception is raised when all have ended, or stands in its place with `return_exceptions`."""
        turns = asyncio.Semaphore(concurrency or max(1, len(self)))

        async def one(box: AsyncSession) -> T:
            async with turns:
                return await function(box)

        results = await asyncio.gather(*(one(box) for box in self._boxes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not return_exceptions:
                raise result
        return list(results)

    async def exec(self, command: str | Sequence[str], **options: Unpack[ExecOptions]) -> list[ExecResult]:
        """The same command in each."""
        return await self.map(lambda box: box.exec(command, **options))

    async def ready(self, timeout_s: float | None = None) -> None:
        """Waits until all run."""
        await self.map(lambda box: box.ready(timeout_s))

    async def delete_all(self) -> None:
        """Ends all by one call."""
        if self._boxes:
            await self._shoal.delete_sessions(ids=[box.id for box in self._boxes])

    async def __aenter__(self) -> AsyncSessionGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        named = [box for box in self._boxes if box.info.name is not None]
        if kind is None or not named:
            try:
                await self.delete_all()
            except (ShoalError, OSError):
                if kind is None:
                    raise
