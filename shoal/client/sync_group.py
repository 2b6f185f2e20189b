"""Sessions made together, for threads. The twin is shoal.client.async_group; a test holds them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from shoal.client.options import ExecOptions
from shoal.client.results import ExecResult
from shoal.client.sync_session import Session
from shoal.contract.errors import ShoalError

if TYPE_CHECKING:
    from shoal.client.sync_client import Shoal

T = TypeVar("T")

#: Threads of one `map`; AsyncSessionGroup has no such bound.
MAX_THREADS = 256


class SessionGroup(Sequence[Session]):
    """Sessions made together, such as a rollout group. Leaving its block ends all by one call."""

    def __init__(self, shoal: Shoal, boxes: Sequence[Session]) -> None:
        self._shoal = shoal
        self._boxes = list(boxes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SessionGroup, (self._shoal, self._boxes))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SessionGroup(self._shoal, self._boxes[index])
        return self._boxes[index]

    def __len__(self) -> int:
        return len(self._boxes)

    def map(
        self,
        function: Callable[[Session], T],
        *,
        concurrency: int | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """`function` of each session at once (at most `concurrency`), in order. One that raises does not stop the
        others: the first exception is raised when all have ended, or stands in its place with `return_exceptions`."""
        if not self._boxes:
            return []
        threads = ThreadPoolExecutor(min(concurrency or len(self), MAX_THREADS), "shoal-group")
        try:
            futures = [threads.submit(function, box) for box in self._boxes]
            wait(futures)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for the rollouts
        results: list[Any] = []
        for future in futures:
            error = future.exception()
            results.append(future.result() if error is None else error)
        for result in results:
            if isinstance(result, BaseException) and not return_exceptions:
                raise result
        return results

    def exec(self, command: str | Sequence[str], **options: Unpack[ExecOptions]) -> list[ExecResult]:
        """The same command in each."""
        return self.map(lambda box: box.exec(command, **options))

    def ready(self, timeout_s: float | None = None) -> None:
        """Waits until all run."""
        self.map(lambda box: box.ready(timeout_s))

    def delete_all(self) -> None:
        """Ends all by one call."""
        if self._boxes:
            self._shoal.delete_sessions(ids=[box.id for box in self._boxes])

    def __enter__(self) -> SessionGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        named = [box for box in self._boxes if box.info.name is not None]
        if kind is None or not named:
            try:
                self.delete_all()
            except (ShoalError, OSError):
                if kind is None:
                    raise
