"""Connections: many small httpx clients behind one count of turns.

One httpx connection pool walks over all its connections at each request, so that a thousand of them cost more than
the requests. Here each client holds at most 8 connections, and the first one with room is taken: a few requests
share a few warm connections, a thousand spread over 125 clients (measured at 32 in flight: 0.8 ms of CPU a request,
and 2.8 ms with all on one client). When all turns are taken, requests queue without a time-out (no PoolTimeout), and
long polls ask for short waits, so that turns go round.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import httpx

from shoal.client.config import ClientConfig
from shoal.client.effects import READ_MARGIN_S, Reply, Send, TransportFailed
from shoal.client.errors import ConfigError
from shoal.contract.base import MAX_WAIT_S

PER_CLIENT = 8
CONNECT_S = 10.0
WRITE_S = 60.0
#: What long polls ask for while others wait for a turn.
BUSY_WAIT_S = 1.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_USER_AGENT = "shoal-python/1"


C = TypeVar("C", bound=httpx.Client | httpx.AsyncClient)


class _Shard(Generic[C]):
    def __init__(self, client: C) -> None:
        self.client = client
        self.in_flight = 0


class _Shards(Generic[C]):
    """Clients with their loads. Not locked: the caller holds a lock, or is alone on its loop."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self.all: list[_Shard[C]] = []

    def take(self) -> _Shard[C]:
        for shard in self.all:
            if shard.in_flight < PER_CLIENT:
                break
        else:
            shard = _Shard(self._make())
            self.all.append(shard)
        shard.in_flight += 1
        return shard


