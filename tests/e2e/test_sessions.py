"""A session from its creation to its journal, over HTTP, in real sandboxes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from shoal.contract.actions import ActionRecord

pytestmark = pytest.mark.root


@pytest.fixture
def session(client: httpx.Client) -> Iterator[str]:
    """A running session of `minimal:1`, ended afterwards."""
    response = client.post("/v1/sessions", json={"image": "minimal:1", "wait_s": 25, "run": "e2e"})
    assert response.status_code in (201, 202), response.text
    id = response.json()["id"]
    yield id
    assert client.delete(f"/v1/sessions/{id}", params={"wait_s": 20}).status_code == 200


def act(client: httpx.Client, session: str, action: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = client.post(f"/v1/sessions/{session}/actions", json={"action": action, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def exec_(client: httpx.Client, session: str, command: Any, **fields: Any) -> dict[str, Any]:
    return act(client, session, {"type": "exec", "command": command}, **fields)


def test_exec_tells_code_and_streams_apart(client: httpx.Client, session: str) -> None:
    """Exit code, stdout and stderr are exact; a failing command is 200."""
    record = exec_(client, session, "echo out; echo err >&2; exit 3")
    assert (record["status"], record["seq"], record["epoch"]) == ("done", 1, 1)
    seen = record["observation"]
    assert (seen["exit_code"], seen["stdout"], seen["stderr"]) == (3, "out\n", "err\n")


def test_an_action_sent_to_a_pending_session_just_works(client: httpx.Client) -> None:
    """Nobody has to poll for `running` first."""
    created = client.post("/v1/sessions", json={"image": "minimal:1", "wait_s": 0}).json()
    record = exec_(client, created["id"], ["true"])
    assert record["observation"]["exit_code"] == 0
    assert client.delete(f"/v1/sessions/{created['id']}").status_code in (200, 202)


def test_the_same_id_never_runs_twice(client: httpx.Client, session: str) -> None:
    """A repeat answers what was recorded; the same id with another action is refused."""
    command = "echo x >> /counter; wc -l < /counter"
    first = exec_(client, session, command, id="step-1")
    again = exec_(client, session, command, id="step-1")
    assert (first["replayed"], again["replayed"]) == (False, True)
    assert again["observation"] == first["observation"]
    assert exec_(client, session, "wc -l < /counter")["observation"]["stdout"].strip() == "1"
    response = client.post(
        f"/v1/sessions/{session}/actions",
        json={"id": "step-1", "action": {"type": "exec", "command": "false"}},
    )
    assert (response.status_code, response.json()["error"]["code"]) == (409, "action_conflict")


def test_a_timeout_keeps_the_output_and_kills_the_tree(client: httpx.Client, session: str) -> None:
    """`timed_out` is an observation; nothing of the tree lives on."""
    action = {"type": "exec", "command": "echo begun; (sleep 97 &) ; sleep 98", "timeout_s": 0.5}
    seen = act(client, session, action)["observation"]
    assert seen["timed_out"]
    assert seen["exit_code"] is None
    assert seen["stdout"] == "begun\n"
    assert "sleep 9" not in exec_(client, session, "ps")["observation"]["stdout"]


def test_long_work_is_polled(client: httpx.Client, session: str) -> None:
    """202 while it runs; the record then is the same for whoever asks."""
    body = {"id": "long", "action": {"type": "exec", "command": "sleep 1; echo done"}, "wait_s": 0}
    response = client.post(f"/v1/sessions/{session}/actions", json=body)
    assert (response.status_code, response.json()["status"]) == (202, "running")
    response = client.get(f"/v1/sessions/{session}/actions/long", params={"wait_s": 10})
    assert response.status_code == 200
    assert response.json()["observation"]["stdout"] == "done\n"
    waited = client.post(
        "/v1/actions:wait",
        json={"ids": [[session, "long"], [session, "nothing"]], "mode": "all", "wait_s": 0},
    ).json()
    assert waited["items"][0]["status"] == "done"
    assert waited["items"][1]["error"]["code"] == "not_found"


def test_output_streams_as_it_is_printed(client: httpx.Client, session: str) -> None:
    """Server-sent events, to the exit with the whole record."""
    body = {
        "id": "talk",
        "action": {"type": "exec", "command": "for i in 1 2 3; do echo $i; sleep 0.2; done"},
        "wait_s": 0,
    }
    client.post(f"/v1/sessions/{session}/actions", json=body)
    printed, record = "", None
    with client.stream("GET", f"/v1/sessions/{session}/actions/talk/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if kind == "stdout":
                    printed += data["data"]
                elif kind == "exit":
                    record = data
    assert printed == "1\n2\n3\n"
    assert record is not None
    assert record["observation"]["exit_code"] == 0


@pytest.mark.parametrize("id", ["task/1", "a/stream", "a:b@c=d+e"])
def test_ids_may_look_like_paths(client: httpx.Client, session: str, id: str) -> None:
    """An encoded slash belongs to the id, whatever follows it."""
    exec_(client, session, "echo hi", id=id)
    url = f"/v1/sessions/{session}/actions/{quote(id, safe='')}"
    assert client.get(url).json()["id"] == id
    assert client.get(f"{url}/stream").text.startswith(("event: stdout", ": stream"))
    assert client.delete(url).json()["error"]["code"] == "action_not_running"


def test_stdin_is_fed_and_closed(client: httpx.Client, session: str) -> None:
    """`stdin_open`, then POST .../stdin."""
    body = {
        "id": "cat",
        "action": {"type": "exec", "command": ["cat"], "stdin_open": True, "background": True},
        "wait_s": 0,
    }
    client.post(f"/v1/sessions/{session}/actions", json=body)
    url = f"/v1/sessions/{session}/actions/cat"
    assert client.post(f"{url}/stdin", json={"data": "a\n"}).status_code == 200
    assert client.post(f"{url}/stdin", json={"data": "b\n", "close": True}).status_code == 200
    assert client.get(url, params={"wait_s": 10}).json()["observation"]["stdout"] == "a\nb\n"


def test_files_go_in_and_out_as_bytes(client: httpx.Client, session: str) -> None:
    """Every byte value, and a size over any buffer on the way."""
    content = bytes(range(256)) * 40_000
    url = f"/v1/sessions/{session}/files"
    response = client.put(url, params={"path": "/data/blob", "mode": "640"}, content=content)
    assert response.status_code in (200, 201), response.text
    assert client.get(url, params={"path": "/data/blob"}).content == content
    seen = act(client, session, {"type": "read_file", "path": "/data/blob", "limit": 4})["observation"]
    assert (seen["size_bytes"], seen["mode"]) == (len(content), 0o640)


def test_a_misspelt_action_is_refused_with_its_path(client: httpx.Client, session: str) -> None:
    """The host validates what the relay does not parse; the answer has the same form."""
    response = client.post(
        f"/v1/sessions/{session}/actions", json={"action": {"type": "exec", "command": "true", "timeout": 1}}
    )
    assert response.status_code == 422
    assert "timeout" in json.dumps(response.json()["error"]["details"]["fields"])


def test_an_ended_session_keeps_its_trajectory_and_its_cause(client: httpx.Client) -> None:
    """From its journal, also single actions; new ones are refused with the cause."""
    id = client.post("/v1/sessions", json={"image": "minimal:1"}).json()["id"]
    for number in range(3):
        exec_(client, id, f"echo {number}", id=f"s{number}")
    response = client.delete(f"/v1/sessions/{id}", params={"wait_s": 20})
    assert (response.status_code, response.json()["state"]) == (200, "ended")
    assert response.json()["end"]["reason"] == "deleted"
    lines = client.get(f"/v1/sessions/{id}/trajectory").text.splitlines()
    records = [ActionRecord.model_validate_json(line) for line in lines]
    assert [(record.seq, record.id) for record in records] == [(1, "s0"), (2, "s1"), (3, "s2")]
    assert client.get(f"/v1/sessions/{id}/actions/s1").json()["observation"]["stdout"] == "1\n"
    response = client.post(f"/v1/sessions/{id}/actions", json={"action": {"type": "exec", "command": "true"}})
    assert (response.status_code, response.json()["error"]["code"]) == (410, "session_ended")
    assert client.delete(f"/v1/sessions/{id}").status_code == 200


def test_a_name_finds_its_session_again(client: httpx.Client) -> None:
    """Get-or-create: how a restarted trainer goes on."""
    body = {"image": "minimal:1", "run": "e2e", "name": f"task-{uuid.uuid4().hex}"}
    first = client.post("/v1/sessions", json=body)
    again = client.post("/v1/sessions", json=body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    listed = client.get("/v1/sessions", params={"run": "e2e", "name": body["name"]}).json()["sessions"]
    assert [one["id"] for one in listed] == [first.json()["id"]]
    client.delete(f"/v1/sessions/{first.json()['id']}")
    assert client.get("/v1/sessions", params={"run": "e2e", "name": body["name"]}).json()["sessions"] == []


def test_execute_needs_no_session(client: httpx.Client) -> None:
    """One call; the same id reads the same result and runs nothing."""
    body = {
        "id": f"x-{uuid.uuid4().hex}",
        "image": "minimal:1",
        "language": "sh",
        "code": "echo hello; date +%N > /out; exit 4",
        "output_files": ["/out", "/none"],
    }
    first = client.post("/v1/execute", json=body)
    assert first.status_code == 200, first.text
    seen = first.json()
    assert (seen["observation"]["exit_code"], seen["observation"]["stdout"]) == (4, "hello\n")
    assert seen["files"][0]["content"]
    assert seen["files"][1]["content"] is None
    again = client.post("/v1/execute", json=body).json()
    assert again["replayed"]
    assert again["files"] == seen["files"]


def test_a_snapshot_starts_a_group(client: httpx.Client, session: str) -> None:
    """What the session wrote is in every fork; they change apart."""
    exec_(client, session, "echo base > /f")
    response = client.post(f"/v1/sessions/{session}/snapshots", json={"wait_s": 25})
    assert response.status_code == 201, response.text
    snapshot = response.json()
    assert (snapshot["state"], snapshot["seq"]) == ("available", 1)
    group = client.post("/v1/sessions", json={"snapshot": snapshot["id"], "count": 4, "run": "fork"})
    assert group.status_code in (201, 202), group.text
    ids = [item["session"]["id"] for item in group.json()["sessions"]]
    for number, id in enumerate(ids):
        seen = exec_(client, id, f"echo {number} >> /f; cat /f")["observation"]
        assert seen["stdout"] == f"base\n{number}\n"
    deleted = client.post("/v1/sessions:delete", json={"run": "fork"}).json()
    assert set(deleted["ids"]) == set(ids)


def test_replace_throws_the_sandbox_away_and_says_what_is_lost(client: httpx.Client, session: str) -> None:
    """Next epoch, rewound until it is acknowledged; then the lost step runs anew."""
    exec_(client, session, "echo x > /f", id="w")
    replaced = client.post(f"/v1/sessions/{session}/replace", json={"from": "image", "wait_s": 25})
    assert replaced.status_code in (200, 202), replaced.text
    body = {"id": "w", "action": {"type": "exec", "command": "echo x > /f"}}
    response = client.post(f"/v1/sessions/{session}/actions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "session_rewound")
    assert response.json()["error"]["details"]["restored_seq"] == 0
    told = client.get(f"/v1/sessions/{session}").json()
    assert (told["epoch"], told["restored"]["lost_actions"]) == (2, ["w"])
    assert client.post(f"/v1/sessions/{session}/ack", json={"epoch": 2}).status_code == 200
    record = exec_(client, session, "echo x > /f", id="w")
    assert (record["epoch"], record["replayed"]) == (2, False)
    assert record["seq"] > 1


def test_recorded_steps_and_streams_are_answered_alike_while_a_session_ends_and_after(
    client: httpx.Client,
) -> None:
    """At every moment from the delete on: the same record, list and stream as the host told; nothing runs anew."""
    id = client.post("/v1/sessions", json={"image": "minimal:1"}).json()["id"]
    url = f"/v1/sessions/{id}/actions"
    one = {"id": "one", "action": {"type": "exec", "command": "echo out; echo err >&2", "env": {"KEY": "v"}}}
    many = {"id": "many", "actions": [{"type": "exec", "command": f"exit {n}"} for n in (0, 1, 2)]}
    first = [client.post(url, json=body).json() for body in (one, many)]
    assert (len(first[1]["actions"]), first[1]["skipped"]) == (2, 1)
    stream = client.get(f"{url}/one/stream").text
    read = ActionRecord.model_validate(client.get(f"{url}/one").json())

    def compare() -> None:
        for body, told in zip((one, many), first, strict=True):
            response = client.post(url, json=body)
            assert response.status_code == 200, response.text
            again = response.json()
            assert again.get("skipped") == told.get("skipped")
            for record, before in zip(
                again.get("actions", [again]), told.get("actions", [told]), strict=True
            ):
                assert record["replayed"]
                assert {**ActionRecord.model_validate(record).model_dump(), "replayed": False} == {
                    **ActionRecord.model_validate(before).model_dump()
                }
        assert ActionRecord.model_validate(client.get(f"{url}/one").json()) == read
        answer = client.get(f"{url}/one/stream").text
        events, expected = (
            [b for b in text.split("\n\n") if b.startswith("event: ")] for text in (answer, stream)
        )
        assert events[:-1] == expected[:-1]
        assert [event.splitlines()[:2] for event in events] == [event.splitlines()[:2] for event in expected]
        assert len(events) == 3

    compare()
    client.delete(f"/v1/sessions/{id}")
    compare()
    assert client.delete(f"/v1/sessions/{id}", params={"wait_s": 20}).json()["state"] == "ended"
    compare()
    response = client.post(url, json={"id": "two", "action": {"type": "exec", "command": "true"}})
    assert (response.status_code, response.json()["error"]["code"]) == (410, "session_ended")


def test_unknown_query_parameters_are_refused_and_nothing_is_done(client: httpx.Client, session: str) -> None:
    """A misspelt `mode` writes no file."""
    url = f"/v1/sessions/{session}/files"
    response = client.put(url, params={"path": "/tmp/f", "mdoe": "755"}, content=b"x")
    assert response.status_code == 422
    assert response.json()["error"]["details"]["fields"][0]["path"] == "query.mdoe"
    assert client.get(url, params={"path": "/tmp/f"}).status_code == 404


def test_what_ended_steps_left_running_is_killed_by_them(client: httpx.Client) -> None:
    """Children that live on fill the session's processes: commands then cannot fork, until an ended step is killed with
    what it left."""
    asked = {"image": "minimal:1", "resources": {"pids": 32, "memory_mib": 128}, "wait_s": 25}
    session = client.post("/v1/sessions", json=asked).json()["id"]
    seen: dict[str, Any] = {}
    for number in range(40):
        leave = {"type": "exec", "command": "sleep 1000 & sleep 1000 &"}
        seen = act(client, session, leave, id=f"leave-{number}")["observation"]
        if seen["exit_code"] != 0:
            break
    assert "fork" in seen["stderr"], seen
    for _ in range(2):
        answer = client.delete(f"/v1/sessions/{session}/actions/leave-0")
        assert answer.status_code in (200, 409), answer.text
    assert answer.json()["error"]["code"] == "action_not_running"
    done = act(client, session, {"type": "exec", "command": "sleep 1000 & echo on"}, id="on")
    assert done["observation"]["stdout"] == "on\n"
    client.delete(f"/v1/sessions/{session}")
