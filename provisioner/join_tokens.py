"""Join tokens: what lets an agent register as one host, once.

They are made from the host's id and a secret of this deployment, so that a start whose answer was lost, or that a
driver still owes, is asked for again with the same token, by any replica. The secret is made once, in the store; host
records keep only a token's hash, and a token is good for one boot id (`provisioner.hosts`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from provisioner import keys
from provisioner.store.port import Absent, ConditionFailed, Put, Store
from shoal.contract.base import HostId

_SECRET_BYTES = 32


class JoinTokens:
    """Makes join tokens."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret: bytes | None = None

    async def token(self, host: HostId) -> str:
        """The token of a host: always the same, `<host id>.<43 characters>`.

        Raises:
            ShoalError: UNAVAILABLE when the secret cannot be read.
        """
        if self._secret is None:
            self._secret = await self._read()
        digest = hmac.digest(self._secret, host.encode(), hashlib.sha256)
        return f"{host}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

    async def _read(self) -> bytes:
        stored = await self._store.get(keys.JOIN_SECRET)
        if stored is not None:
            return bytes.fromhex(stored.item["secret"])
        made = secrets.token_bytes(_SECRET_BYTES)
        try:
            # Of two replicas that make it at once, one wins and the other takes it.
            put = Put(key=keys.JOIN_SECRET, item={"secret": made.hex()}, conditions=(Absent(),))
            await self._store.transact([put])
        except ConditionFailed as error:
            if error.current is None:
                raise
            return bytes.fromhex(error.current.item["secret"])
        return made
