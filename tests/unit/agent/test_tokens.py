"""Route tokens: only those signed by a trusted key, for this host, in time."""

from __future__ import annotations

import base64
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from runtime_image.agent.fakes import ManualClock
from runtime_image.agent.tokens import TokenVerifier, require_control, require_session
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.route import PublicKey


class Signer:
    """A control plane's key."""

    def __init__(self, kid: str) -> None:
        self.kid = kid
        self.key = Ed25519PrivateKey.generate()
        raw = self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.public = PublicKey(kid=kid, x=base64.urlsafe_b64encode(raw).decode().rstrip("="))

    def header(self, clock: ManualClock, **claims: Any) -> str:
        """An Authorization header."""
        now = int(clock.now().timestamp())
        payload = {
            "iss": "shoal",
            "aud": "hst_1",
            "kind": "session",
            "sub": "ses_1",
            "epo": 1,
            "scp": ["sessions"],
        }
        payload |= {"iat": now, "exp": now + 50, **claims}
        return "Bearer " + jwt.encode(payload, self.key, algorithm="EdDSA", headers={"kid": self.kid})


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


def _refusal(verifier: TokenVerifier, header: str | None) -> ErrorCode:
    with pytest.raises(ShoalError) as refused:
        verifier.verify(header)
    return refused.value.code


def test_a_good_token_is_good_until_it_expires(clock: ManualClock) -> None:
    """Also from the cache."""
    signer, verifier = Signer("k1"), TokenVerifier(clock)
    verifier.trust("hst_1", [signer.public])
    header = signer.header(clock)
    assert verifier.verify(header).sub == "ses_1"
    clock.advance(40)
    assert verifier.verify(header).sub == "ses_1"
    clock.advance(20)
    assert _refusal(verifier, header) is ErrorCode.TOKEN_REFUSED


def test_a_key_that_is_not_trusted_any_more_opens_nothing(clock: ManualClock) -> None:
    """Rotation takes effect at once, also for tokens that were verified before."""
    old, new, verifier = Signer("k1"), Signer("k2"), TokenVerifier(clock)
    verifier.trust("hst_1", [old.public, new.public])
    verifier.verify(old.header(clock))
    verifier.trust("hst_1", [new.public])
    assert _refusal(verifier, old.header(clock)) is ErrorCode.TOKEN_REFUSED
    verifier.verify(new.header(clock))


def test_forged_and_misdirected_tokens_are_refused(clock: ManualClock) -> None:
    """Other key under a known id, other host, other issuer, other algorithm, too long, garbage, none."""
    signer, verifier = Signer("k1"), TokenVerifier(clock)
    verifier.trust("hst_1", [signer.public])
    now = int(clock.now().timestamp())
    unsigned = jwt.encode({"aud": "hst_1", "iss": "shoal", "iat": now, "exp": now + 9}, "", algorithm="none")
    for header in (
        Signer("k1").header(clock),
        signer.header(clock, aud="hst_2"),
        signer.header(clock, iss="other"),
        signer.header(clock, exp=now + 3600),
        f"Bearer {unsigned}",
        "Bearer garbage",
    ):
        assert _refusal(verifier, header) is ErrorCode.TOKEN_REFUSED
    assert _refusal(verifier, None) is ErrorCode.UNAUTHENTICATED
    assert _refusal(verifier, "Basic x") is ErrorCode.UNAUTHENTICATED


def test_what_a_token_allows(clock: ManualClock) -> None:
    """A session's token does not command hosts; a sandbox's command does not reach others; readers only read."""
    signer, verifier = Signer("k1"), TokenVerifier(clock)
    verifier.trust("hst_1", [signer.public])
    session = verifier.verify(signer.header(clock))
    whole_host = verifier.verify(signer.header(clock, kind="control", sub="", epo=0))
    one = verifier.verify(signer.header(clock, kind="control", epo=0))
    reader = verifier.verify(signer.header(clock, scp=["read"]))
    require_session(session, "ses_1", write=True)
    require_session(reader, "ses_1", write=False)
    require_control(whole_host, "ses_1")
    require_control(one, "ses_1")
    for check in (
        lambda: require_session(session, "ses_2", write=False),
        lambda: require_session(reader, "ses_1", write=True),
        lambda: require_session(whole_host, "ses_1", write=False),
        lambda: require_control(session, "ses_1"),
        lambda: require_control(one, "ses_2"),
    ):
        with pytest.raises(ShoalError):
            check()