class _Making:
    """How clients and requests are made; the same for both kinds."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._ssl: ssl.SSLContext | None = None

    def client_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "limits": httpx.Limits(
                max_connections=None, max_keepalive_connections=PER_CLIENT, keepalive_expiry=30.0
            ),
            "headers": {"user-agent": _USER_AGENT},
            "follow_redirects": False,
            "trust_env": not self.config.is_loopback,
        }
        if self._ssl is None:
            self._ssl = httpx.create_ssl_context(trust_env=not self.config.is_loopback)
        options["verify"] = (
            self._ssl
        )  # loading the certificates costs more than a request: once, not per client
        return options

    def request(self, client: httpx.Client | httpx.AsyncClient, send: Send, content: Any) -> httpx.Request:
        read_s = send.wait_s + READ_MARGIN_S
        headers = dict(send.headers)
        url = send.path
        if not send.foreign:
            headers = {"authorization": f"Bearer {send.token or self.config.api_key}", **headers}
            url = (send.base_url or self.config.url) + send.path
        try:
            return client.build_request(
                send.method,
                url,
                params=dict(send.params) or None,
                content=content,
                headers=headers,
                timeout=httpx.Timeout(connect=CONNECT_S, read=read_s, write=WRITE_S, pool=None),
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ConfigError(f"the service's URL or the key cannot be used: {error}") from error


def _failed(error: Exception, send: Send, config: ClientConfig) -> TransportFailed:
    # Of a foreign URL the query is a permission: not for messages.
    url = send.path.partition("?")[0] if send.foreign else send.base_url or config.url
    text = str(error) or type(error).__name__
    return TransportFailed(f"{url}: {text}", arrived=not isinstance(error, _NOT_SENT))


def _headers(response: httpx.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


class SyncPool:
    """Sends requests from any number of threads; survives a fork with connections of its own."""

    def __init__(self, config: ClientConfig, transport: httpx.BaseTransport | None = None) -> None:
        self._making = _Making(config)
        self._transport = transport
        self._reset()
        _living.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(self._making.config.max_in_flight)
        self._queued = 0
        self._shards: _Shards[httpx.Client] = _Shards(self._make)

    def _make(self) -> httpx.Client:
        options = self._making.client_options()
        if self._transport is not None:
            return httpx.Client(transport=self._transport, **options)
        return httpx.Client(**options)

    def patience(self) -> float:
        """The longest wait that a long poll should ask for now, in seconds."""
        return MAX_WAIT_S if self._queued == 0 else BUSY_WAIT_S

    @contextmanager
    def _turn(self) -> Iterator[httpx.Client]:
        if not self._turns.acquire(blocking=False):
            with self._lock:
                self._queued += 1
            try:
                self._turns.acquire()
            finally:
                with self._lock:
                    self._queued -= 1
        try:
            with self._lock:
                shard = self._shards.take()
            try:
                yield shard.client
            finally:
                with self._lock:
                    shard.in_flight -= 1
        finally:
            self._turns.release()

    @contextmanager
    def stream(self, send: Send) -> Iterator[httpx.Response]:
        """A response whose body is read by the caller.

        Raises:
            TransportFailed: No answer, or it broke off.
        """
        content = send.content if send.source is None else send.source()
        with self._turn() as client:
            request = self._making.request(client, send, content)
            try:
                response = client.send(request, stream=True)
                try:
                    yield response
                finally:
                    response.close()
            except (httpx.TransportError, httpx.DecodingError) as error:
                raise _failed(error, send, self._making.config) from error

    def send(self, send: Send) -> Reply:
        """A whole answer; the body of a 2xx one goes to the request's sink when it has one.

        Raises:
            TransportFailed: No answer, or it broke off.
        """
        with self.stream(send) as response:
            if send.sink is not None and response.is_success:
                send.sink.start(_headers(response))
                for chunk in response.iter_bytes():
                    send.sink.write(chunk)
                content = b""
            else:
                content = response.read()
            return Reply(status=response.status_code, headers=_headers(response), content=content)

    def close(self) -> None:
        """Closes the connections; a later request opens new ones."""
        with self._lock:
            shards, self._shards = self._shards.all, _Shards(self._make)
        for shard in shards:
            shard.client.close()


_living: weakref.WeakSet[SyncPool] = weakref.WeakSet()


def _in_child() -> None:
    # The parent goes on using the connections: they are dropped here, not closed in its name.
    for pool in list(_living):
        pool._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class _LoopState:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, turns: int, make: Callable[[], httpx.AsyncClient]
    ) -> None:
        self.loop = loop
        self.pid = os.getpid()
        self.turns = asyncio.Semaphore(turns)
        self.shards: _Shards[httpx.AsyncClient] = _Shards(make)


class AsyncPool:
    """Sends requests from the tasks of one event loop; another loop, or a forked child, gets connections of its own."""

    def __init__(self, config: ClientConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._making = _Making(config)
        self._transport = transport
        self._state: _LoopState | None = None
        self._queued = 0

    def _make(self) -> httpx.AsyncClient:
        options = self._making.client_options()
        if self._transport is not None:
            return httpx.AsyncClient(transport=self._transport, **options)
        return httpx.AsyncClient(**options)

    def _here(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        state = self._state
        if state is None or state.loop is not loop or state.pid != os.getpid():
            state = self._state = _LoopState(loop, self._making.config.max_in_flight, self._make)
            self._queued = 0
        return state

    def patience(self) -> float:
        """The longest wait that a long poll should ask for now, in seconds."""
        return MAX_WAIT_S if self._queued == 0 else BUSY_WAIT_S

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[httpx.AsyncClient]:
        state = self._here()
        if state.turns.locked():
            self._queued += 1
            try:
                await state.turns.acquire()
            finally:
                self._queued -= 1
        else:
            await state.turns.acquire()
        try:
            shard = state.shards.take()
            try:
                yield shard.client
            finally:
                shard.in_flight -= 1
        finally:
            state.turns.release()

    @asynccontextmanager
    async def stream(self, send: Send) -> AsyncIterator[httpx.Response]:
        """A response whose body is read by the caller.

        Raises:
            TransportFailed: No answer, or it broke off.
        """
        content = send.content if send.source is None else _in_threads(send.source())
        async with self._turn() as client:
            request = self._making.request(client, send, content)
            try:
                response = await client.send(request, stream=True)
                try:
                    yield response
                finally:
                    await response.aclose()
            except (httpx.TransportError, httpx.DecodingError) as error:
                raise _failed(error, send, self._making.config) from error

    async def send(self, send: Send) -> Reply:
        """A whole answer; the body of a 2xx one goes to the request's sink when it has one.

        Raises:
            TransportFailed: No answer, or it broke off.
        """
        async with self.stream(send) as response:
            if send.sink is not None and response.is_success:
                send.sink.start(_headers(response))
                async for chunk in response.aiter_bytes():
                    send.sink.write(chunk)
                content = b""
            else:
                content = await response.aread()
            return Reply(status=response.status_code, headers=_headers(response), content=content)

    async def close(self) -> None:
        """Closes the connections; a later request opens new ones."""
        state, self._state = self._state, None
        if state is not None and state.loop is asyncio.get_running_loop() and state.pid == os.getpid():
            for shard in state.shards.all:
                await shard.client.aclose()


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
