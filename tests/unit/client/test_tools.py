"""A session as a model's tools: what the model reads, and what it never does."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shoal import AsyncShoal, SandboxLost, Shoal
from shoal.client.results import EditResult, ExecResult, ListResult, ReadResult, SearchResult
from shoal.contract.errors import ErrorCode
from shoal.integrations.tools import AsyncSessionTools, SessionTools, describe
from tests.unit.client.fake_service import FakeService, error


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def tools(service: FakeService) -> SessionTools:
    shoal = Shoal("http://127.0.0.1:1", "key", transport=service.transport)
    return SessionTools(shoal.session("code:1"))


def test_definitions_are_json_schema(tools: SessionTools) -> None:
    """Both common forms carry the same tools; required arguments are told."""
    named = {one["function"]["name"]: one["function"] for one in tools.openai()}
    assert list(named) == ["bash", "read_file", "write_file", "edit_file", "list_files", "search"]
    assert named["edit_file"]["parameters"]["required"] == ["path", "old", "new"]
    assert all(one["input_schema"]["additionalProperties"] is False for one in tools.anthropic())
    json.dumps(tools.openai())


def test_a_call_is_a_step_under_the_callers_id(tools: SessionTools, service: FakeService) -> None:
    """A repeated tool call is not run twice."""
    assert tools.call("bash", {"command": "ls"}, step="call_1") == "ran ls"
    assert tools.call("bash", '{"command": "ls"}', step="call_1") == "ran ls"
    assert [run[1] for run in service.runs] == ["call_1"]
    assert service.runs[0][2] == {"type": "exec", "command": "ls", "shell": "agent", "timeout_s": 120.0}


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("fly", {}, "no tool 'fly'"),
        ("bash", "not json", "not JSON"),
        ("bash", {"cmd": "ls"}, "command: Field required"),
        ("bash", "[1]", "bad arguments"),
    ],
)
def test_a_bad_call_is_told_to_the_model(
    tools: SessionTools, service: FakeService, name: str, arguments: Any, told: str
) -> None:
    """Nothing is sent; the model can correct itself."""
    before = len(service.requests)
    assert told in tools.call(name, arguments)
    assert len(service.requests) == before


def test_the_platforms_failure_never_becomes_text(tools: SessionTools, service: FakeService) -> None:
    """Infrastructure that dies is not the model's failure."""
    service.fail("POST .*/actions", error(ErrorCode.SANDBOX_LOST, status=409))
    with pytest.raises(SandboxLost):
        tools.call("bash", {"command": "ls"})


def test_results_as_text() -> None:
    """What a model needs to go on: exit codes, near lines, what was left out."""
    assert describe(ExecResult(exit_code=0)) == "(no output)"
    assert describe(ExecResult(exit_code=2, stdout="o\n", stderr="e\n")) == "o\n[stderr]\ne\n[exit code 2]"
    assert "timed out after 2 s" in describe(ExecResult(signal="KILL", timed_out=True, duration_ms=2000))
    assert "out of memory" in describe(ExecResult(signal="KILL", oom_killed=True))
    edit = EditResult.model_validate({"found": 0, "near": [{"line": 3, "text": "retrun x"}]})
    assert "occurs 0 times" in describe(edit)
    assert "3: retrun x" in describe(edit)
    missing = ReadResult.model_validate({"error": {"errno": "ENOENT", "message": "No such file"}})
    assert describe(missing) == "error: ENOENT: No such file"
    assert describe(ListResult()) == "(empty)"
    assert describe(SearchResult()) == "(no matches)"
    long = describe(ReadResult(content="x" * 100), limit=20)
    assert "80 characters left out" in long


async def test_the_async_twin(service: FakeService) -> None:
    """The same for asyncio."""
    async with AsyncShoal(
        "http://127.0.0.1:1", "key", transport=httpx.MockTransport(service.handle)
    ) as shoal:
        tools = AsyncSessionTools(await shoal.session("code:1"), ["bash"])
        assert await tools.call("bash", {"command": "ls"}) == "ran ls"
        assert "no tool" in await tools.call("search", {"pattern": "x"})
