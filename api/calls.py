"""Which requests are relayed to a session's host: matched on the raw path, so that an encoded slash stays one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import unquote

from starlette.datastructures import QueryParams
from starlette.types import Scope as AsgiScope

from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import Scope

_READ = (Scope.READ, Scope.SESSIONS)
_WRITE = (Scope.SESSIONS,)


class Kind(Enum):
    """What a relayed request is about; the relay treats them differently where they must be."""

    ACT = auto()
    ACTION = auto()
    STREAM = auto()
    INPUT = auto()
    KILL = auto()
    TRAJECTORY = auto()
    FILE_GET = auto()
    FILE_PUT = auto()
    PORT = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One relayed route.

    Attributes:
        repeatable: Sending it twice does no harm, whatever its body says.
        query: The query parameters that it has; None leaves them to whoever answers.
    """

    kind: Kind
    template: str
    scopes: tuple[Scope, ...]
    repeatable: bool
    query: frozenset[str] | None


def _operation(
    kind: Kind, below: str, scopes: tuple[Scope, ...], query: str | None = "", *, repeatable: bool
) -> Operation:
    return Operation(
        kind=kind,
        template=f"/v1/sessions/{{id}}/{below}",
        scopes=scopes,
        repeatable=repeatable,
        query=None if query is None else frozenset(query.split()),
    )


#: By shape of the path below the session and by method.
_OPERATIONS: dict[str, dict[str, Operation]] = {
    "actions": {"POST": _operation(Kind.ACT, "actions", _WRITE, repeatable=False)},
    "actions/*": {
        "GET": _operation(
            Kind.ACTION, "actions/{action}", _READ, "wait_s stdout_offset stderr_offset", repeatable=True
        ),
        "DELETE": _operation(Kind.KILL, "actions/{action}", _WRITE, repeatable=True),
    },
    "actions/*/stream": {
        "GET": _operation(Kind.STREAM, "actions/{action}/stream", _READ, "last_event_id", repeatable=True)
    },
    "actions/*/stdin": {"POST": _operation(Kind.INPUT, "actions/{action}/stdin", _WRITE, repeatable=False)},
    "actions/*/resize": {"POST": _operation(Kind.INPUT, "actions/{action}/resize", _WRITE, repeatable=True)},
    "trajectory": {"GET": _operation(Kind.TRAJECTORY, "trajectory", _READ, "after_seq", repeatable=True)},
    "files": {
        "GET": _operation(Kind.FILE_GET, "files", _READ, "path checksum transfer", repeatable=True),
        "HEAD": _operation(Kind.FILE_GET, "files", _READ, "path checksum transfer", repeatable=True),
        "PUT": _operation(
            Kind.FILE_PUT,
            "files",
            _WRITE,
            "path mode owner create_parents transfer wait_s",
            repeatable=False,
        ),
    },
}
_ANY_PORT = _operation(Kind.PORT, "ports/{port}/{path}", _WRITE, None, repeatable=False)
_PREFIX = b"/v1/sessions/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request to relay.

    Attributes:
        session: The session's id, decoded.
        action: The action's id, decoded; empty where the route names none.
        target: Raw path and query, as they came.
    """

    operation: Operation
    session: str
    action: str
    target: str

    @property
    def template(self) -> str:
        """The route's template, for metrics."""
        return self.operation.template

    @property
    def query(self) -> str:
        """Its raw query."""
        return self.target.partition("?")[2]

    @property
    def by_transfer(self) -> bool:
        """Whether its bytes go by the blob store."""
        return "transfer=" in self.query and "transfer" in QueryParams(self.query)

    def unknown_query(self) -> list[str]:
        """The names of query parameters that the route does not have."""
        known = self.operation.query
        query = self.query
        if not query or known is None:
            return []
        return [name for name in QueryParams(query) if name not in known]


def match(scope: AsgiScope) -> Call | None:
    """The relayed call that a request is; None when another part serves it.

    Raises:
        ShoalError: METHOD_NOT_ALLOWED where the path is relayed and the method is not.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    if not raw.startswith(_PREFIX):
        return None
    raw = raw.partition(b"?")[0]
    session, slash, below = raw[len(_PREFIX) :].partition(b"/")
    if not slash or not session:
        return None
    parts = below.split(b"/")
    action = b""
    shape = parts[0].decode("latin-1")
    if shape == "ports" and len(parts) >= 2:
        return _call(_ANY_PORT, session, action, raw, scope)
    if shape == "actions" and len(parts) > 1:
        action = parts[1]
        shape = "/".join(["actions", "*", *(part.decode("latin-1") for part in parts[2:])])
    elif len(parts) > 1:
        return None
    methods = _OPERATIONS.get(shape)
    if methods is None or (len(parts) > 1 and not action):
        return None
    operation = methods.get(scope["method"])
    if operation is None:
        raise ShoalError(
            ErrorCode.METHOD_NOT_ALLOWED,
            f"{scope['method']} is not a method of this route; it has {', '.join(sorted(methods))}",
        )
    return _call(operation, session, action, raw, scope)


def _call(operation: Operation, session: bytes, action: bytes, raw: bytes, scope: AsgiScope) -> Call:
    query: bytes = scope["query_string"]
    target = raw.decode("latin-1") + ("?" + query.decode("latin-1") if query else "")
    return Call(
        operation=operation,
        session=unquote(session.decode("latin-1")),
        action=unquote(action.decode("latin-1")),
        target=target,
    )
