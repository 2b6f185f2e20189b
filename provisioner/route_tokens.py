"""Route tokens: signed here, verified by agents with public keys (`shoal.contract.route`).

Two keys are valid at a time: one signs, the one before it is still accepted. They are made and changed in the store,
so that every replica signs with the same and every agent hears of them in its heartbeat replies.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from provisioner import keys
from provisioner.auth import Principal
from provisioner.clock import Clock
from provisioner.model import SigningKey, dump, load
from provisioner.store.port import Absent, ConditionFailed, Key, Put, Store
from shoal.contract.base import HostId, SessionId, new_id
from shoal.contract.route import ALGORITHM, MAX_TOKEN_AGE_S, PublicKey, RouteClaims

#: Seconds for which a signed token is handed out again; what is left of its life is for the way and for slow clocks.
REUSE_S = 20.0
_CACHE_SIZE = 20_000


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class RouteSigner:
    """Signs route tokens. `refresh` must have run once, and again from time to time (the reconciler does)."""

    def __init__(self, store: Store, clock: Clock, *, key_life_s: float) -> None:
        self._store = store
        self._clock = clock
        self._life = timedelta(seconds=key_life_s)
        self._signing: tuple[str, Ed25519PrivateKey] | None = None
        self._public: list[PublicKey] = []
        self._cache: OrderedDict[tuple[str, ...], tuple[float, str]] = OrderedDict()

    async def refresh(self) -> None:
        """Read the keys; make the first, or the next one when the one that signs comes to its end."""
        now = self._clock.now()
        page = await self._store.query(keys.SIGNING)
        known = [load(SigningKey, stored.item) for stored in page.items]
        known = [key for key in known if key.ends_at > now]
        # A key signs only once it is old enough for every agent to have heard of it, unless there is no other.
        newest = max(known, key=lambda key: key.created_at, default=None)
        if newest is None or newest.retires_at - self._life / 10 <= now:
            known.append(await self._make(len(page.items)))
        settled = [key for key in known if key.created_at <= now - timedelta(seconds=MAX_TOKEN_AGE_S)]
        signing = (
            max(settled, key=lambda key: key.created_at)
            if settled
            else min(known, key=lambda key: key.created_at)
        )
        if self._signing is None or self._signing[0] != signing.kid:
            self._signing = (signing.kid, Ed25519PrivateKey.from_private_bytes(_decode(signing.private)))
            self._cache.clear()
        self._public = [PublicKey(kid=key.kid, x=key.public) for key in known]

    @property
    def public_keys(self) -> list[PublicKey]:
        """What agents verify with."""
        return self._public

    def session(self, who: Principal, host: HostId, address: str, session: SessionId, epoch: int) -> str:
        """A token to act in one session; the same one again for `REUSE_S`."""
        return self.session_for(who, host, address, session, epoch)[0]

    def session_for(
        self, who: Principal, host: HostId, address: str, session: SessionId, epoch: int
    ) -> tuple[str, float]:
        """The same, and for how many seconds it is good."""
        now = self._clock.now().timestamp()
        name = (host, session, str(epoch), who.key)
        found = self._cache.get(name)
        if found is None or found[0] + REUSE_S <= now:
            claims = RouteClaims(
                aud=host,
                kind="session",
                sub=session,
                epo=epoch,
                ten=who.tenant,
                key=who.key,
                scp=sorted(who.scopes),
                adr=address,
                iat=int(now),
                exp=int(now) + MAX_TOKEN_AGE_S,
            )
            found = (now, self._sign(claims))
            self._remember(name, found)
        return found[1], int(found[0]) + MAX_TOKEN_AGE_S - now

    def control(self, host: HostId, address: str) -> str:
        """A token to command a host."""
        now = self._clock.now().timestamp()
        name = ("control", host, address)
        found = self._cache.get(name)
        if found is None or found[0] + REUSE_S <= now:
            claims = RouteClaims(
                aud=host, kind="control", adr=address, iat=int(now), exp=int(now) + MAX_TOKEN_AGE_S
            )
            found = (now, self._sign(claims))
            self._remember(name, found)
        return found[1]

    def sign(self, claims: dict[str, Any]) -> str:
        """Any claims, signed. Their `aud` must be none that an agent believes: those are host ids."""
        if self._signing is None:
            raise RuntimeError("refresh() has not run")
        kid, private = self._signing
        return jwt.encode(claims, private, algorithm=ALGORITHM, headers={"kid": kid})

    def verify(self, token: str, audience: str) -> dict[str, Any] | None:
        """The claims of a token that `sign` made, here or in another replica; None for any other. Their `exp` is the
        caller's to look at, by its own clock."""
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = next((key for key in self._public if key.kid == kid), None)
            if key is None:
                return None
            public = Ed25519PublicKey.from_public_bytes(_decode(key.x))
            claims: dict[str, Any] = jwt.decode(
                token, public, algorithms=[ALGORITHM], audience=audience, options={"verify_exp": False}
            )
        except (jwt.PyJWTError, ValueError):
            return None
        return claims

    def _remember(self, name: tuple[str, ...], found: tuple[float, str]) -> None:
        self._cache[name] = found
        self._cache.move_to_end(name)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)

    def _sign(self, claims: RouteClaims) -> str:
        return self.sign(claims.model_dump(mode="json"))

    async def _make(self, number: int) -> SigningKey:
        private = Ed25519PrivateKey.generate()
        when = self._clock.now()
        key = SigningKey(
            kid=new_id("sig"),
            private=_encode(private.private_bytes_raw()),
            public=_encode(private.public_key().public_bytes_raw()),
            created_at=when,
            retires_at=when + self._life,
            ends_at=when + 2 * self._life,
        )
        # Numbered places: of two replicas that make the next key at once, one wins and the other takes it.
        place = Key(pk=keys.SIGNING, sk=f"{number:08d}")
        try:
            await self._store.transact([Put(key=place, item=dump(key), conditions=(Absent(),))])
        except ConditionFailed as error:
            if error.current is None:
                raise
            return load(SigningKey, error.current.item)
        return key
