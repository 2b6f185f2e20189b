"""Steps in real sandboxes, through the agent's HTTP side."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.contract.actions import ActionRecord
from shoal.contract.base import MAX_WAIT_S
from shoal.contract.host import SandboxSource
from tests.integration.agent.harness import SMALL, AgentProcess, BoxHandle

pytestmark = pytest.mark.root


@pytest.fixture
async def box(agent: AgentProcess, source: SandboxSource) -> BoxHandle:
    """A running sandbox of the minimal image."""
    made = await agent.create(source)
    assert made.status["state"] == "running"
    return made


async def test_exit_codes_signals_and_streams_are_exact(box: BoxHandle) -> None:
    """stdout and stderr come apart, byte-exact; exit codes and signals are what they were."""
    seen = await box.sh("printf 'a\\0b'; printf '\\377' >&2; exit 7", encoding="base64")
    assert base64.b64decode(seen["stdout"]) == b"a\0b"
    assert base64.b64decode(seen["stderr"]) == b"\xff"
    assert (seen["exit_code"], seen["signal"]) == (7, None)
    seen = await box.sh("printf '\\377x'; kill -TERM $$")
    assert (seen["stdout"], seen["stdout_lossy"]) == ("\ufffdx", True)
    assert (seen["exit_code"], seen["signal"]) == (None, "TERM")


async def test_a_command_that_does_not_exist_is_an_observation(box: BoxHandle) -> None:
    """The platform did its part: 200, with the system's reason under `error`."""
    seen = await box.act("exec", command=["/no/such/program"])
    assert seen["error"]["errno"] == "ENOENT"
    assert seen["exit_code"] is None


async def test_env_cwd_user_and_stdin(box: BoxHandle) -> None:
    """The defaults of the contract, and what an action may change of them."""
    seen = await box.sh(
        "cat; pwd; id -u; echo $X $LANG $TZ $TERM; umask", stdin="in\n", env={"X": "y"}, cwd="/tmp"
    )
    assert seen["stdout"].splitlines() == ["in", "/tmp", "0", "y C.UTF-8 UTC dumb", "0022"]
    assert (await box.sh("cat"))["stdout"] == ""
    assert (await box.sh("id -u", user="65534"))["stdout"] == "65534\n"


async def test_environment_values_are_not_kept(box: BoxHandle, agent: AgentProcess) -> None:
    """Neither the answer, nor the journal, nor the log has them."""
    _, record = await box.post(
        id="e", action={"type": "exec", "command": "true", "env": {"TOKEN": "s3cr3t-value"}}
    )
    assert record["action"]["env"] == {"TOKEN": "***"}
    held = b"".join(path.read_bytes() for path in (agent.home / "journals").rglob("*") if path.is_file())
    assert held
    assert b"s3cr3t-value" not in held
    assert "s3cr3t-value" not in agent.log()


async def test_a_timeout_kills_the_whole_tree_and_keeps_the_output(box: BoxHandle) -> None:
    """Daemonised and setsid'ed children go too, long before they would end."""
    seen = await box.sh("echo before; setsid sleep 1000 & (sleep 1000 &) ; sleep 1000", timeout_s=0.5)
    assert (seen["timed_out"], seen["killed"]) == (True, True)
    assert (seen["exit_code"], seen["signal"], seen["stdout"]) == (None, "KILL", "before\n")
    assert "sleep" not in (await box.sh("ps"))["stdout"]


async def test_what_a_leader_leaves_running_lives_on(box: BoxHandle) -> None:
    """`cmd &` returns at once, and the child is there afterwards."""
    await box.sh("sleep 1000 &")
    assert "sleep 1000" in (await box.sh("ps"))["stdout"]


async def test_steps_run_one_after_another_and_parallel_ones_do_not_wait(box: BoxHandle) -> None:
    """Arrival order, seq at start; `parallel` opts out."""
    first = asyncio.create_task(box.post(id="a", action={"type": "exec", "command": "sleep 0.4; date +%N"}))
    while (await box.get("/actions/a"))[0] == 404:
        await asyncio.sleep(0.01)
    second = asyncio.create_task(box.post(id="b", action={"type": "exec", "command": "true"}))
    _, third = await box.post(id="c", parallel=True, action={"type": "exec", "command": "true"})
    assert third["status"] == "done"
    assert not first.done()
    (_, one), (_, two) = await first, await second
    assert one["finished_at"] <= two["started_at"]
    assert [one["seq"], third["seq"], two["seq"]] == [1, 2, 3]


