"""The two drivers of operations: they send, sleep and decide nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shoal.client.effects import Op, Reply, Send, TransportFailed

T = TypeVar("T")


def run(op: Op[T], send: Callable[[Send], Reply], sleep: Callable[[float], None] = time.sleep) -> T:
    """Runs an operation to its end."""
    try:
        effect = next(op)
        while True:
            reply: Reply | None = None
            if isinstance(effect, Send):
                try:
                    reply = send(effect)
                except TransportFailed as failure:
                    effect = op.throw(failure)
                    continue
            else:
                sleep(effect.seconds)
            effect = op.send(reply)
    except StopIteration as done:
        value: T = done.value
        return value
    finally:
        op.close()


async def arun(
    op: Op[T],
    send: Callable[[Send], Awaitable[Reply]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Runs an operation to its end on the event loop."""
    try:
        effect = next(op)
        while True:
            reply: Reply | None = None
            if isinstance(effect, Send):
                try:
                    reply = await send(effect)
                except TransportFailed as failure:
                    effect = op.throw(failure)
                    continue
            else:
                await sleep(effect.seconds)
            effect = op.send(reply)
    except StopIteration as done:
        value: T = done.value
        return value
    finally:
        op.close()
