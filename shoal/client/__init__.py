"""The SDK. `shoal` exports the names that are promised; they are here too.

operations (generators, no I/O)    client_core, session_core, platform_core, transfer, retry, steps
drivers and connections            drivers, pools
twins                              sync_*, async_*
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client.async_client import AsyncShoal as AsyncShoal
    from shoal.client.async_group import AsyncSessionGroup as AsyncSessionGroup
    from shoal.client.async_session import AsyncSession as AsyncSession
    from shoal.client.sync_client import Shoal as Shoal
    from shoal.client.sync_group import SessionGroup as SessionGroup
    from shoal.client.sync_session import Session as Session

_NAMES = {"AsyncSession", "AsyncSessionGroup", "AsyncShoal", "Session", "SessionGroup", "Shoal"}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'shoal.client' has no attribute {name!r}")
    import shoal

    return getattr(shoal, name)