async def test_a_list_stops_at_the_first_failure(box: BoxHandle) -> None:
    """...and what came after did not run; `keep_going` goes on; the same list again is answered from the record."""
    steps = [{"type": "exec", "command": f"echo {n}; exit {n == 1:d}"} for n in range(3)]
    status, made = await box.post(id="l", actions=steps)
    assert (status, made["status"], made["skipped"]) == (200, "done", 1)
    assert [record["id"] for record in made["actions"]] == ["l.0", "l.1"]
    _, again = await box.post(id="l", actions=steps)
    assert all(record["replayed"] for record in again["actions"])
    assert again["skipped"] == 1
    _, all_of_it = await box.post(id="k", actions=steps, keep_going=True)
    assert [record["observation"]["exit_code"] for record in all_of_it["actions"]] == [0, 1, 0]


async def test_background_answers_at_once_and_can_be_polled_fed_and_killed(box: BoxHandle) -> None:
    """A background command is a durable resource: offsets, stdin, kill."""
    status, record = await box.post(
        id="bg", action={"type": "exec", "command": "echo up; cat", "background": True, "stdin_open": True}
    )
    assert (status, record["status"]) == (202, "running")
    assert (await box.sh("echo other"))["stdout"] == "other\n"
    base = f"/v1/sessions/{box.session}/actions/bg"
    await box.agent.call("POST", base + "/stdin", token=box.token, body={"data": "more\n"})
    seen, offset = "", 0
    while seen != "up\nmore\n":
        _, record = await box.get(f"/actions/bg?stdout_offset={offset}&wait_s=0.1")
        seen += record["observation"]["stdout"]
        offset = record["stdout_offset"]
    _, ended = await box.agent.call("DELETE", base, token=box.token)
    assert ended["observation"]["killed"]
    assert ended["observation"]["stdout"] == "up\nmore\n"
    status, refused = await box.agent.call("DELETE", base, token=box.token)
    assert (status, refused["error"]["code"]) == (409, "action_not_running")


async def test_output_past_the_cap_keeps_head_and_tail(box: BoxHandle) -> None:
    """The command runs on; totals tell what was dropped."""
    seen = await box.sh("seq 1 100000", output_limit_bytes=1000)
    assert seen["truncated"]
    assert seen["stdout"].startswith("1\n2\n")
    assert seen["stdout"].endswith("99999\n100000\n")
    assert seen["stdout_bytes"] == 588895
    assert seen["stdout_dropped_bytes"] == 588895 - 1000


async def test_out_of_memory_is_told_and_survived(box: BoxHandle) -> None:
    """The limit kills the command, not the session; and an action that fails for itself is not blamed on memory."""
    seen = await box.sh("tail /dev/zero")
    assert seen["oom_killed"]
    assert seen["signal"] == "KILL" or seen["exit_code"] == 137
    seen = await box.sh("exit 1")
    assert not seen["oom_killed"]


async def test_a_fork_bomb_hits_the_limit_of_processes_only(box: BoxHandle) -> None:
    """The bomb is killed at its time-out, and the sandbox works on."""
    await box.sh("b() { b | b & }; b; sleep 5", timeout_s=1)
    assert (await box.sh("echo fine"))["stdout"] == "fine\n"


async def test_a_stream_resumes_where_it_was_cut(box: BoxHandle) -> None:
    """Events carry offsets; Last-Event-ID goes on after them, also when the step has ended."""
    await box.post(
        id="st", wait_s=0, action={"type": "exec", "command": "echo one; echo two >&2; sleep 0.3; echo three"}
    )
    events = await _stream(box, "st")
    text = "".join(json.loads(data)["data"] for kind, _, data in events if kind == "stdout")
    assert text == "one\nthree\n"
    kind, last_id, data = events[-1]
    assert kind == "exit"
    assert ActionRecord.model_validate_json(data).status == "done"
    first_id = next(id for kind, id, _ in events if kind == "stdout")
    rest = await _stream(box, "st", first_id)
    assert "".join(json.loads(data)["data"] for kind, _, data in rest if kind == "stdout") == "three\n"
    assert rest[-1][1] == last_id


