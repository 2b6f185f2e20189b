"""Remote functions: run here by a real second interpreter that has neither cloudpickle nor this project."""

from __future__ import annotations

import base64
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal import AsyncShoal, PythonMismatch, RemoteError, ResultError, Shoal, function
from shoal.client import function_wire
from shoal.client.functions import RemoteFunction

#: Used by a function below, so that it must travel with it.
FACTOR = 3


def scaled(value: int) -> int:
    return value * FACTOR


def twice(value: Any) -> Any:
    return [scaled(value), math.floor(2.5)]


def fails(value: int) -> int:
    print("before")
    raise KeyError(value)


class Runner:
    """Answers POST /v1/execute by running it in a bare interpreter: isolated, without site-packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = 0
        self.edit: dict[str, str] = {}
        self.executes: list[dict[str, Any]] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        self.executes.append(body)
        self.calls += 1
        home = self.root / str(self.calls)
        for file in body["files"]:
            content = file["content"]
            raw = base64.b64decode(content) if file.get("encoding") == "base64" else content.encode()
            path = home / file["path"].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        for name, text in self.edit.items():
            (home / name).write_text(text)
        argv = [part if not part.startswith("/tmp") else str(home) + part for part in body["argv"][1:]]
        run = subprocess.run(
            [sys.executable, "-I", "-S", *argv], capture_output=True, text=True, timeout=60, check=False
        )
        result = home / function_wire.result_path().lstrip("/")
        told = base64.b64encode(result.read_bytes()).decode() if result.exists() else None
        observation = {
            "type": "run_code",
            "exit_code": run.returncode,
            "stdout": run.stdout,
            "stderr": run.stderr,
        }
        answer = {
            "id": body["id"],
            "status": "done",
            "observation": observation,
            "files": [{"path": function_wire.result_path(), "content": told, "size_bytes": 1}],
        }
        return httpx.Response(200, json=answer)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture
def client(runner: Runner) -> Shoal:
    return Shoal("http://127.0.0.1:1", "key", transport=httpx.MockTransport(runner.handle))


def test_a_function_of_a_module_travels_with_what_it_uses(client: Shoal) -> None:
    """The other interpreter has neither this module nor cloudpickle; both arrive with the call."""
    remote = function(twice, image="code:1", client=client)
    assert remote.remote(5) == [15, 2]
    assert remote(5) == [15, 2]


def test_closures_and_lambdas_travel(client: Shoal) -> None:
    """What plain pickle refuses goes by value."""
    offset = 40
    remote = function(lambda value: value + offset, image="code:1", client=client)
    assert remote.remote(2) == 42


def test_a_remote_function_inside_another_is_the_plain_function_there(client: Shoal) -> None:
    """The image has no SDK: a decorated helper is called there like any function."""
    helper = function(scaled, image="code:1", client=client)
    remote = function(lambda value: helper(value) + 1, image="code:1", client=client)
    assert remote.remote(1) == 4


def test_a_remote_exception_keeps_its_traceback_as_text(client: Shoal) -> None:
    """RemoteError has the type, the message, the remote traceback and what was printed."""
    with pytest.raises(RemoteError) as caught:
        function(fails, image="code:1", client=client).remote(7)
    assert caught.value.kind == "builtins.KeyError"
    assert "in fails" in caught.value.remote_traceback
    assert caught.value.stdout == "before\n"
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_another_python_is_told_before_anything_is_unpickled(runner: Runner, client: Shoal) -> None:
    """The check comes first: the pickle here would end the interpreter."""
    runner.edit = {"tmp/.shoal-call/python": "2.7\n", "tmp/.shoal-call/call.pkl": "not a pickle"}
    with pytest.raises(PythonMismatch) as caught:
        function(twice, image="code:1", client=client).remote(1)
    assert caught.value.there == "{}.{}".format(*sys.version_info[:2])


def test_a_result_is_never_unpickled_unless_trusted(client: Shoal) -> None:
    """A set is not JSON: an error by default, the object itself with trust_result."""
    with pytest.raises(ResultError, match="set"):
        function(lambda: {1, 2}, image="code:1", client=client).remote()
    assert function(lambda: {1, 2}, image="code:1", client=client, trust_result=True).remote() == {1, 2}


def test_a_forged_pickle_result_is_not_loaded(client: Shoal, tmp_path: Path, runner: Runner) -> None:
    """A sandbox that answers with a pickle where JSON was asked for cannot run code here."""
    proof = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (proof,))

    forged = b'{"kind": "value", "form": "pickle"}\n' + pickle.dumps(Bomb())
    code = f"import os; p = __import__('sys').argv; open(p[2], 'wb').write({forged!r})"
    runner.edit = {"tmp/.shoal-call/remote_call.py": code}
    with pytest.raises(ResultError):
        function(twice, image="code:1", client=client).remote(1)
    assert not proof.exists()
    with pytest.raises(ResultError):  # positive control below: loading it does touch the file
        function(twice, image="code:1", client=client, result="msgpack").remote(1)
    assert not proof.exists()
    function(twice, image="code:1", client=client, trust_result=True).remote(1)
    assert proof.exists()


def test_msgpack_carries_bytes(client: Shoal) -> None:
    """Its pure Python source goes along."""
    remote = function(
        lambda: {"raw": b"\x00\xff", 1: [2.5, None]}, image="code:1", client=client, result="msgpack"
    )
    assert remote.remote() == {"raw": b"\x00\xff", 1: [2.5, None]}


def test_a_process_that_dies_is_a_remote_error(client: Shoal) -> None:
    """No result file: the reason is told, nothing is guessed."""

    def dies() -> None:
        import os

        os._exit(3)

    with pytest.raises(RemoteError, match="exited with 3"):
        function(dies, image="code:1", client=client).remote()


def test_map_keeps_order_and_bounds_what_is_in_flight(client: Shoal) -> None:
    """Results come in the order of the items."""
    remote = function(scaled, image="code:1", client=client)
    assert list(remote.map(range(6), concurrency=3)) == [0, 3, 6, 9, 12, 15]
    flawed = function(lambda v: 1 // v, image="code:1", client=client)
    results = list(flawed.map([1, 0], return_exceptions=True))
    assert results[0] == 1
    assert isinstance(results[1], RemoteError)


async def test_the_aio_variants(runner: Runner) -> None:
    """`.remote.aio` and `.map.aio` use an AsyncShoal."""
    async with AsyncShoal(
        "http://127.0.0.1:1", "key", transport=httpx.MockTransport(runner.handle)
    ) as client:
        remote = function(scaled, image="code:1", async_client=client)
        assert await remote.remote.aio(2) == 6
        assert await remote.map.aio([1, 2]) == [3, 6]
        assert (await remote.invoke.aio(1)).value == 3


def test_a_remote_function_survives_pickling() -> None:
    """Ray and multiprocessing get the remote function, not the plain one."""
    remote = function(scaled, image="code:1", timeout_s=9.0)
    again = pickle.loads(pickle.dumps(remote))
    assert isinstance(again, RemoteFunction)
    assert again.image == "code:1"
    assert again(2) == 6


def test_options_reach_the_call(runner: Runner, client: Shoal) -> None:
    """Resources and time-outs of the decorator are in the request."""
    remote = function(scaled, image="code:1", client=client, resources={"memory_mib": 64}, timeout_s=5.0)
    remote.with_options(timeout_s=6.0).remote(1)
    assert runner.executes[0]["resources"] == {"memory_mib": 64}
    assert runner.executes[0]["timeout_s"] == 6.0
