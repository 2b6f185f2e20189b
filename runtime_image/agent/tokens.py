"""Who may command this host, and who may act in one of its sessions: route tokens, checked with public keys."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from runtime_image.agent.clock import Clock
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.route import ALGORITHM, ISSUER, MAX_TOKEN_AGE_S, PublicKey, RouteClaims
from shoal.contract.states import Scope

#: Seconds by which the clocks of control plane and host may differ.
_LEEWAY_S = 5
_CACHE_SIZE = 8192


def _refused(message: str) -> ShoalError:
    return ShoalError(ErrorCode.TOKEN_REFUSED, message)


class TokenVerifier:
    """Verifies tokens for one host. Verified ones are remembered until they expire, or the keys change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._host = ""
        self._keys: dict[str, Ed25519PublicKey] = {}
        self._known: list[PublicKey] = []
        self._cache: dict[str, RouteClaims] = {}

    def trust(self, host: str, keys: Iterable[PublicKey]) -> None:
        """Accept tokens for `host` signed by `keys`, and no others. Keys that cannot be read are left out."""
        wanted = list(keys)
        if host == self._host and wanted == self._known:
            return
        self._host, self._known = host, wanted
        self._keys = {}
        for key in wanted:
            try:
                raw = base64.urlsafe_b64decode(key.x + "=" * (-len(key.x) % 4))
                self._keys[key.kid] = Ed25519PublicKey.from_public_bytes(raw)
            except ValueError:
                continue
        self._cache.clear()

    def verify(self, authorization: str | None) -> RouteClaims:
        """The claims of a `Bearer` header.

        Raises:
            ShoalError: `unauthenticated` without a token; `token_refused` for one that is expired, forged, for another
                host, or good for longer than a route token may be.
        """
        if not authorization or not authorization[:7].lower() == "bearer ":
            raise ShoalError(ErrorCode.UNAUTHENTICATED, "This host takes signed route tokens only.")
        token = authorization[7:]
        now = self._clock.now().timestamp()
        claims = self._cache.get(token)
        if claims is None:
            claims = self._decode(token)
            if len(self._cache) >= _CACHE_SIZE:
                self._cache = {t: c for t, c in self._cache.items() if c.exp + _LEEWAY_S > now}
                if len(self._cache) >= _CACHE_SIZE:
                    self._cache.clear()
            self._cache[token] = claims
        if claims.exp + _LEEWAY_S <= now:
            self._cache.pop(token, None)
            raise _refused("The route token is expired.")
        return claims

    def _decode(self, token: str) -> RouteClaims:
        try:
            key = self._keys.get(jwt.get_unverified_header(token).get("kid", ""))
            if key is None:
                raise _refused("The route token is signed by a key that this host does not know.")
            payload: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                audience=self._host,
                issuer=ISSUER,
                options={"require": ["aud", "iss", "iat", "exp"], "verify_exp": False, "verify_iat": False},
            )
            claims = RouteClaims.model_validate(payload)
        except (jwt.InvalidTokenError, ValidationError) as error:
            raise _refused("The route token is not valid for this host.") from error
        if claims.exp - claims.iat > MAX_TOKEN_AGE_S:
            raise _refused(f"The route token is good for longer than {MAX_TOKEN_AGE_S} s.")
        return claims


def require_control(claims: RouteClaims, session: str | None = None) -> None:
    """Raise `forbidden` unless the token commands this host, or `session` on it."""
    if claims.kind != "control" or (claims.sub and claims.sub != session):
        raise ShoalError(ErrorCode.FORBIDDEN, "This token does not command this host.")


def require_session(claims: RouteClaims, session: str, *, write: bool) -> None:
    """Raise unless the token is for `session` and its key may read it (or, with `write`, act in it)."""
    if claims.kind != "session" or claims.sub != session:
        raise _refused("The route token is for another session.")
    scopes = claims.scp
    if Scope.SESSIONS in scopes or Scope.ADMIN in scopes or (not write and Scope.READ in scopes):
        return
    raise ShoalError(ErrorCode.FORBIDDEN, "The API key lacks the scope `sessions`.")
