"""Remote functions: `@shoal.function(image=...)` runs a Python function in a sandbox of its own, by `POST /v1/execute`.

    @shoal.function(image="code:1.0.0")
    def score(text: str) -> int:
        return len(text.split())

    score("here")               # here
    score.remote("there")       # in a sandbox
    score.map(texts)            # many sandboxes at once, results in order
    await score.remote.aio("there")

The function and its arguments go in by cloudpickle, which the image need not have: its source is sent along. A
function of a package of your own (not installed in site-packages) travels whole, with what it uses of its package.
The result comes back as JSON (or msgpack, for bytes): data, which is never unpickled, since a sandbox may have been
taken over by what ran in it. `trust_result=True` pickles it, for results that are objects from code that you trust.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar, Unpack, cast, overload

from shoal.client.async_client import AsyncShoal
from shoal.client.effects import Op
from shoal.client.function_wire import call_files, invocation_argv, result_path, value_of
from shoal.client.options import ExecuteOptions
from shoal.client.sync_client import Shoal
from shoal.contract.execute import Executed

P = ParamSpec("P")
R = TypeVar("R")
Form = Literal["json", "msgpack"]

#: Calls of one `map` in flight at once.
DEFAULT_CONCURRENCY = 32
_shipping: ContextVar[bool] = ContextVar("shoal_shipping", default=False)
_lock = threading.Lock()
_clients: dict[str, Any] = {}


def _client() -> Shoal:
    with _lock:
        if "sync" not in _clients:
            _clients["sync"] = Shoal()
        return cast(Shoal, _clients["sync"])


def _async_client() -> AsyncShoal:
    with _lock:
        if "async" not in _clients:
            _clients["async"] = AsyncShoal()
        return cast(AsyncShoal, _clients["async"])


@dataclass(frozen=True, kw_only=True)
class Invocation(Generic[R]):
    """One call's whole outcome.

    Attributes:
        value: What the function returned.
        stdout, stderr: What it printed.
        executed: The call as the service tells it: times, memory, session.
    """

    value: R
    stdout: str
    stderr: str
    executed: Executed


class RemoteFunction(Generic[P, R]):
    """A function that can also run in a sandbox. Calling it runs it here.

    Attributes:
        remote: Runs it in a sandbox and gives its result; `.remote.aio(...)` awaits it.
        invoke: As `remote`, but gives an Invocation, which has the output too.
        map: Runs it once per item of an iterable, in order; `.map.aio(...)` is an async iterator.
    """

    def __init__(
        self,
        function: Callable[P, R],
        image: str,
        *,
        result: Form = "json",
        trust_result: bool = False,
        client: Shoal | None = None,
        async_client: AsyncShoal | None = None,
        options: ExecuteOptions | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.image = image
        self._form: Literal["json", "msgpack", "pickle"] = "pickle" if trust_result else result
        self._client = client
        self._async_client = async_client
        self._options: ExecuteOptions = options or {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if _shipping.get():
            return (
                functools.partial,
                (self.function,),
            )  # in the image there is no shoal: it is the plain function
        state = (self.function, self.image, self._form, self._client, self._async_client, self._options)
        return (_rebuild, (type(self), *state))

    @property
    def remote(self) -> _Remote[P, R]:
        """Runs it in a sandbox."""
        return _Remote(self)

    @property
    def invoke(self) -> _Invoke[P, R]:
        """Runs it in a sandbox and keeps its output."""
        return _Invoke(self)

    @property
    def map(self) -> _Map[R]:
        """Runs it in many sandboxes."""
        return _Map(self)

    def with_options(self, **options: Unpack[ExecuteOptions]) -> RemoteFunction[P, R]:
        """The same function with other options of its calls, such as `resources` or `timeout_s`."""
        merged: ExecuteOptions = {**self._options, **options}
        return cast(
            "RemoteFunction[P, R]",
            _rebuild(
                type(self), self.function, self.image, self._form, self._client, self._async_client, merged
            ),
        )

    def _call(self, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op[Invocation[R]]:
        token = _shipping.set(True)
        try:
            files = call_files(self.function, args, kwargs, self._form)
        finally:
            _shipping.reset(token)
        options: dict[str, Any] = dict(self._options)
        options["files"] = [*_extra(options.get("files")), *files]
        options["output_files"] = [*(options.get("output_files") or []), result_path()]
        executed = yield from core.execute(self.image, {"argv": invocation_argv(self._form)}, options)
        value = value_of(executed, self._form)
        seen = executed.observation
        return Invocation(
            value=cast(R, value),
            stdout=seen.stdout if seen else "",
            stderr=seen.stderr if seen else "",
            executed=executed,
        )

    def _here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation[R]:
        client = self._client or _client()
        return client._run(self._call(client._core, args, kwargs))

    async def _there(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation[R]:
        client = self._async_client or _async_client()
        return await client._run(self._call(client._core, args, kwargs))


def _extra(given: Any) -> list[Any]:
    from shoal.client import building
    from shoal.contract.actions import File

    return [] if not given else [File.model_validate(item) for item in building.files(given)]


def _rebuild(
    kind: type[RemoteFunction[Any, Any]],
    function: Callable[..., Any],
    image: str,
    form: str,
    client: Shoal | None,
    async_client: AsyncShoal | None,
    options: ExecuteOptions,
) -> RemoteFunction[Any, Any]:
    trusted = form == "pickle"
    result = cast(Form, "json" if trusted else form)
    return kind(
        function,
        image,
        result=result,
        trust_result=trusted,
        client=client,
        async_client=async_client,
        options=options,
    )


class _Remote(Generic[P, R]):
    def __init__(self, function: RemoteFunction[P, R]) -> None:
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs it in a sandbox.

        Raises:
            RemoteError: It raised there; the remote traceback is in the message.
            ResultError: Its result is not data of the chosen format.
            PythonMismatch: The image has another Python.
            ShoalError: The platform could not run it.
        """
        return self._function._here(args, kwargs).value

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """As the call, awaited."""
        return (await self._function._there(args, kwargs)).value


