"""From a bearer key to who asks and what they may do."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from provisioner.auth import Principal
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import Scope

_BEARER = b"bearer "
_MAX_CACHED = 10_000


class KeyCheck(Protocol):
    """What authentication needs of the provisioner."""

    async def authenticate(self, key: str) -> Principal:
        """Who a key belongs to.

        Raises:
            ShoalError: UNAUTHENTICATED for one that is unknown, expired or revoked.
        """


class Gate:
    """Verifies keys and remembers them for seconds, so that the hot path asks nobody."""

    def __init__(
        self, keys: KeyCheck, *, cache_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._cache_s = cache_s
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def admit(self, headers: Iterable[tuple[bytes, bytes]], scopes: tuple[Scope, ...]) -> Principal:
        """Who asks, if they may.

        Args:
            headers: The request's raw headers.
            scopes: The key needs one of these; `admin` is always enough.

        Raises:
            ShoalError: UNAUTHENTICATED without a valid key; FORBIDDEN when it lacks the scope.
        """
        value = b""
        for name, content in headers:
            if name == b"authorization":
                value = content
                break
        known = self._known.get(value)
        if known is not None and known[0] > self._clock():
            caller = known[1]
        else:
            caller = await self._verify(value)
        check_scope(caller, scopes)
        return caller

    async def _verify(self, value: bytes) -> Principal:
        caller = await self._keys.authenticate(bearer(value))
        self._known[value] = (self._clock() + self._cache_s, caller)
        self._known.move_to_end(value)
        if len(self._known) > _MAX_CACHED:
            self._known.popitem(last=False)
        return caller


def bearer(value: bytes) -> str:
    """The key in an `Authorization` header.

    Raises:
        ShoalError: UNAUTHENTICATED when there is none.
    """
    if value[: len(_BEARER)].lower() != _BEARER:
        raise ShoalError(ErrorCode.UNAUTHENTICATED, "no API key: send `Authorization: Bearer <key>`")
    return value[len(_BEARER) :].strip().decode("latin-1")


def check_scope(caller: Principal, scopes: tuple[Scope, ...]) -> None:
    """Refuse a caller that has none of the scopes.

    Raises:
        ShoalError: FORBIDDEN.
    """
    held = caller.scopes
    if Scope.ADMIN in held or any(scope in held for scope in scopes):
        return
    raise ShoalError(
        ErrorCode.FORBIDDEN,
        f"this key lacks the scope {' or '.join(scope.value for scope in scopes)}",
        details={"needs": [scope.value for scope in scopes]},
    )