async def _stream(box: BoxHandle, id: str, last: str | None = None) -> list[tuple[str, str, str]]:
    headers = {"authorization": f"Bearer {box.token}", **({"last-event-id": last} if last else {})}
    url = f"{box.agent.address}/v1/sessions/{box.session}/actions/{id}/stream"
    async with box.agent.http.get(url, headers=headers) as answer:
        assert answer.content_type == "text/event-stream"
        raw = (await answer.read()).decode()
    events = []
    for block in raw.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append((fields["event"], fields["id"], fields["data"]))
    return events


async def test_a_named_shell_keeps_its_state_and_restarts_after_a_kill(box: BoxHandle) -> None:
    """cwd, variables, functions live on; a time-out ends the shell, and the next command says so."""
    await box.sh("cd /tmp; X=1; f() { echo f$X; }", shell="main")
    assert (await box.sh("f; pwd", shell="main"))["stdout"] == "f1\n/tmp\n"
    seen = await box.sh("sleep 100", shell="main", timeout_s=0.3)
    assert seen["timed_out"]
    seen = await box.sh("echo ${X:-gone}", shell="main")
    assert (seen["stdout"], seen["shell_restarted"]) == ("gone\n", True)


async def test_a_terminal_can_be_resized(box: BoxHandle) -> None:
    """stdout and stderr are one stream then; the size is what was asked, then what was set."""
    action = {"type": "exec", "command": "stty size; read x; stty size", "tty": {"rows": 10, "cols": 40}}
    await box.post(id="tty", wait_s=0, action={**action, "background": True, "stdin_open": True})
    base = f"/v1/sessions/{box.session}/actions/tty"
    while "10 40" not in (await box.get("/actions/tty"))[1].get("observation", {}).get("stdout", ""):
        await asyncio.sleep(0.02)
    status, _ = await box.agent.call("POST", base + "/resize", token=box.token, body={"rows": 20, "cols": 50})
    assert status == 200
    await box.agent.call("POST", base + "/stdin", token=box.token, body={"data": "\n"})
    _, record = await box.get("/actions/tty?wait_s=5")
    assert "20 50" in record["observation"]["stdout"]


async def test_run_code_without_its_interpreter_says_so(box: BoxHandle) -> None:
    """The minimal image has no Python and no compiler: an observation each."""
    assert (await box.act("run_code", code="print(1)"))["error"]["errno"] == "ENOENT"
    assert (await box.act("run_code", language="c", code="int main(){}"))["error"]["errno"] == "ENOENT"
    seen = await box.act(
        "run_code",
        language="sh",
        code="cat f $1",
        args=["g"],
        files=[{"path": "f", "content": "F"}, {"path": "g", "content": "Rw==", "encoding": "base64"}],
    )
    assert seen["stdout"] == "FG"


async def test_bodies_are_validated_strictly(box: BoxHandle) -> None:
    """Unknown fields are refused with their path; later parts of the contract answer 501."""
    status, refused = await box.post(action={"type": "exec", "command": "true", "wrong": 1})
    assert (status, refused["error"]["code"]) == (422, "invalid_request")
    assert any("wrong" in field["path"] for field in refused["error"]["details"]["fields"])
    wrong = {"type": "write_file", "path": "x", "content": "no base64!", "encoding": "base64"}
    status, refused = await box.post(action=wrong)
    assert (status, refused["error"]["details"]["fields"][0]["path"]) == (422, "action.content")
    status, refused = await box.post(action={"type": "http", "port": 80})
    assert (status, refused["error"]["code"]) == (501, "not_implemented")
    status, refused = await box.post(epoch=2, action={"type": "exec", "command": "true"})
    assert (status, refused["error"]["code"]) == (409, "epoch_mismatch")
    assert (await box.get("/actions/none"))[0] == 404


