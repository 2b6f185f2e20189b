"""What of an action is kept: everything but the values of its environment, and a digest that tells it from others."""

from __future__ import annotations

import hashlib

from shoal.contract.actions import Action, Exec, RunCode

#: Stands for an environment value in records and answers.
HIDDEN = "***"


def kept_json(action: Action) -> bytes:
    """The action as the journal and every answer carry it; environment values are hidden, their names are not."""
    if isinstance(action, Exec | RunCode) and action.env:
        action = action.model_copy(update={"env": dict.fromkeys(action.env, HIDDEN)})
    return action.model_dump_json().encode()


def digest(session: str, action: Action, kept: bytes) -> str:
    """Tells whether a repeated id means the same action. Keyed by the session, so that equal actions of different
    sessions do not look alike; environment values count."""
    hashed = hashlib.blake2b(kept, digest_size=16, key=session.encode()[:64])
    if isinstance(action, Exec | RunCode) and action.env:
        for name in sorted(action.env):
            hashed.update(f"\0{name}={action.env[name]}".encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()
