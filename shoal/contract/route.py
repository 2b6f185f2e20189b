"""The route token: what lets a host's agent serve a request without asking anyone.

A JSON Web Token signed with Ed25519 (`alg: EdDSA`), with a key id (`kid`) in its header. Agents hold public keys
only, and accept only tokens for their own host; a session's token also only for the epoch that they run.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.contract.base import Answer
from shoal.contract.states import Scope

#: Seconds a token is good for at the most; a revoked key works no longer than this.
MAX_TOKEN_AGE_S = 60
#: Before a path, it is the same route by another way: where a gateway sends what is about a session's host to routers,
#: the function answers here, also while there is no router. Whoever knows the prefix says so by this header.
BY_FUNCTION = "/via/function"
BY_FUNCTION_HEADER = "x-shoal-via"
ISSUER = "shoal"
ALGORITHM = "EdDSA"


class RouteClaims(Answer):
    """The token's payload, with the short names of the JWT.

    Attributes:
        iss: Always `shoal`.
        aud: The host's id.
        kind: `control` commands a host (start, end, snapshot); `session` acts in one session.
        sub: The session; empty for `control` tokens that are for the whole host.
        epo: The session's epoch; 0 for `control` tokens.
        ten: The tenant.
        key: The id of the API key that asked.
        scp: What that key may do.
        adr: Where the host listens, as `http://address:port`.
        iat, exp: Issued and expiring, in seconds since the epoch.
    """

    iss: Literal["shoal"] = "shoal"
    aud: str
    kind: Literal["control", "session"]
    sub: str = ""
    epo: int = 0
    ten: str = ""
    key: str = ""
    scp: list[Scope] = Field(default_factory=list)
    adr: str = ""
    iat: int
    exp: int


class PublicKey(Answer):
    """A verification key: raw Ed25519 public key in URL-safe base64."""

    kid: str
    x: str