async def test_tokens_open_only_what_they_are_for(box: BoxHandle) -> None:
    """Other epoch, other session, other host, control for session, read only, none: refused each."""
    path = f"/v1/sessions/{box.session}/actions"
    control = box.agent.control
    body = {"action": {"type": "exec", "command": "true"}}
    for token, code in (
        (control.token(session=box.session, epoch=2), "token_refused"),
        (control.token(session="ses_other", epoch=1), "token_refused"),
        (control.token(session=box.session, epoch=1, aud="hst_other"), "token_refused"),
        (control.token(session=box.session, epoch=1, exp=int(time.time()) + 3600), "token_refused"),
        (control.token(session=box.session, epoch=1, exp=int(time.time()) - 60), "token_refused"),
        (control.token(kind="control", session=box.session), "token_refused"),
        (control.token(session=box.session, epoch=1, scp=["read"]), "forbidden"),
    ):
        status, refused = await box.agent.call("POST", path, token=token, body=body)
        assert refused["error"]["code"] == code, status
    status, refused = await box.agent.call("GET", f"/v1/sandboxes/{box.session}", token=box.token)
    assert refused["error"]["code"] == "forbidden"


async def test_long_polls_answer_202_when_there_is_nothing_yet(box: BoxHandle) -> None:
    """A step that takes longer than the wait goes on, and is joined under its id."""
    status, record = await box.post(
        id="slow", wait_s=0.1, action={"type": "exec", "command": "sleep 0.5; echo x"}
    )
    assert (status, record["status"]) == (202, "running")
    status, record = await box.post(
        id="slow", wait_s=MAX_WAIT_S, action={"type": "exec", "command": "sleep 0.5; echo x"}
    )
    assert (status, record["observation"]["stdout"]) == (200, "x\n")


async def test_a_burst_of_steps_over_sessions(agent: AgentProcess, source: SandboxSource) -> None:
    """Many sessions at once, each with its own answers."""
    boxes = await asyncio.gather(*(agent.create(source, resources=SMALL) for _ in range(8)))

    async def drive(box: BoxHandle) -> list[Any]:
        return [(await box.sh(f"echo {box.session}-{n}"))["stdout"] for n in range(10)]

    for box, seen in zip(boxes, await asyncio.gather(*(drive(box) for box in boxes)), strict=True):
        assert seen == [f"{box.session}-{n}\n" for n in range(10)]


async def test_files_and_diff(box: BoxHandle, root: Path) -> None:
    """File actions without any program of the sandbox; `diff` tells what they did, since the start or a snapshot."""
    await box.act("write_file", path="d/x.txt", content="one\ntwo\nthree\n", mode=0o600)
    seen = await box.act("read_file", path="d/x.txt", lines=[2, -1])
    assert (seen["content"], seen["total_lines"], seen["mode"]) == ("two\nthree\n", 3, 0o600)
    seen = await box.act("edit_file", path="d/x.txt", old="o", new="0", occurrences=1)
    assert (seen["replacements"], seen["found"]) == (0, 2)
    seen = await box.act("edit_file", path="d/x.txt", old="two", new="2")
    assert "+2" in seen["diff"]
    seen = await box.act("read_file", path="/etc/nothing")
    assert seen["error"]["errno"] == "ENOENT"
    assert "d/x.txt" in [
        entry["path"] for entry in (await box.act("list_files", path=".", depth=2))["entries"]
    ]
    seen = await box.act("search", path="/workspace", pattern="^thr")
    assert [(match["line"], match["text"]) for match in seen["matches"]] == [(3, "three")]
    snapshot = (await box.snapshot())["snapshot"]
    await box.sh("rm d/x.txt; echo new > y")
    seen = await box.act("diff")
    assert {"workspace/d", "workspace/y"} <= set(seen["added"])
    seen = await box.act("diff", since=snapshot)
    assert (seen["added"], seen["removed"]) == (["workspace/y"], ["workspace/d/x.txt"])


async def test_a_search_that_never_ends_is_stopped(box: BoxHandle) -> None:
    """A pattern that backtracks without end costs its time-out and nothing else."""
    await box.act("write_file", path="a", content="a" * 40 + "!")
    seen = await box.act("search", path=".", pattern="(a+)+$", timeout_s=0.5)
    assert seen["timed_out"]
    assert (await box.sh("echo ok"))["stdout"] == "ok\n"