class _Invoke(Generic[P, R]):
    def __init__(self, function: RemoteFunction[P, R]) -> None:
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        """Runs it in a sandbox; raises as `remote`."""
        return self._function._here(args, kwargs)

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        """As the call, awaited."""
        return await self._function._there(args, kwargs)


class _Map(Generic[R]):
    def __init__(self, function: RemoteFunction[Any, R]) -> None:
        self._function = function

    def __call__(
        self,
        items: Iterable[Any],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        return_exceptions: bool = False,
    ) -> Iterator[R]:
        """One call per item, at most `concurrency` at once; results in order, as they come.

        Items are taken as calls end, so that an endless iterable works. Leaving the iterator early starts no more.
        With `return_exceptions` a call that raised has its exception in its place.
        """
        return self._iterate(iter(items), concurrency, return_exceptions)

    def _iterate(self, items: Iterator[Any], concurrency: int, keep: bool) -> Iterator[R]:
        threads = ThreadPoolExecutor(concurrency, "shoal-map")
        pending: list[Future[Invocation[R]]] = []
        try:
            exhausted = False
            while True:
                while (
                    not exhausted
                    and sum(not one.done() for one in pending) < concurrency
                    and len(pending) < 4 * concurrency
                ):
                    try:
                        item = next(items)
                    except StopIteration:
                        exhausted = True
                        break
                    pending.append(threads.submit(self._function._here, (item,), {}))
                if not pending:
                    return
                if not pending[0].done():
                    wait([one for one in pending if not one.done()], return_when=FIRST_COMPLETED)
                    continue
                first = pending.pop(0)
                error = first.exception()
                if error is None:
                    yield first.result().value
                elif keep:
                    yield cast(R, error)
                else:
                    raise error
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    async def aio(
        self,
        items: Iterable[Any],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        return_exceptions: bool = False,
    ) -> list[R]:
        """One call per item, at most `concurrency` at once; all results, in order."""
        turns = asyncio.Semaphore(concurrency)

        async def one(item: Any) -> R:
            async with turns:
                return (await self._function._there((item,), {})).value

        tasks = [asyncio.ensure_future(one(item)) for item in items]
        try:
            results = await asyncio.gather(*tasks, return_exceptions=return_exceptions)
        finally:
            for task in tasks:
                task.cancel()
        return cast(list[R], list(results))


@overload
def function(
    *,
    image: str,
    result: Form = "json",
    trust_result: bool = False,
    client: Shoal | None = None,
    async_client: AsyncShoal | None = None,
    **options: Unpack[ExecuteOptions],
) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]: ...
@overload
def function(
    function: Callable[P, R],
    /,
    *,
    image: str,
    result: Form = "json",
    trust_result: bool = False,
    client: Shoal | None = None,
    async_client: AsyncShoal | None = None,
    **options: Unpack[ExecuteOptions],
) -> RemoteFunction[P, R]: ...
def function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    image: str,
    result: Form = "json",
    trust_result: bool = False,
    client: Shoal | None = None,
    async_client: AsyncShoal | None = None,
    **options: Unpack[ExecuteOptions],
) -> Any:
    """Makes a function runnable in sandboxes of an image.

    Args:
        image: `name:tag`; it needs a python3 of the caller's major.minor version.
        result: The format of results: `json`, or `msgpack`, which also carries bytes.
        trust_result: Unpickle results: they can be any object, and a sandbox that was taken over can then run code
            here. Only for code that you trust.
        client, async_client: None takes one that is made from the environment and shared.
        options: Of every call: `resources`, `timeout_s`, `env`, `run`, `files` and the others of `execute`.
    """

    def made(plain: Callable[..., Any]) -> RemoteFunction[Any, Any]:
        return RemoteFunction(
            plain,
            image,
            result=result,
            trust_result=trust_result,
            client=client,
            async_client=async_client,
            options=options,
        )

    return made if function is None else made(function)
