"""The prefix that keeps a gateway from sending a route to routers: the same routes are below it.

With `data_plane` `router` or `alb` actions and files go to routers on the hosts. While there is no host, the gateway
answers them with a bare 503, although an ended session's are told without any host. A client then asks again below
`BY_FUNCTION`, which is no route of the gateway's and so is its default's, the function. Servers take the prefix as
well: it means the same everywhere.
"""

from __future__ import annotations

from starlette.types import Scope

from shoal.contract.route import BY_FUNCTION, BY_FUNCTION_HEADER

HEADER = (BY_FUNCTION_HEADER.encode(), b"function")
_RAW = BY_FUNCTION.encode()


def has_prefix(path: str) -> bool:
    """Whether a path is below the prefix."""
    return path.startswith(BY_FUNCTION + "/v1/")


def without_prefix(scope: Scope) -> Scope:
    """The request as it is without the prefix; as it came where it has none."""
    if not has_prefix(scope["path"]):
        return scope
    plain = {**scope, "path": scope["path"].removeprefix(BY_FUNCTION)}
    if scope.get("raw_path"):
        plain["raw_path"] = scope["raw_path"].removeprefix(_RAW)
    return plain
