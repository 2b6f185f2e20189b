"""The generated documents say what the code does."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from api import calls, routes
from api.errors import STATUS
from api.openapi import documents, openapi
from api.state import known_query
from shoal.contract.errors import TABLE, ErrorCode, invalid


@pytest.mark.parametrize("name", ["openapi.json", "errors.md", "metrics.md"])
def test_the_committed_document_is_what_the_code_generates(name: str) -> None:
    """`python -m api.openapi` was run after the last change."""
    path, text = next((path, text) for path, text in documents().items() if path.name == name)
    assert path.read_text(encoding="utf-8") == text


def test_every_code_has_a_status_and_a_meaning() -> None:
    """The tables are whole: a new code cannot be forgotten in one of them."""
    assert set(STATUS) == set(ErrorCode) == set(TABLE)
    assert all(400 <= status < 600 for status in STATUS.values())


def test_every_relayed_route_is_declared_and_every_declared_one_is_relayed() -> None:
    """The front's list and the document's are one."""
    paths = openapi()["paths"]
    relayed = {
        (operation.template, method)
        for methods in calls._OPERATIONS.values()
        for method, operation in methods.items()
        if method != "HEAD"
    }
    for template, method in relayed:
        assert method.lower() in paths[template], f"{method} {template} is not in the document"
    for path, methods in paths.items():
        if path.startswith(
            ("/v1/sessions/{id}/actions", "/v1/sessions/{id}/files", "/v1/sessions/{id}/traj")
        ):
            for method in methods:
                assert (path, method.upper()) in relayed
                raw = path.replace("{id}", "s").replace("{action}", "a")
                scope = {"method": method.upper(), "path": raw, "raw_path": raw.encode(), "query_string": b""}
                assert calls.match(scope) is not None


def test_every_operation_says_what_it_is_and_how_it_fails() -> None:
    """Summaries, tags, and an ErrorBody for whatever is not in the list of answers."""
    for path, methods in openapi()["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["tags"], where
            assert "ErrorBody" in str(operation["responses"]["default"]), where
            assert "422" not in operation["responses"], where


def test_everything_but_health_needs_a_key_in_the_document() -> None:
    """Clients that are generated from it know where the key goes."""
    for path, methods in openapi()["paths"].items():
        for method, operation in methods.items():
            is_open = path in ("/healthz", "/readyz", "/metrics")
            assert bool(operation.get("security")) is not is_open, f"{method} {path}"


def test_no_dependency_is_sent_to_a_thread() -> None:
    """FastAPI runs what is not asynchronous on a thread pool, for each request: a hop that nobody needs."""
    for route in _routes():
        pending = [route.dependant]
        while pending:
            one = pending.pop()
            pending.extend(one.dependencies)
            call = one.call
            assert call is not None
            is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
                getattr(call, "__call__", None)  # noqa: B004 - an instance such as HTTPBearer
            )
            assert is_async, f"{route.path}: {call}"


def _routes() -> list[APIRoute]:
    modules = [import_module(f"api.routes.{info.name}") for info in pkgutil.iter_modules(routes.__path__)]
    found = [route for module in modules for route in module.router.routes]
    assert len(found) > 40
    return [route for route in found if isinstance(route, APIRoute)]


def test_every_route_refuses_query_parameters_that_it_does_not_have() -> None:
    """Those that FastAPI serves by the shared dependency, the relayed ones by what the document says that they have."""
    relayed = {
        (operation.template, method): operation
        for methods in calls._OPERATIONS.values()
        for method, operation in methods.items()
    }
    paths = openapi()["paths"]
    for (template, method), operation in relayed.items():
        declared = paths[template]["get" if method == "HEAD" else method.lower()].get("parameters", ())
        assert set(operation.query or ()) == {one["name"] for one in declared if one["in"] == "query"}, (
            template
        )
    for route in _routes():
        if route.path.startswith(("/internal/", "/healthz", "/readyz", "/metrics")) or "later" in route.tags:
            continue
        if any((route.path, method) in relayed for method in route.methods or ()):
            continue
        called, pending = set(), [route.dependant]
        while pending:
            one = pending.pop()
            called.add(one.call)
            pending.extend(one.dependencies)
        assert known_query in called, route.path


_ROOT = Path(__file__).resolve().parents[3]


def test_wrong_fields_are_told_in_one_form_only() -> None:
    """`details.fields` is made by `shoal.contract.errors.invalid` and nowhere else: a list of `{path, message}`."""
    made = [
        str(path.relative_to(_ROOT))
        for room in ("shoal", "provisioner", "api", "costs", "runtime_image")
        for path in sorted((_ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Dict)
        and any(isinstance(key, ast.Constant) and key.value == "fields" for key in node.keys)
    ]
    assert made == ["shoal/contract/errors.py"]
    error = invalid("a.b", "is wrong", ("query.c", "is not one"))
    assert error.details == {
        "fields": [{"path": "a.b", "message": "is wrong"}, {"path": "query.c", "message": "is not one"}]
    }
