"""Shoal: elastic sandboxes for agent training.

    from shoal import Shoal

    with Shoal() as shoal:
        with shoal.session("code:1.0.0", run="grpo-17", name="task-9/sample-3") as box:
            observation = box.exec("pytest -q", timeout_s=120)

What `__all__` names is promised; all else may change. Names load when they are first used, so that programs that need
only `shoal.contract` do not load the SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client.async_client import AsyncShoal
    from shoal.client.async_group import AsyncSessionGroup
    from shoal.client.async_session import AsyncSession
    from shoal.client.effects import RetryPolicy
    from shoal.client.errors import (
        ActionConflict,
        ActionFailed,
        ActionOutcomeUnknown,
        ConfigError,
        ConnectionFailed,
        FixError,
        GiveUpError,
        NoCapacity,
        NotFound,
        PythonMismatch,
        QuotaExceeded,
        RemoteError,
        ReplaceError,
        ResultError,
        RetryError,
        SandboxLost,
        SessionEnded,
        SessionRewound,
        WaitError,
        WaitTimeout,
    )
    from shoal.client.functions import RemoteFunction, function
    from shoal.client.sync_client import Shoal
    from shoal.client.sync_group import SessionGroup
    from shoal.client.sync_session import Session
    from shoal.contract.errors import ErrorCode, ShoalError

__version__ = "0.1.0"

_HOMES = {
    "AsyncShoal": "shoal.client.async_client",
    "AsyncSession": "shoal.client.async_session",
    "AsyncSessionGroup": "shoal.client.async_group",
    "Shoal": "shoal.client.sync_client",
    "Session": "shoal.client.sync_session",
    "SessionGroup": "shoal.client.sync_group",
    "RetryPolicy": "shoal.client.effects",
    "RemoteFunction": "shoal.client.functions",
    "function": "shoal.client.functions",
    "ErrorCode": "shoal.contract.errors",
    "ShoalError": "shoal.contract.errors",
}

__all__ = [
    "ActionConflict",
    "ActionFailed",
    "ActionOutcomeUnknown",
    "AsyncSession",
    "AsyncSessionGroup",
    "AsyncShoal",
    "ConfigError",
    "ConnectionFailed",
    "ErrorCode",
    "FixError",
    "GiveUpError",
    "NoCapacity",
    "NotFound",
    "PythonMismatch",
    "QuotaExceeded",
    "RemoteError",
    "RemoteFunction",
    "ReplaceError",
    "ResultError",
    "RetryError",
    "RetryPolicy",
    "SandboxLost",
    "Session",
    "SessionEnded",
    "SessionGroup",
    "SessionRewound",
    "Shoal",
    "ShoalError",
    "WaitError",
    "WaitTimeout",
    "__version__",
    "function",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "shoal.client.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
